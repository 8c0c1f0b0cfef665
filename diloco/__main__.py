"""`python -m diloco` is `diloco`."""

from diloco.cli.app import main

main()

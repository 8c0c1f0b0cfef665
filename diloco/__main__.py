"""`python -m diloco` is `diloco`."""

from diloco.cli import main

main()

"""The verbs of the command line, one file each; diloco/cli.py loads the one that is called."""

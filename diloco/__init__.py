"""The training process and the command line."""

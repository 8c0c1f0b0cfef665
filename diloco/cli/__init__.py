"""The command line: one file for each command.

Start with app.py, which loads the command that is called. reference.py and help_pages.py generate the documentation of
the flags.
"""

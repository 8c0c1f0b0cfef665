"""The command line: one file for each verb.

Start with app.py, which loads the verb that is called. reference.py and help_pages.py write what is said of flags.
"""

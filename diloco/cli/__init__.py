"""The command line: one file for each verb. Start with app.py, which loads the one that is called."""

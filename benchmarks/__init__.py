"""Every performance claim, one command each, JSON out."""

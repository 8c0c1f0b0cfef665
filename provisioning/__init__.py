"""The operator's machine: renting pods and running things on them."""

"""How many workers a deployment needs."""

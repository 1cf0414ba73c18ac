"""A simulated engine: a pure model in virtual time, and the server that drives it."""

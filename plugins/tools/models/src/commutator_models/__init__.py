"""The command `commutator models`."""

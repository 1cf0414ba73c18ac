"""The commands `commutator models` and `commutator size`."""

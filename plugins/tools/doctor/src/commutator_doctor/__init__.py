"""The command `commutator doctor`."""

"""The ``commutator`` command."""

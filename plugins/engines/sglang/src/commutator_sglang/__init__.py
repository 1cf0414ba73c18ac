"""Connects Commutator to SGLang: launches its servers or attaches to them, unmodified."""

"""Connects Commutator to vLLM: launches its servers or attaches to them, unmodified."""

"""``commutator kv``: the KV blocks in storage tiers."""

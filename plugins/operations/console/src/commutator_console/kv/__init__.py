"""``commutator kv``: the KV blocks in storage tiers, asked of workers through a front door."""

"""How KV bytes move: every one of them through NIXL, from here and nowhere else."""

"""``commutator planner``: the commands, and how plans read."""

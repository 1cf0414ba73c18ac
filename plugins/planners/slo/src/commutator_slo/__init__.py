"""The planner `slo`: sizes a fleet of workers to latency targets."""

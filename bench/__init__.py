"""Benchmarks: every figure stands beside a peer or a physical limit, measured in the same run."""

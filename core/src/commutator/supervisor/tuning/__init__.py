"""Tunes options of a running deployment: proposes values by replays, and tries them."""

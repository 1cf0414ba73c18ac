"""Processes: what starts, watches and ends them, and the ports that they listen at."""

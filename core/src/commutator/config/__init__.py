"""The configuration: its classes, reading and merging its sources, and checking it."""

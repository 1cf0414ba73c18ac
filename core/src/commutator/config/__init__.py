"""The configuration file: its classes, where values come from, and how mistakes are told."""

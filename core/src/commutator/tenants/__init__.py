"""How much principals use: their limits, counted once for all front doors, and the audit log."""

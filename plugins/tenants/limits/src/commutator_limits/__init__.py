"""Limits of principals, counted in a ledger that all front doors of a deployment share."""

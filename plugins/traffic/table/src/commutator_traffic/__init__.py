"""Which model serves a request: aliases, shares of versions, and fall-backs."""

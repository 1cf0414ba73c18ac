"""Storage tiers at work: each tier has its own thread, which moves the tier's blocks."""

"""Who sends a request, and what its rights allow. Core brings the authenticator `keys`."""

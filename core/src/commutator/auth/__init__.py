"""Who sends a request, and what its rights allow; the authenticator of API keys."""

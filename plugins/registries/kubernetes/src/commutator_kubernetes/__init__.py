"""Workers on Kubernetes: a registry in the API server."""

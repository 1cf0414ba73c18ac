"""Deployments as Kubernetes objects, and deployments of other servers as configurations."""

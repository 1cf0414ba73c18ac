"""Commands for clusters of several hosts: their certificates, their workers."""

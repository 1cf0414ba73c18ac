"""Commands to begin with: a first configuration, a demonstration, a package for a plugin."""

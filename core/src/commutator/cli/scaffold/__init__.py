"""Commands that write files: a configuration, a plugin's package, a completion script."""

"""Commands that write files to start from: a configuration, a plugin's package."""

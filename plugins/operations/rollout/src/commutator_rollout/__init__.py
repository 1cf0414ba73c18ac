"""Changes a running deployment: what should run, and the steps that lead there."""

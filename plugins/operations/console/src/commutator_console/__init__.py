"""The live view of a deployment: a feed of snapshots, a page and a terminal view that show it."""

"""A small Llama-family inference engine in PyTorch: the executable form of the engine contract."""

"""TensorRT-LLM for Commutator: the connector, and the sidecar that reads a server's queues."""

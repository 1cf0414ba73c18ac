"""The event bus `nats`: KV events over NATS servers."""

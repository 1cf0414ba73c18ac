"""Encoders: embeddings, scores and classes."""

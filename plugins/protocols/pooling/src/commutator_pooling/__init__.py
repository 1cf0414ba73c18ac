"""Rerank, score, classify and pool: the forms of Cohere, Jina and vLLM."""

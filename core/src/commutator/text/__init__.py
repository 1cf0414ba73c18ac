"""Text to tokens and back: a model's tokenizer and chat template, streams of either into other."""

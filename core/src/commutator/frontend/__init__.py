"""The OpenAI front door: HTTP in, tokens to the workers, text back."""

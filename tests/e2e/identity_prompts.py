"""Fifty prompts of many kinds and lengths for the token-identity test."""

from __future__ import annotations

PARAGRAPH = (
    "The canal was dug by hand over eleven years, and the town grew along it: first the lock "
    "keepers, then the mill, the inn and the school. When the railway came, the barges stopped. "
)
CODE = """
def moving_average(values, width):
    total, result = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        result.append(total / min(index + 1, width))
    return result
"""
TOPICS = ("rivers", "bread", "maps", "winter", "clocks", "bees", "glass", "bridges")


def chat(question: str) -> str:
    """The model's own chat format."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


PROMPTS: tuple[str, ...] = (
    "A",
    "1",
    "The",
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "In 1969, the first human being walked on the",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "1, 1, 2, 3, 5, 8, 13,",
    "Monday, Tuesday, Wednesday,",
    "def fibonacci(n):\n",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "<html>\n  <head>\n    <title>",
    '{"name": "Ada", "born": 1815, "known_for": "',
    "#!/bin/bash\nset -e\nfor file in *.txt; do\n",
    "Héllo, ça va très bien, et toi ?",
    "Die Hauptstadt von Deutschland ist",
    "El gato se sentó en la",
    "日本の首都は",
    "Москва — столица",
    "🙂🙃🙂🙃",
    "The price rose from $1,234.50 to",
    "E = mc^2 means that",
    "To be, or not to be, that is",
    "Ingredients: 200 g flour, 2 eggs, 1 pinch of salt.\nMethod:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "la la la la la la la la",
    "Theorem. There are infinitely many primes.\nProof.",
    "    indented\n        more\n",
    chat("What is the capital of France?"),
    chat("Write a haiku about the sea."),
    chat("Count from one to ten."),
    chat("Explain gravity to a child."),
    chat("What is 12 times 12?"),
    *(f"An essay about {topic}.\n\n{PARAGRAPH * 2}On {topic}," for topic in TOPICS),
    PARAGRAPH * 4 + "In the end,",
    PARAGRAPH * 8 + "The inn",
    CODE + "\n\ndef median(values):\n",
    CODE * 4 + "\n\ndef variance(values):\n",
    chat(PARAGRAPH * 12 + "Summarise this."),
    "A long list: " + ", ".join(str(number) for number in range(150)) + ",",
)
assert len(PROMPTS) >= 50, len(PROMPTS)

"""How much of a beginning that prompts share is not tokenized again."""

from __future__ import annotations

from itertools import takewhile
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokenizers import encoder, tokenizers_by_name

from commutator.tokenizer.cut_points import cut_points_of
from commutator.tokenizer.prompt_cache import PromptTokenCache

SHORTEST_CHUNK = 200
"""In characters, as all numbers here; chunks are no longer in prompts of less than 10,000."""
NEVER_KEPT = 800
"""An end that is shorter is kept only when a later prompt goes on from it."""
LONGEST_WORD = 12


def _words(seed: int, characters: int) -> str:
    chance = Random(seed)
    words = ("a", "fox", "jumps", "quietly", "2026,", "interesting")
    return " ".join(chance.choices(words, k=characters))[:characters]


def _shared(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 6_000), st.integers(0, 3_000)), max_size=8
    )
)
def test_all_but_the_end_of_a_shared_beginning_is_known(
    requests: list[tuple[int, int, int]],
) -> None:
    tokenizer = tokenizers_by_name()["gpt2"]
    cache = PromptTokenCache(encoder("gpt2"), cut_points_of(tokenizer), 1 << 22)
    prompts = [""]
    for seed, (earlier, shared, new) in enumerate(requests):
        text = prompts[-1 - earlier % len(prompts)][:shared] + _words(seed, new)
        found = cache.look_up(text, add_special_tokens=True)
        most = max(_shared(text, prompt) for prompt in prompts)
        assert found.known_characters >= most - NEVER_KEPT - SHORTEST_CHUNK - LONGEST_WORD
        assert found.known_characters <= most
        assert len(found.path) <= found.known_characters / SHORTEST_CHUNK  # bounds the work
        prompt = cache.complete(found)
        known = tokenizer.encode(text[: found.known_characters], add_special_tokens=False).ids
        assert prompt.hit_tokens == len(known)
        assert list(prompt.token_ids) == tokenizer.encode(text).ids
        prompts.append(text)

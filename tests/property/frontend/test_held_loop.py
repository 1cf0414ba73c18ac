"""No request, however built, holds the event loop of a front door for more than 50 ms.

On a machine that is slower than that of the documented figures it may be as much more.
"""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import requests
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door
from tests.support.loop_watch import LoopWatch, serving_in_a_thread, times_slower

from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.launcher.child import calm_garbage_collector

pytestmark = [pytest.mark.security, pytest.mark.slow]

LONGEST_S = 0.05 * times_slower()
TRIES = 3
"""What a request does, it does each time; what else the machine did meanwhile, it does not."""
MOST_BYTES = 8 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE, EMBEDDINGS = "/tokenize", "/detokenize", "/v1/embeddings"

Served = tuple[FrontDoor, LoopWatch]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A front door whose workers answer 2,000 tokens at once, in many deltas."""
    script = answer("An answer, 日本語 😀. " * 250, tokens_per_delta=20)
    made: dict[tuple[int | None, int], Sequence[TokenDelta | Exception]] = {}

    def known(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        """Made once, as making it is not the front door's work."""
        key = (request.sampling.top_logprobs, min(request.sampling.max_tokens, 2_000))
        if key not in made:
            short = evolve(request, sampling=evolve(request.sampling, max_tokens=key[1]))
            made[key] = script(short)
        return made[key]

    for top in (None, 0, 5, 20):
        known(GenerateRequest(
            request_id="", token_ids=[1],
            sampling=SamplingParams(max_tokens=2_000, top_logprobs=top),
        ))  # fmt: skip
    dispatcher = FakeDispatcher(known, block_size=16)
    calm_garbage_collector()  # as front doors do
    with serving_in_a_thread(lambda: front_door(dispatcher)) as (door, watch):
        requests.get(f"{door.url}/live", timeout=30)
        for body in (hi(), hi(stream=True), hi(logprobs=True, top_logprobs=5)):
            requests.post(door.url + CHAT, json=body, timeout=30)  # imports, caches
        yield door, watch
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)


def hi(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more}


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": list(messages), **more}).encode()


def prompt(given: Any, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": given, **more}).encode()


def raw(head: str, part: str, end: str, size: int = MOST_BYTES) -> bytes:
    """``part`` as often as fits into the largest body."""
    times = (size - len(head) - len(end)) // len(part)
    return (head + part * times).encode().rstrip(b",") + end.encode()


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


IN_CHAT = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hi"}}], '
MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = "The quick brown fox jumps over the lazy dog. "

REQUESTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists of nothing": (CHAT, lambda: raw('{"messages": [', "[],", "]}")),
    "lists of nothing in an unknown key": (CHAT, lambda: raw(IN_CHAT + '"odd": [', "[],", "]}")),
    "lists of nothing in tools": (CHAT, lambda: raw(IN_CHAT + '"tools": [', "[],", "]}")),
    "lists, just few enough": (CHAT, lambda: raw(IN_CHAT + '"tools": [', "[],", "]}", 149_000)),
    "zeros": (CHAT, lambda: raw(IN_CHAT + '"tools": [', "0,", "]}")),
    "keys": (
        CHAT,
        lambda: json.dumps(hi(logit_bias={str(n): 1 for n in range(500_000)})).encode(),
    ),
    "unknown keys": (CHAT, lambda: json.dumps({f"k{n}": n for n in range(400_000)}).encode()),
    "depth": (CHAT, lambda: raw(IN_CHAT + '"tools": ', "[", "")),
    "depth, small": (CHAT, lambda: raw(f'{IN_CHAT}"tools": ', "[", "]" * 900 + "}", 2_000)),
    "quotes": (CHAT, lambda: raw('{"messages": [', '"",', "]}")),
    "escapes": (CHAT, lambda: raw('{"messages": "', '\\"', '"}')),
    "a number": (CHAT, lambda: raw('{"n": 1', "0", "}")),
    "spaces": (CHAT, lambda: raw("{", " ", "}")),
    "messages": (CHAT, lambda: chat(*[user("")] * 8192)),
    "too many messages": (
        CHAT,
        lambda: raw('{"messages": [', '{"role":"user","content":""},', "]}"),
    ),
    "wrong messages": (CHAT, lambda: chat(*[{"role": "nobody", "content": [{}] * 20}] * 1500)),
    "parts": (CHAT, lambda: chat(user([{"type": "text", "text": "a"}] * 8192))),
    "a long message": (CHAT, lambda: chat(user(TEXT * 20_000))),
    "the longest message": (CHAT, lambda: chat(user("a" * (MOST_BYTES - 100)))),
    "marks": (CHAT, lambda: chat(*[user(TEXT * 100, **MARK)] * 4)),
    "too many marks": (CHAT, lambda: chat(user([{"type": "text", "text": "a", **MARK}] * 8000))),
    "template variables": (
        CHAT,
        lambda: json.dumps(hi(chat_template_kwargs={"documents": [{"text": "a"}] * 8000})).encode(),
    ),
    "many template variables": (
        CHAT,
        lambda: json.dumps(hi(chat_template_kwargs={f"v{n}": 1 for n in range(100_000)})).encode(),
    ),
    "logit bias": (
        CHAT,
        lambda: json.dumps(hi(logit_bias={str(n): 1 for n in range(1024)})).encode(),
    ),
    "stops": (
        CHAT,
        lambda: json.dumps(hi(stop=["a" * 511 + chr(98 + n) for n in range(16)])).encode(),
    ),
    "many stops": (CHAT, lambda: json.dumps(hi(stop=["a"] * 500_000)).encode()),
    "stop tokens": (CHAT, lambda: json.dumps(hi(stop_token_ids=list(range(900_000)))).encode()),
    "a schema": (
        CHAT,
        lambda: json.dumps(
            hi(
                response_format={
                    "type": "json_schema",
                    "json_schema": {f"k{n}": {"type": "string"} for n in range(40_000)},
                }
            )
        ).encode(),
    ),
    "answers": (CHAT, lambda: json.dumps(hi(n=128, stream=True)).encode()),
    "answers at once": (CHAT, lambda: json.dumps(hi(n=128)).encode()),
    "explained answers": (CHAT, lambda: json.dumps(hi(n=128, max_tokens=1)).encode()),
    "logprobs": (CHAT, lambda: json.dumps(hi(n=8, logprobs=True, top_logprobs=20)).encode()),
    "many logprobs": (CHAT, lambda: json.dumps(hi(n=128, logprobs=True, top_logprobs=20)).encode()),
    "many streamed logprobs": (
        CHAT,
        lambda: json.dumps(hi(n=128, logprobs=True, top_logprobs=20, stream=True)).encode(),
    ),
    "many completion logprobs": (COMPLETIONS, lambda: prompt("a", n=128, logprobs=20)),
    "streamed logprobs": (
        CHAT,
        lambda: json.dumps(hi(n=8, logprobs=True, top_logprobs=20, stream=True)).encode(),
    ),
    "a label": (CHAT, lambda: json.dumps(hi(user="u" * 8_000_000)).encode()),
    "a salt": (CHAT, lambda: json.dumps(hi(cache_salt="s" * 8_000_000)).encode()),
    "prompts": (COMPLETIONS, lambda: prompt([TEXT * 50] * 256)),
    "too many prompts": (COMPLETIONS, lambda: raw('{"prompt": [', '"a",', "]}")),
    "token ids": (COMPLETIONS, lambda: prompt([7] * 1_000_000)),
    "too many token ids": (COMPLETIONS, lambda: raw('{"prompt": [', "7,", "]}")),
    "long prompts of token ids": (COMPLETIONS, lambda: prompt([[7] * 2000] * 256, max_tokens=1)),
    "echo": (COMPLETIONS, lambda: prompt([[7] * 2000] * 2, echo=True, n=128, max_tokens=1)),
    "echoed text": (COMPLETIONS, lambda: prompt(TEXT * 100, echo=True, n=128, stream=True)),
    "completion logprobs": (COMPLETIONS, lambda: prompt("a", n=8, logprobs=20)),
    "a prompt of spaces": (COMPLETIONS, lambda: prompt(" " * 8_000_000)),
    "a prompt of one word": (COMPLETIONS, lambda: prompt("a" * 300_000)),
    "a wrong prompt": (COMPLETIONS, lambda: prompt([[TEXT] * 1000] * 40)),
    "a text to tokenize": (TOKENIZE, lambda: prompt(TEXT * 40_000)),
    "a text to show": (TOKENIZE, lambda: prompt(TEXT * 40_000, return_token_strs=True)),
    "tokens to read": (DETOKENIZE, lambda: json.dumps({"tokens": [7] * 1_000_000}).encode()),
    "embeddings": (EMBEDDINGS, lambda: json.dumps({"input": ["a"] * 900_000}).encode()),
    "embeddings of lists": (EMBEDDINGS, lambda: raw('{"input": [', "[],", "]}")),
}


def ask(served: Served, path: str, body: bytes, **headers: str) -> float:
    """Send a request, and return the longest turn of the loop meanwhile.

    One that is too long is measured again.
    """
    door, watch = served
    given = {"Content-Type": "application/json", **headers}
    longest_s = LONGEST_S
    for _ in range(TRIES):
        watch.reset()
        with requests.post(
            door.url + path, data=body, headers=given, timeout=120, stream=True
        ) as sent:
            for _ in sent.iter_content(1 << 20):
                pass
            assert sent.status_code < 500, sent.status_code
        if (longest_s := watch.longest_s()) < LONGEST_S:
            break
    return longest_s


@pytest.mark.parametrize("name", REQUESTS)
def test_the_largest_of_their_kind(served: Served, name: str) -> None:
    path, make = REQUESTS[name]
    body = make()
    assert len(body) <= MOST_BYTES
    headers = {"X-Commutator-Explain": "1"} if "explained" in name else {}
    assert ask(served, path, body, **headers) < LONGEST_S


def test_a_body_that_grows_when_it_is_unpacked(served: Served) -> None:
    bomb = gzip.compress(b" " * (256 << 20))
    assert ask(served, CHAT, bomb, **{"Content-Encoding": "gzip"}) < LONGEST_S


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "conversation": st.tuples(
        st.text(max_size=40), st.integers(1, 20_000), st.integers(1, 400), st.booleans()
    ).filter(lambda made: (6 * len(made[0]) * made[1] + 100) * made[2] < 7_000_000),
    "stop": st.lists(st.text(min_size=1, max_size=512), max_size=16),
    "logit_bias": st.dictionaries(st.integers(0, 40_000).map(str), st.integers(-9, 9)),
    "n": st.integers(1, 128),
    "max_tokens": st.integers(1, 400),
    "stream": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=9), st.text(max_size=2_000)),
    "tools": st.lists(st.dictionaries(st.text(max_size=9), st.lists(st.integers())), max_size=9),
    "cache_salt": st.text(max_size=300),
}  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.fixed_dictionaries({}, optional=FIELDS))
def test_any_mixture(served: Served, body: dict[str, Any]) -> None:
    sent = {**hi(logprobs="top_logprobs" in body), **body}
    if conversation := sent.pop("conversation", None):  # made here: a failing example stays short
        text, times, count, marked = conversation
        sent["messages"] = [user(text * times, **(MARK if marked else {}))] * count
    assert ask(served, CHAT, json.dumps(sent).encode()) < LONGEST_S

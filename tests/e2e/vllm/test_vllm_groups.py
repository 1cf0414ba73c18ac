"""Tiers in real vLLM servers of tiny models with several kinds of layers.

A case is a prompt whose hit ends around the boundary of a block, a window, a chunk or a state. Its
answer must be as equal to that of a server without tiers as this server's are to each other, and
its hit as long as a count token by token says. `COMMUTATOR_TEST_GROUP_CASES` sets how many cases.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import define, field, frozen
from tests.support.tiny_models import FAMILIES, VOCABULARY, make_tiny_model
from tests.support.vllm_server import ask_vllm, running_vllm

from commutator.contract.engine import ModelConfig

pytestmark = [pytest.mark.vllm, pytest.mark.long]

_CASES = int(os.environ.get("COMMUTATOR_TEST_GROUP_CASES", "12"))
_POWER = 0.95
_ANSWER_TOKENS = 16
_NEAR = 5
"""How many of the likeliest tokens are looked at where two answers part."""
_SETTLED_S = 120.0
_KV_BYTES = 64 << 20
_ARGS = (
    "--max-num-batched-tokens=256",
    f"--kv-cache-memory-bytes={_KV_BYTES}",
    "--generation-config=vllm",
)
_ROOT = Path(__file__).resolve().parents[3]


@frozen(kw_only=True)
class Shape:
    """What a family's cases are made of."""

    step: int
    """Hits are multiples of this many tokens."""
    groups: int
    lengths: Sequence[int]
    """Prompts have about this many tokens."""
    window: int = 0
    has_states: bool = False
    """Whether hits end only where vLLM kept a state."""


_SHAPES = {
    "gemma3": Shape(step=32, groups=6, lengths=(64, 128, 608, 2048, 3968), window=64),
    "gpt_oss": Shape(step=32, groups=2, lengths=(64, 128, 608, 2048, 3968), window=64),
    "llama4": Shape(step=32, groups=4, lengths=(128, 160, 256, 640, 2048), window=128),
    "qwen3_next": Shape(step=544, groups=4, lengths=(544, 1088, 2176, 3264), has_states=True),
    "mixtral": Shape(step=32, groups=1, lengths=(64, 608, 2048)),
}


@frozen
class Answer:
    tokens: tuple[int, ...]
    near: tuple[dict[int, float], ...]
    """The likeliest tokens at each place, with their log probabilities."""
    cached_tokens: int


def ask(url: str, prompt: Sequence[int], **params: Any) -> Answer:
    body = {
        "token_ids": list(prompt),
        "sampling_params": {
            "temperature": 0,
            "max_tokens": _ANSWER_TOKENS,
            "logprobs": _NEAR,
            "ignore_eos": True,
        },
        **({"kv_transfer_params": params} if params else {}),
    }
    request = urllib.request.Request(
        f"{url}/inference/v1/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        told = json.load(response)
    (choice,) = told["choices"]
    near = tuple(
        {int(top["token_id"]): float(top["logprob"]) for top in place["top_logprobs"]}
        for place in choice["logprobs"]["content"]
    )
    details = told["usage"].get("prompt_tokens_details") or {}
    return Answer(tuple(choice["token_ids"]), near, int(details.get("cached_tokens") or 0))


def distance(one: Answer, other: Answer) -> float:
    """The largest difference of a log probability, up to where the answers part.

    There, how much less likely each thinks the other's token.
    """
    largest = 0.0
    places = zip(one.tokens, other.tokens, one.near, other.near, strict=True)
    for here, there, near, far in places:
        nowhere = float("-inf")
        if here != there:
            lost = near[here] - near.get(there, nowhere), far[there] - far.get(here, nowhere)
            return max(largest, *lost)
        largest = max(largest, abs(near[here] - far[here]))
    return largest


def forget(url: str) -> None:
    """Evict vLLM's own blocks once none is held for the tiers any more."""
    until_s = time.monotonic() + _SETTLED_S
    while True:
        page = ask_vllm("GET", f"{url}/metrics")
        (usage,) = re.findall(r"^vllm:kv_cache_usage_perc.* (\S+)$", page, re.MULTILINE)
        if float(usage) == 0 and json.loads(
            ask_vllm("POST", f"{url}/reset_prefix_cache") or "{}"
        ).get("success", True):
            return
        assert time.monotonic() < until_s, f"{float(usage):.0%} of the blocks are still held"
        time.sleep(0.05)


def capacity_tokens(log: Path) -> int:
    text = log.read_text(errors="replace")
    assert "Turning off hybrid" not in text
    (tokens,) = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    return int(tokens.replace(",", ""))


@define
class Count:
    """What was kept of the requests so far, counted token by token."""

    shape: Shape
    requests: list[tuple[list[int], set[int]]] = field(factory=list)
    """The tokens of each, and after how many of them its states were kept."""

    def hit(self, prompt: Sequence[int]) -> int:
        """The longest hit of a prompt."""
        return self._longest(prompt, only_states=self.shape.has_states)

    def computed(self, prompt: Sequence[int], answer: Answer) -> None:
        """States are kept where this prompt, sent again, ends its hit, and where it leaves others.

        vLLM says so of `--prefix-cache-retention-interval=0`, the default.
        """
        ends = {(len(prompt) - 1) // self.shape.step * self.shape.step}
        ends.add(self._longest(prompt, only_states=False))
        self.requests.append(([*prompt, *answer.tokens[:-1]], ends))

    def _longest(self, prompt: Sequence[int], *, only_states: bool) -> int:
        best = 0
        for tokens, states in self.requests:
            same = 0
            while same < min(len(tokens), len(prompt) - 1) and tokens[same] == prompt[same]:
                same += 1
                if same % self.shape.step == 0 and (not only_states or same in states):
                    best = max(best, same)
        return best


def made_prompts(shape: Shape, count: int) -> list[list[int]]:
    """Fresh prompts, and prompts that branch off or go on from one of these."""
    random = Random(0)

    def fresh(tokens: int) -> list[int]:
        return [random.randrange(100, VOCABULARY) for _ in range(tokens)]

    prompts: list[list[int]] = []
    for number in range(count):
        length = shape.lengths[number % len(shape.lengths)] + random.choice((-1, 0, 1, 2, 17))
        if number % 3 == 0 or not prompts:
            prompts.append(fresh(length))
            continue
        old = random.choice(prompts)
        places = [shape.step * n for n in range(1, len(old) // shape.step + 1)] or [len(old)]
        cut = max(1, min(len(old), random.choice(places) + random.choice((-1, 0, 1))))
        prompts.append(old[:cut] + fresh(max(1, min(length, 4000) - cut)))
    return prompts


@pytest.fixture(scope="module", params=list(_SHAPES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(family, tmp_path_factory.getbasetemp() / "tiny")
    return ModelConfig(name="tiny", source=str(folder), max_model_len=8192)


@pytest.fixture(scope="module")
def prompts(family: str) -> list[list[int]]:
    return made_prompts(_SHAPES[family], _CASES)


@frozen
class Alone:
    """A server without tiers."""

    answers: Sequence[Answer]
    noise: float
    """How far its answers from its own cache are from its first ones."""
    capacity_tokens: int


@pytest.fixture(scope="module")
def alone(
    family: str,
    model: ModelConfig,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Alone:
    folder = tmp_path_factory.mktemp(f"alone-{family}")
    with running_vllm(folder, *arguments(family), model=model) as url:
        first, again = [], []
        for prompt in prompts:
            first.append(ask(url, prompt))
            again.append(ask(url, prompt))
            forget(url)
    noise = max(distance(one, other) for one, other in zip(first, again, strict=True))
    return Alone(first, noise, capacity_tokens(folder / "vllm.log"))


def arguments(family: str) -> tuple[str, ...]:
    return (*_ARGS, f"--dtype={FAMILIES[family].dtype}")


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    del family
    (tmp_path / "disk").mkdir(mode=0o700)
    return tmp_path


def connector(folder: Path) -> str:
    tiers = [
        {"kind": "dram", "capacity": "48MB"},
        {"kind": "nvme", "path": str(folder / "disk"), "capacity": "1GB", "write": "through"},
    ]
    made = {
        "kv_connector": "AlteringConnector",
        "kv_connector_module_path": "tests.support.altered_kv",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers, "worker": "vllm-0"},
    }
    return f"--kv-transfer-config={json.dumps(made)}"


def served(folder: Path, log: str, family: str, model: ModelConfig) -> Any:
    (folder / log).mkdir()
    return running_vllm(
        folder / log,
        *arguments(family),
        connector(folder),
        env={"PYTHONPATH": str(_ROOT)},
        model=model,
    )


def test_answers_and_hits(
    family: str, model: ModelConfig, prompts: list[list[int]], alone: Alone, folder: Path
) -> None:
    shape = _SHAPES[family]
    close = 2 * alone.noise + 1e-5
    count = Count(shape)
    with served(folder, "first", family, model) as url:
        for prompt, expected in zip(prompts, alone.answers, strict=True):
            for _ in range(2):  # the second one finds the first one's blocks
                counted = count.hit(prompt)
                answer = ask(url, prompt)
                assert answer.cached_tokens == counted, (family, len(prompt))
                assert distance(answer, expected) <= close, (family, len(prompt), counted)
                count.computed(prompt, answer)
                forget(url)
        capacity = capacity_tokens(folder / "first" / "vllm.log")
        assert capacity >= 0.95 * alone.capacity_tokens
    with served(folder, "restarted", family, model) as url:
        for prompt, expected in zip(prompts, alone.answers, strict=True):
            answer = ask(url, prompt)
            assert answer.cached_tokens == count.hit(prompt), (family, len(prompt))
            assert distance(answer, expected) <= close, (family, len(prompt))
            forget(url)


def test_an_altered_block_shows(
    family: str, model: ModelConfig, prompts: list[list[int]], alone: Alone, folder: Path
) -> None:
    """The power of the test above: were one block of one group wrong, it would fail."""
    shape = _SHAPES[family]
    close = 2 * alone.noise + 1e-5
    random = Random(1)
    usable = [
        (prompt, expected)
        for prompt, expected in zip(prompts, alone.answers, strict=True)
        if len(prompt) > shape.step
        and (len(prompt) - 1) // shape.step * shape.step % (shape.window or len(prompt))
    ]
    with served(folder, "first", family, model) as url:
        for prompt, _ in usable:
            ask(url, prompt)
            forget(url)
        for prompt, _ in usable[:2]:  # so that another prompt's blocks are known
            ask(url, prompt)
            forget(url)
        noticed = []
        for number in range(_CASES):
            prompt, expected = usable[(number + 2) % len(usable)]
            group = number % shape.groups
            answer = ask(url, prompt, alter=[group, random.randrange(1000)])
            forget(url)
            noticed.append(distance(answer, expected) > close)
            ask(url, usable[(number + 1) % len(usable)][0])
            forget(url)
    assert sum(noticed) >= _POWER * len(noticed), f"{sum(noticed)} of {len(noticed)}"

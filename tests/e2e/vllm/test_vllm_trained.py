"""What a trained model says is the same by our token path and by vLLM's own server.

Trained models answer greedily; vLLM's server has its own parsers of tools and reasoning on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest
import yaml
from attrs import evolve
from tests.e2e.vllm.cluster import server_urls, wait_for_workers
from tests.judges.trained.clients import Answer, ask_chat
from tests.support.trained_models import trained_model
from tests.support.trained_scripts import FAMILIES, Said, turns
from tests.support.vllm_server import need_vllm

from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PARSERS: Mapping[str, tuple[str, str | None]] = {
    "hermes": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "llama3_json": ("llama3_json", None),
    "mistral": ("mistral", None),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "gemma4": ("gemma4", "gemma4"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "glm_4_7": ("glm47", "glm47"),
}
"""vLLM's own, of tools and reasoning."""
_HELD = (
    "vLLM's server lets a model think first whose reasoning is read, and takes all for thoughts "
    "until they end; we hold it to the schema, or to the call, at once where the prompt has not "
    "begun the thoughts"
)
_PASSED_ON = (
    "the calls of this family are forced by a grammar that vLLM's engine does not take, so the "
    "request is answered by vLLM's own server, which asks for a form that the model does not know"
)
_NO_LINES = (
    "vLLM, asked by either, holds the answer to the schema right behind the thoughts, where the "
    "model writes two line ends"
)
_APPENDS = (
    "the family's template appends to a list where results of tools follow, which vLLM's server "
    "takes for unsafe and refuses"
)
_SPACE = "vLLM's server keeps line breaks beside the markers of thoughts and calls"
ANY = "any"
"""What differs where a model is asked for what it was not trained to say."""
DIFFERENT: Mapping[tuple[str, str, str], str] = {
    ("hermes", "*", "white space"): _SPACE,
    ("hermes", "schema", "reasoning"): _HELD,
    ("hermes", "schema", "content"): _HELD,
    ("hermes", "forced-tool-choice", "reasoning"): _HELD,
    ("hermes", "forced-tool-choice", "calls"): _HELD,
    ("hermes", "forced-tool-choice", "usage"): (
        "the marker before a forced call is part of our prompt, and of their answer"
    ),
    ("qwen3_coder", "*", "white space"): _SPACE,
    ("qwen3_coder", "forced-tool-choice", ANY): _PASSED_ON,
    ("qwen3_coder", "schema", "not the script"): _NO_LINES,
    ("llama3_json", "empty-args", "no answer"): (
        "of a call without arguments vLLM's server streams none, not even an empty object"
    ),
    ("mistral", "*", "calls"): "vLLM's parser takes the id of a call for a part of its name",
    ("mistral", "tool-result-followup", "no answer"): (
        "vLLM's server refuses ids of calls that the template does not take; we shorten them"
    ),
    ("mistral", "forced-tool-choice", ANY): _PASSED_ON,
    ("minimax_m2", "*", "white space"): _SPACE,
    ("minimax_m2", "forced-tool-choice", ANY): _PASSED_ON,
    ("minimax_m2", "schema", "not the script"): _NO_LINES,
    ("kimi_k2", "forced-tool-choice", ANY): _PASSED_ON,
    ("kimi_k2", "schema", "reasoning"): _HELD,
    ("kimi_k2", "schema", "content"): _HELD,
    ("kimi_k2", "tool-result-followup", "no answer"): _APPENDS,
    ("kimi_k2", "result", "no answer"): _APPENDS,
    ("kimi_k2", "two results", "no answer"): _APPENDS,
}
"""Family, turn ("*": any one) and what differs, whole or streamed: why."""


@pytest.fixture(scope="module", params=PARSERS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def cluster(name: str, root: Path) -> Iterator[LocalCluster]:
    need_vllm()
    config = yaml.safe_load((root / "examples" / "vllm.yaml").read_text())
    source = str(trained_model(FAMILIES[name]).folder)
    config["models"] = [{"name": "m", "source": source, "max_model_len": 2048}]
    (engine,) = config["engines"]
    tools, reasoning = PARSERS[name]
    own = [one for one in engine["args"] if not one.startswith("--tool-call-parser")]
    own.append(f"--tool-call-parser={tools}")
    if reasoning is not None:
        own.append(f"--reasoning-parser={reasoning}")
    engine |= {"replicas": 1, "connection": "token_api", "args": own}
    patient = ("--set", "runtime.lease_s=60")  # a busy machine makes no worker a lost one
    with LocalCluster(config, arguments=patient, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


def test_answers_are_those_of_vllms_own_server(name: str, cluster: LocalCluster) -> None:
    (url,) = server_urls(cluster).values()
    ours = partial(ask_chat, cluster.url, "m")
    theirs = partial(ask_chat, url, "m", api_key=api_key_at(url) or "-", strict=False)
    asked = [(turn, how) for turn in turns(FAMILIES[name]) for how in (False, True)]
    with ThreadPoolExecutor(2 * len(asked)) as pool:  # one step computes them all
        answers = [
            (
                pool.submit(ours, turn, streamed=streamed),
                pool.submit(theirs, turn, streamed=streamed),
            )
            for turn, streamed in asked
        ]
        found = [(outcome(one), outcome(other)) for one, other in answers]
    different = dict[tuple[str, str, str], object]()
    for (turn, streamed), (one, other) in zip(asked, found, strict=True):
        for what in differences(one, other, turn.said):
            exact = (name, turn.name, what)
            explained = ((name, turn.name, ANY), (name, "*", what), exact)
            where = next((key for key in explained if key in DIFFERENT), exact)
            different[where] = (streamed, one, other)
    for where, found_there in different.items():
        print(where, found_there)
    assert different.keys() == {where for where in DIFFERENT if where[0] == name}, different


def outcome(asked: Future[Answer]) -> Answer | str:
    """The answer, or why there is none."""
    try:
        return asked.result()
    except openai.APIStatusError as refused:
        return str(refused)
    except json.JSONDecodeError as broken:
        return f"arguments are no JSON: {broken.doc}"


def differences(one: Answer | str, other: Answer | str, said: Said) -> Iterator[str]:
    """What is not the same: white space at the ends, or one of all the rest."""
    if isinstance(one, str):
        yield "no answer of ours"
    elif one.said != said:
        yield "not the script"
    if isinstance(other, str):
        yield "no answer"
    if isinstance(one, str) or isinstance(other, str):
        return
    if stripped(one) != one.said or stripped(other) != other.said:
        yield "white space"
    for what in ("reasoning", "content", "calls"):
        if getattr(stripped(one), what) != getattr(stripped(other), what):
            yield what
    if one.ended != other.ended:
        yield "end"
    if one.usage != other.usage:
        yield "usage"


def stripped(answer: Answer) -> Said:
    """Without white space at the ends of its texts."""
    said = answer.said
    reasoning, content = ((one and one.strip()) or None for one in (said.reasoning, said.content))
    return evolve(said, reasoning=reasoning, content=content)

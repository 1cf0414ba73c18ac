"""A host that vanishes or is paused: its streams continue elsewhere, within the bound of pings."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator

import pytest
from attrs import frozen
from tests.support.cluster_views import Demo, running, whole_again
from tests.support.hosts import Host, why_not

from commutator.engine.client import LOST_AFTER_S, VANISHED_AFTER_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
TOKENS = 300
GRACE_S = 2.0
"""What a loaded machine takes to compute the prompt again and go on."""
TRIES = 30


@pytest.fixture(scope="module", params=["etcd", "memory"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Demo]:
    with running("sim", request.param) as demo:
        demo.start()
        yield demo


@frozen
class Answer:
    text: str
    longest_gap_s: float
    """Between two pieces of the stream."""


def stream(door: Host, prompt: str, on_worker: str = "", fault: signal.Signals | None = None,
           victim: Host | None = None) -> Answer | None:  # fmt: skip
    """A streamed answer; None if no worker whose id begins with ``on_worker`` has it.

    After the tenth piece ``fault`` befalls ``victim``: a signal, or without one its link is cut.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://{door.address}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    pieces, gaps_s = [], []
    with urllib.request.urlopen(request, timeout=60) as answer:
        if not answer.headers["X-Commutator-Worker"].startswith(on_worker):
            return None
        last_s = time.monotonic()
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.monotonic()
            gaps_s.append(now_s - last_s)
            last_s = now_s
            assert b'"choices"' in line, line
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == 10 and victim is not None:
                if fault is None:
                    victim.set_link(False)
                else:
                    victim.signal(fault)
    return Answer("".join(pieces), max(gaps_s))


def served_through(demo: Demo, fault: signal.Signals | None) -> Answer:
    """An answer that begins at a worker of h3, which is lost in the middle of it."""
    h1, _, h3 = demo.hosts
    for number in range(TRIES):
        prompt = f"{number} {fault}: tell me about the river."
        answer = stream(h1, prompt, "h3-", fault, h3)
        if answer is not None:
            break
    else:
        raise AssertionError("no request went to h3")
    calm = stream(h1, prompt)
    assert calm is not None
    assert answer.text == calm.text
    print(f"longest gap {answer.longest_gap_s:.2f} s")
    noticed_s = VANISHED_AFTER_S if fault is None else LOST_AFTER_S
    assert answer.longest_gap_s < noticed_s + GRACE_S
    return answer


def test_a_host_is_paused(cluster: Demo) -> None:
    h3 = cluster.hosts[2]
    try:
        served_through(cluster, signal.SIGSTOP)
    finally:
        h3.signal(signal.SIGCONT)
    whole_again(cluster)


def test_a_host_is_cut_off(cluster: Demo) -> None:
    h3 = cluster.hosts[2]
    try:
        served_through(cluster, None)
    finally:
        h3.set_link(True)
    whole_again(cluster)

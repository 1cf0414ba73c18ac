"""Trained models that call, think and talk as their script says: `make test-trained`.

Each is asked by the clients of three APIs, whole and streamed, on a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.judges.trained.clients import APIS, with_ids
from tests.support.judges import installed_judges
from tests.support.trained_models import trained_model
from tests.support.trained_scripts import FAMILIES, Family, turns

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.long

AT_ONCE = 16
PROTOCOLS = ("openai", "anthropic", "responses")


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def url(family: Family) -> Iterator[str]:
    config = {
        "models": [{"name": "m", "source": str(trained_model(family).folder)}],
        "engines": [{"kind": "reference", "kv_cache_bytes": 64 << 20, "threads": 1}],
        "frontend": {"protocols": [{"kind": one} for one in PROTOCOLS]},
    }
    with LocalCluster(config) as running:
        yield running.url


def test_they_say_what_their_script_says(family: Family, url: str) -> None:
    known = turns(family)
    asked = [(turn, api, how) for turn in known for api in APIS for how in (False, True)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [*pool.map(lambda one: APIS[one[1]](url, "m", one[0], streamed=one[2]), asked)]
    usage: dict[str, tuple[int, int]] = {}
    for (turn, api, streamed), answer in zip(asked, answers, strict=True):
        where = (turn.name, api, streamed)
        assert answer.said == turn.said, where
        assert answer.usage == usage.setdefault(turn.name, answer.usage), where
        assert len(answer.ids) == len({*answer.ids}) == len(turn.said.calls), where
        if api == "chat":
            called = turn.said.calls and not turn.forced
            assert answer.ended == ("tool_calls" if called else "stop"), where


@pytest.mark.parametrize("api", APIS)
def test_a_conversation_goes_on_with_the_ids_that_it_was_given(
    api: str, family: Family, url: str
) -> None:
    known = {turn.name: turn for turn in turns(family)}
    ids: dict[str, str] = {}
    for name in ("call", "result", "two results"):
        turn = known[name]
        answer = APIS[api](url, "m", with_ids(turn, ids), streamed=True)
        assert answer.said == turn.said, name
        following = known["two results"].messages[len(turn.messages) :]
        written = [call["id"] for call in following[0].get("tool_calls", [])] if following else []
        ids |= zip(written, answer.ids, strict=False)
    assert len(ids) == len({*ids.values()}) > 1


def test_the_probe_is_green(family: Family, url: str) -> None:
    installed_judges()
    from canitoolcall.probe import BUILTIN_SCENARIOS, probe

    report = probe(f"{url}/v1", "m", scenarios=BUILTIN_SCENARIOS)
    told = {outcome.scenario_id: outcome for outcome in report.outcomes if outcome.status != "pass"}
    left = set() if family.can_be_forced else {"forced-tool-choice"}
    if family.one_call:
        left |= {"parallel-calls"}
    assert told.keys() == left, told
    assert len({outcome.scenario_id for outcome in report.outcomes}) == len(BUILTIN_SCENARIOS)

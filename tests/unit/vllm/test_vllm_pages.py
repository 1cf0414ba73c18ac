"""What a server's answers say about its cache, its load, its model and its KV events."""

from __future__ import annotations

import msgspec
import pytest

from commutator import Operation
from commutator.contract.worker import EventSource
from commutator.errors import EngineError
from commutator_engine_kit.completions import ModelCard, ModelList
from commutator_vllm.discovery import (
    CacheFacts,
    KvEventSource,
    ServedPaths,
    base_model,
    cache_facts,
    engine_info,
    engine_load,
    event_source,
    operations_of,
)

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0
vllm:cache_config_info{block_size="128",engine="0",hash_block_size="HASH",num_gpu_blocks="40"} 1.0
vllm:cache_config_info{block_size="128",engine="1",hash_block_size="HASH",num_gpu_blocks="40"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 17.0
"""


def test_cache_and_load_are_those_of_all_ranks() -> None:
    facts = cache_facts(PAGE.replace("HASH", "None"))
    assert facts == CacheFacts(block_size=128, capacity_blocks=80, ranks=2)
    assert facts is not None
    load = engine_load(PAGE, facts)
    assert (load.running, load.waiting) == (5, 1)
    assert load.kv_used_blocks == 20
    assert load.kv_capacity_blocks == 80


def test_events_count_in_the_blocks_that_are_hashed() -> None:
    facts = cache_facts(PAGE.replace("HASH", "16"))
    assert facts is not None
    assert facts.block_size == 16


@pytest.mark.parametrize(
    "page", ["", "vllm:num_requests_running 1.0\n", PAGE.replace("40", "None")]
)
def test_a_server_that_is_starting_tells_no_cache(page: str) -> None:
    assert cache_facts(page) is None


def test_the_base_model_comes_before_its_adapters() -> None:
    models = ModelList([ModelCard("adapter", parent="base"), ModelCard("base", 4096)])
    assert base_model(models) == ("base", 4096)
    with pytest.raises(EngineError, match="no model"):
        base_model(ModelList([]))


def test_what_a_server_is() -> None:
    facts = CacheFacts(block_size=32, capacity_blocks=100, ranks=1)
    info = engine_info("0.32.0", ModelList([ModelCard("m", 2048)]), facts, None)
    assert (info.kind, info.version, info.model) == ("vllm", "0.32.0", "m")
    assert (info.max_model_len, info.block_size, info.kv_capacity_blocks) == (2048, 32, 100)


SOURCES = """{
 "1": {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:6558", "topic": "kv", "hwm": 9},
 "0": {"endpoint": "tcp://*:5557", "replay_endpoint": null, "topic": "kv"}}"""


def test_events_of_each_rank_at_the_host_of_the_server() -> None:
    sources = msgspec.json.decode(SOURCES, type=dict[str, KvEventSource])
    assert event_source(sources, "http://10.1.2.3:8000", None) == EventSource(
        endpoint="tcp://10.1.2.3:5557",
        replay_endpoint=None,
        topic="kv",
        further_ranks=(
            EventSource(
                endpoint="tcp://10.1.2.3:5558", replay_endpoint="tcp://10.1.2.3:6558", topic="kv"
            ),
        ),
    )
    source = event_source(sources, "http://[::1]:8000", None)
    assert source is not None
    assert source.endpoint == "tcp://[::1]:5557"


def test_an_address_that_is_one_stays() -> None:
    sources = {"0": KvEventSource("tcp://10.9.9.9:5557"), "1": KvEventSource("ipc:///run/events")}
    source = event_source(sources, "http://10.1.2.3:8000", None)
    assert source is not None
    assert source.endpoint == "tcp://10.9.9.9:5557"
    assert source.further_ranks[0].endpoint == "ipc:///run/events"


def test_what_the_configuration_says_comes_first() -> None:
    given = EventSource(endpoint="tcp://h:1", replay_endpoint="tcp://h:2")
    assert event_source({"0": KvEventSource("tcp://*:5557")}, "http://h:8000", given) == given


@pytest.mark.parametrize(
    "source",
    [
        KvEventSource("tcp://*:1", enable_kv_cache_events=False),
        KvEventSource("tcp://*:1", publisher="null"),
    ],
)
def test_a_server_that_publishes_nothing(source: KvEventSource) -> None:
    assert event_source({"0": source}, "http://h:8000", None) is None
    assert event_source({}, "http://h:8000", None) is None


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], Operation.GENERATE),
        (["/v1/completions", "/classify"], Operation.GENERATE),
        (["/pooling", "/v1/embeddings"], Operation.EMBED),
        (["/pooling", "/classify"], Operation.CLASSIFY),
        (["/pooling"], "pooling"),
    ],
)
def test_what_a_server_does_is_told_by_its_paths(paths: list[str], expected: str) -> None:
    assert operations_of(ServedPaths({path: {} for path in paths})) == (expected,)

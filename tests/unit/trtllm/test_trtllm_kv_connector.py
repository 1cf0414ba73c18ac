"""What TensorRT-LLM's KV connector does with one request at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import damage
from tests.support.trtllm.kv_executor import KvExecutor
from tests.support.trtllm.kv_pool import BLOCK_TOKENS, KvPool
from tests.support.trtllm.kv_runtime import llm_args

from commutator.errors import ConfigError
from commutator_trtllm.kv_connector import CommutatorKvScheduler, CommutatorKvWorker
from commutator_trtllm.kv_memory import layout_regions
from commutator_trtllm.options import check_llm_args, read_options

DRAM = {"kind": "dram", "capacity": "1MB", "huge_pages": "off", "load_timeout_s": 60}
PROMPT = [1] * 4 * BLOCK_TOKENS + [2]
PAGES = 24


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[KvExecutor]:
    with KvExecutor(tmp_path, DRAM) as made:
        yield made


def evict(engine: KvExecutor, pages: int = PAGES) -> None:
    """Evict all prompts from the device, and all blocks from host memory."""
    number = 1000 + engine.arrived
    engine.run(engine.arrive([number] * (pages - 2) * BLOCK_TOKENS))
    engine.settle()  # a block that finds no room there is not kept


def loaded(engine: KvExecutor, tokens: list[int], **facts: Any) -> int:
    """How many tokens were loaded for a request that has none on the device."""
    evict(engine)
    request = engine.arrive(tokens, **facts)
    engine.step()
    matched = request.matched
    engine.run(request)
    engine.settle()
    return matched


@pytest.mark.parametrize("grouped", [False, True])
def test_a_prompt_that_comes_again_is_loaded(tmp_path: Path, grouped: bool) -> None:
    with KvExecutor(tmp_path, DRAM, grouped=grouped) as engine:
        assert loaded(engine, PROMPT) == 0
        assert loaded(engine, PROMPT) == 4 * BLOCK_TOKENS
        assert loaded(engine, PROMPT[:-1]) == 3 * BLOCK_TOKENS  # the last token is computed
        assert loaded(engine, PROMPT, cache_salt="other") == 0


def test_answers_are_kept_and_loaded_by_another_server(tmp_path: Path) -> None:
    nvme = {"kind": "nvme", "path": str(tmp_path / "disk"), "capacity": "1MB"}
    with KvExecutor(tmp_path, nvme) as one:
        request = one.run(one.arrive(PROMPT), answer=8)
        one.settle()
    with KvExecutor(tmp_path, nvme) as other:
        assert loaded(other, request.tokens) == 6 * BLOCK_TOKENS


def test_a_server_of_another_layout_shares_nothing(tmp_path: Path) -> None:
    nvme = {"kind": "nvme", "path": str(tmp_path / "disk"), "capacity": "1MB"}
    for grouped in (False, True):
        with KvExecutor(tmp_path, nvme, grouped=grouped) as engine:
            assert loaded(engine, PROMPT) == 0


def test_what_is_more_than_tokens_is_left_alone(engine: KvExecutor) -> None:
    for facts in ({"lora_task_id": 3}, {"is_dummy_request": True}):
        for _ in range(2):
            assert loaded(engine, PROMPT, **facts) == 0
    assert loaded(engine, PROMPT) == 0
    assert loaded(engine, PROMPT) > 0


def test_all_ranks_must_have_a_block(tmp_path: Path) -> None:
    with KvExecutor(tmp_path, DRAM, ranks=2) as engine:
        loaded(engine, PROMPT)
        tiers = engine.workers[1]._connector
        tiers.stores.evict([tiers.lookups.keys(PROMPT)[2]])
        assert loaded(engine, PROMPT) == 2 * BLOCK_TOKENS


def test_a_damaged_block_is_not_claimed(engine: KvExecutor) -> None:
    loaded(engine, PROMPT)
    tiers = engine.workers[0]._connector
    (setup,) = tiers.tiers
    (stored,) = setup.tier.lookup(tiers.lookups.keys(PROMPT)[1:2])
    damage(setup.tier, stored, 0)
    assert loaded(engine, PROMPT) == BLOCK_TOKENS
    assert tiers.statistics().tiers[0].loads["corrupt"] == 1


def test_no_more_is_claimed_than_host_memory_holds(tmp_path: Path) -> None:
    with KvExecutor(tmp_path, DRAM, staging="2KB") as engine:  # three blocks, of which one keeps
        tokens = engine.run(engine.arrive(PROMPT), answer=6).tokens
        engine.settle()
        assert 0 < loaded(engine, tokens) <= 3 * BLOCK_TOKENS


@pytest.mark.parametrize("how", ["finish", "reset"])
def test_a_claim_that_is_given_up_leaves_nothing(tmp_path: Path, how: str) -> None:
    with KvExecutor(tmp_path, DRAM, grouped=True) as engine:
        loaded(engine, PROMPT)
        evict(engine)
        request = engine.arrive(PROMPT)
        engine.ask(request)
        assert request.offer == 4 * BLOCK_TOKENS
        getattr(engine, how)(request)
        engine.settle()  # all host memory is back
        again = request if how == "reset" else engine.arrive(PROMPT)
        engine.step()
        assert again.matched == 4 * BLOCK_TOKENS


def test_cancelled_parts_of_a_claim_are_not_loaded(tmp_path: Path) -> None:
    with KvExecutor(tmp_path, DRAM, grouped=True, pages=7) as engine:
        engine.run(engine.arrive(PROMPT))
        engine.settle()
        evict(engine, 8)
        asked = engine.arrive(PROMPT)
        engine.ask(asked)
        others = engine.arrive([5] * 4 * BLOCK_TOKENS)
        engine.waiting.remove(asked)
        engine.step()  # takes all pages but three
        engine.waiting.append(asked)
        engine.step()
        assert asked.matched == 2 * BLOCK_TOKENS
        engine.finish(others)
        engine.run(asked)


def test_loads_are_carried_out_once(engine: KvExecutor) -> None:
    """TensorRT-LLM binds no new metadata in steps that compute nothing."""
    loaded(engine, PROMPT)
    evict(engine)
    request = engine.arrive(PROMPT)
    engine.step()
    for worker in engine.workers:
        worker.start_load_kv(None)
        worker.wait_for_layer_load(0, None)
        worker.save_kv_layer(0, None)
        worker.wait_for_save(None)
    engine.run(request)


PUBLISHED = {
    CommutatorKvScheduler: {
        "__init__": "llm_args",
        "build_connector_meta": "scheduler_output",
        "get_num_new_matched_tokens": "request, num_computed_tokens",
        "request_finished": "request, cache_block_ids",
        "request_finished_by_layer_group": "request, cache_block_ids_by_layer_group",
        "update_state_after_alloc": "request, block_ids",
        "update_state_after_alloc_by_layer_group": "request, block_ids_by_layer_group",
        "cancel_load": "request, start, end",
        "request_reset": "request",
        "wait_for_initialization": "",
    },
    CommutatorKvWorker: {
        "__init__": "llm_args",
        "bind_connector_meta": "metadata",
        "get_connector_meta": "",
        "register_kv_caches": "kv_cache_tensor",
        "register_kv_cache_layout": "layout",
        "register_forward_pass_callable": "",
        "start_load_kv": "stream",
        "wait_for_layer_load": "layer_idx, stream",
        "save_kv_layer": "layer_idx, stream",
        "wait_for_save": "stream",
        "get_finished": "finished_gen_req_ids, started_loading_req_ids",
    },
}


@pytest.mark.parametrize("connector", PUBLISHED)
def test_signatures_are_those_that_are_published(connector: type[object]) -> None:
    for name, parameters in PUBLISHED[connector].items():
        names = list(inspect.signature(getattr(connector, name)).parameters)
        assert ", ".join(names[1:]) == parameters, name


def test_options_come_by_environment() -> None:
    given = {"TLLM_COMMUTATOR_TIERS": "f.yaml", "TLLM_COMMUTATOR_STAGING": "2MiB", "OTHER": "x"}
    options = read_options(given)
    assert (options.tiers, options.staging, options.worker) == ("f.yaml", 2 << 20, "trtllm")
    wrong = {
        "TLLM_COMMUTATOR_STAGING": "much",
        "TLLM_COMMUTATOR_WAIT_S": "0",
        "TLLM_COMMUTATOR_A": "",
    }
    with pytest.raises(ConfigError) as raised:
        read_options(wrong)
    assert len(raised.value.problems) == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"enable_block_reuse": False}, "turn on enable_block_reuse"),
        ({"max_attention_window": [64]}, "max_attention_window"),
    ],
)
def test_what_would_be_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    args = llm_args(tmp_path)
    check_llm_args(args)
    vars(args.kv_cache_config).update(changes)
    with pytest.raises(ConfigError, match=problem):
        check_llm_args(args)


def test_layers_with_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers with attention windows"):
        layout_regions(KvPool(4, 0, "cpu").layout(window=64))

"""The server's YAML file, for each role."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from commutator_trtllm.options import Role, as_yaml, server_options


def test_events_statistics_and_reuse_are_on() -> None:
    options = server_options("both")
    assert options["enable_iter_perf_stats"] is True
    assert options["kv_cache_config"]["enable_block_reuse"] is True
    assert options["kv_cache_config"]["event_buffer_max_size"] > 0
    assert "cache_transceiver_config" not in options
    assert "event_buffer_max_size" not in server_options("both", kv_events=False)["kv_cache_config"]


@pytest.mark.parametrize(("role", "overlaps"), [("prefill", False), ("decode", True)])
def test_both_sides_of_a_hand_over_have_a_transceiver(role: Role, overlaps: bool) -> None:
    options = server_options(role, max_model_len=4096)
    assert options["cache_transceiver_config"] == {"backend": "NIXL", "max_tokens_in_buffer": 4096}
    assert options.get("disable_overlap_scheduler", False) is not overlaps


def test_what_is_laid_over_has_the_last_word() -> None:
    over = {"kv_cache_config": {"free_gpu_memory_fraction": 0.5, "event_buffer_max_size": 7}}
    options = server_options("prefill", laid_over={**over, "disable_overlap_scheduler": False})
    assert options["kv_cache_config"] == {
        "enable_block_reuse": True,
        "event_buffer_max_size": 7,
        "free_gpu_memory_fraction": 0.5,
    }
    assert options["disable_overlap_scheduler"] is False


def test_the_command_prints_the_file() -> None:
    command = [sys.executable, "-m", "commutator_trtllm.options", "--role=prefill"]
    printed = subprocess.run(
        [*command, "--max-model-len=99", "--no-kv-events"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = server_options("prefill", max_model_len=99, kv_events=False)
    assert printed == as_yaml(options)
    assert yaml.safe_load(printed) == options

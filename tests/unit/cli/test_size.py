"""``commutator size``: sizes that can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner

from commutator.cli.main import main
from commutator_engine_kit.model_kv import read_model_kv
from commutator_models.families import families
from commutator_models.size import Workload, hours_held, sizing

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
TOKEN_BYTES = 80 * 2 * 8 * 128 * 2
LOAD = Workload(session_tokens=8000, sessions_per_hour=500, hours=4)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["size", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_size_of_a_session_is_that_of_its_tokens() -> None:
    found = sizing(read_model_kv(LLAMA_70B), LOAD)
    assert found is not None
    assert found.token_bytes == TOKEN_BYTES == 327_680
    assert found.session_bytes == 8000 * TOKEN_BYTES
    assert found.tiers_bytes == 2000 * 8000 * TOKEN_BYTES * 11 // 10
    assert found.written_bytes_per_day == pytest.approx(24 * 500 * 8000 * TOKEN_BYTES)


def test_what_is_shared_counts_once_and_blocks_are_whole() -> None:
    load = evolve(LOAD, shared_tokens=3000, session_tokens=8001, active=10)
    found = sizing(read_model_kv(LLAMA_70B), load)
    assert found is not None
    assert found.session_bytes == 5008 * TOKEN_BYTES
    assert found.shared_bytes == 3008 * TOKEN_BYTES
    assert found.active_bytes == (10 * 5008 + 3008) * TOKEN_BYTES


def test_a_state_counts_once_in_a_session() -> None:
    (model,) = (one.model for one in families() if one.title == "Qwen3-Next")
    one, two = (
        sizing(model, evolve(LOAD, session_tokens=tokens, block_tokens=1)) for tokens in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert two.session_bytes - one.session_bytes == one.token_bytes == 24_576
    assert one.session_bytes == 24_576 + 77_266_944


def test_a_tier_holds_as_many_hours_as_it_has_room_for() -> None:
    found = sizing(read_model_kv(LLAMA_70B), LOAD)
    assert found is not None
    assert hours_held(found, LOAD, found.tiers_bytes) == pytest.approx(LOAD.hours)
    assert hours_held(found, evolve(LOAD, sessions_per_hour=1000), found.tiers_bytes) == (
        pytest.approx(LOAD.hours / 2)
    )


def test_people_get_sizes_and_hours(llama: Path) -> None:
    common = (str(llama), "--session-tokens", "8000", "--sessions-per-hour", "500", "--hours", "4")
    said = run(*common, "--active", "40", "--tier", "dram=400GB", "--tier", "nvme=8TB")
    assert "llama: 327,680 bytes of KV a token" in said
    assert "a session of 8,000 tokens of its own: 2.62 GB" in said
    assert "2,000 sessions, 5.77 TB of tiers" in said
    assert "to dram of 400 GB: the last 0.277 h; 4 h are wanted" in said
    assert "to nvme of 8 TB: the last 5.83 h; enough" in said
    assert json.loads(run(*common, "--json", "--kv-bytes", "1"))["token_bytes"] == 163_840


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--tier", "dram"], "expected KIND=SIZE"),
        (["--tier", "dram=xGB"], "expected KIND=SIZE"),
        (["--hours", "0"], "not in the range"),
    ],
)
def test_what_cannot_be_meant_is_refused(llama: Path, more: list[str], part: str) -> None:
    common = [str(llama), "--session-tokens", "8", "--sessions-per-hour", "5"]
    done = CliRunner().invoke(main, ["size", *common, *more])
    assert done.exit_code == 2
    assert part in done.output

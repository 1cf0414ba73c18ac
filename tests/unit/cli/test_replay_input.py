"""`commutator replay`: traces that are wrong, and options that a replay does without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.errors import ConfigError
from commutator_replay.tables import Part, load_trace
from commutator_replay.trace import read_trace

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "replay.yaml"


def line(
    time_ms: float = 5, tokens: int = 1000, output: int = 10, ids: tuple[int, ...] = (1, 2)
) -> str:
    named = {"timestamp": time_ms, "input_length": tokens, "output_length": output}
    return json.dumps(named | {"hash_ids": ids}) + "\n"


def replay(folder: Path, text: str, *arguments: str, file: Path = EXAMPLE) -> Result:
    trace = folder / "trace.jsonl"
    trace.write_text(text)
    return CliRunner().invoke(main, ["replay", str(trace), str(file), *arguments])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (line(tokens=0, ids=()), "input_length 0"),
        (line(tokens=-3, ids=()), "input_length -3"),
        (line(output=-1), "output_length -1 is negative"),
        (line(time_ms=-1), "timestamp -1.0 is negative"),
        (line(ids=(1,)), "input_length 1000 needs 2 hash_ids and there are 1"),
        (line(ids=(1, 2, 3)), "input_length 1000 needs 2 hash_ids and there are 3"),
        (line(tokens=1024, ids=(1, 2, 3, 4)), "input_length 1024 needs 2 hash_ids"),
        ("{\n", "one JSON object a line"),
        ('{"timestamp": 5, "input_length": 1, "output_length": 1}\n', "`hash_ids`"),
        ("\n", "blank, between requests; remove it"),
        (line(tokens=900_000, ids=tuple(range(1758))), "there are 1500; give the workers of"),
    ],
)
def test_a_wrong_line_is_named_with_the_traces_file(
    tmp_path: Path, wrong: str, message: str
) -> None:
    done = replay(tmp_path, line() + wrong + line())
    assert done.exit_code == 1, done.output
    assert done.output.startswith(f"error: {tmp_path / 'trace.jsonl'}: 1 problem\n  line 2: ")
    assert message in done.output


def test_every_wrong_line_is_reported_up_to_a_limit(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(output=-1) + line() + line(tokens=0))
    with pytest.raises(ConfigError) as told:
        read_trace(trace)
    assert [problem.split(":")[0] for problem in told.value.problems] == ["line 1", "line 3"]
    trace.write_text(line(output=-1) * 1000)
    with pytest.raises(ConfigError, match="20 problems"):
        read_trace(trace)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    done = replay(tmp_path, text)
    assert done.exit_code == 1
    assert "trace.jsonl: 1 problem\n  no requests" in done.output


def test_blank_lines_at_the_end_and_other_fields_are_fine(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line() + line(tokens=1024).replace("{", '{"line": "x", ') + "\n  \n")
    assert [one.line for one in read_trace(trace)] == [1, 2]


def test_the_block_that_an_answer_begins_may_be_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(tokens=512, ids=(1,)) + line(tokens=512, ids=(1, 2)))
    assert [list(one.full_blocks) for one in read_trace(trace)] == [[1], [1]]


def test_requests_are_put_in_order_of_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(time_ms=7) + line(time_ms=3))
    assert [one.timestamp for one in read_trace(trace)] == [3, 7]


def test_the_first_requests_are_those_that_arrived_first(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(time_ms=7) + line(time_ms=9) + line(time_ms=3))
    assert [one.timestamp for one in load_trace(trace, Part(requests=2))] == [3, 7]


def test_a_prompt_too_long_for_a_hand_over_is_named(tmp_path: Path) -> None:
    text = line() + line(tokens=1_000_000, ids=tuple(range(1954)))
    done = replay(tmp_path, text, "--disagg", "always", file=EXAMPLES / "replay-disagg.yaml")
    assert done.exit_code == 1
    assert "trace.jsonl: 1 problem\n  line 2: " in done.output


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("router.use_kv_events=false", "router.use_kv_events"),
        ("router.router_ttl_s=5", "router.router_ttl_s"),
        ("router.block_size=128", "router.block_size"),
    ],
)
def test_an_option_that_a_replay_ignores_is_reported(
    tmp_path: Path, setting: str, option: str
) -> None:
    done = replay(tmp_path, line(), "--json", "--set", setting)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"warning: {option}: a replay ignores this option")
    assert done.stderr.count("warning") == 1
    assert json.loads(done.stdout) == json.loads(replay(tmp_path, line(), "--json").stdout)


@pytest.mark.parametrize("name", ["replay.yaml", "replay-tiers.yaml", "replay-disagg.yaml"])
def test_the_examples_have_no_such_option(tmp_path: Path, name: str) -> None:
    assert replay(tmp_path, line(), file=EXAMPLES / name).stderr == ""

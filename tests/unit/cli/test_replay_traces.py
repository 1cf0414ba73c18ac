"""What `commutator replay` reads: tables of requests as Azure and BurstGPT publish them, rates."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.errors import ConfigError
from commutator_replay.tables import Part, RateRow, from_rates, load_trace, superposed
from commutator_replay.trace import TraceRequest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replay.yaml"

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,1396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:02.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
"""
_QUANTILES = "input_p50,input_p90,input_p99,output_p50,output_p90,output_p99"
RATES = f"""t_s,requests_per_s,arrival_cv,{_QUANTILES}
0,100,1.0,80,800,3000,400,480,560
600,50,2.0,80,800,3000,400,480,560
1200,0,1.0,80,800,3000,400,480,560
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(AZURE_2023)
    return path


@pytest.mark.parametrize(
    ("text", "times_ms", "lengths", "answers"),
    [
        (AZURE_2023, [0, 4314.579], [374, 1396], [44, 109]),
        (AZURE_2024, [0, 2007.405], [2162, 2399], [5, 6]),
        (BURSTGPT, [0, 40_000], [472, 1087], [18, 0]),
    ],
    ids=["azure 2023", "azure 2024", "burstgpt"],
)
def test_published_tables_are_read(
    table: Path, text: str, times_ms: list[float], lengths: list[int], answers: list[int]
) -> None:
    table.write_text(text)
    trace = load_trace(table)
    assert [one.timestamp for one in trace] == pytest.approx(times_ms, abs=0.01)
    assert [one.input_length for one in trace] == lengths
    assert [one.output_length for one in trace] == answers
    blocks = [block for one in trace for block in one.hash_ids]
    assert len(blocks) == len(set(blocks)) == sum(-(-tokens // 512) for tokens in lengths)


def replayed(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(path), str(EXAMPLE), *arguments])


def test_a_table_is_replayed(table: Path) -> None:
    assert replayed(table, "--json").exit_code == 0


def test_a_part_of_a_trace_begins_anew(table: Path) -> None:
    rows = "".join(f"{second},{second + 1},1\n" for second in range(100))
    table.write_text("Timestamp,Request tokens,Response tokens\n" + rows)
    part = load_trace(table, Part(begin_s=20, end_s=30))
    assert [one.timestamp for one in part] == [1000.0 * second for second in range(10)]
    assert [one.input_length for one in part] == list(range(21, 31))
    assert len(load_trace(table, Part(requests=7))) == 7
    assert 30 < len(load_trace(table, Part(thin=2.0))) < 70


def test_copies_share_nothing_but_the_shape() -> None:
    one = [TraceRequest(1000.0 * n, 100, 10, (n,)) for n in range(50)]
    three = superposed(one, 3, seed=1)
    assert len(three) == 150
    assert len({block for request in three for block in request.hash_ids}) == 150
    assert three[0].timestamp >= 0
    assert three[-1].timestamp <= one[-1].timestamp + 1
    assert three == sorted(three, key=lambda request: request.timestamp)
    assert superposed(one, 3, seed=2) != three


def test_requests_are_drawn_from_rates(table: Path) -> None:
    table.write_text(RATES)
    trace = load_trace(table, Part(thin=10.0))
    first = [one for one in trace if one.timestamp < 600_000]
    second = [one for one in trace if 600_000 <= one.timestamp < 1_200_000]
    assert len(first) == pytest.approx(6000, rel=0.05)
    assert len(second) == pytest.approx(3000, rel=0.15)
    assert len(first) + len(second) == len(trace)
    lengths = sorted(one.input_length for one in trace)
    for part, tokens in ((0.5, 80), (0.9, 800), (0.99, 3000)):
        assert lengths[int(part * len(lengths))] == pytest.approx(tokens, rel=0.15)
    gaps = [b.timestamp - a.timestamp for a, b in pairwise(second)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.2)
    assert load_trace(table, Part(thin=10.0)) == trace
    assert load_trace(table, Part(thin=10.0), seed=1) != trace


def test_a_low_rate_is_kept_across_rows() -> None:
    """A gap that is longer than a row goes on in the next one."""
    tokens = (10.0, 20.0, 30.0)
    rows = [RateRow(10.0 * n, 0.02, 1.0, tokens, tokens) for n in range(10_000)]
    trace = from_rates(rows, thin=1.0, begin_s=0.0, end_s=1e5, seed=3)
    assert len(trace) == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns a, b; expected those of one of: TIMESTAMP"),
        (AZURE_2023 + "yesterday,3,4\n", "line 4"),
        (AZURE_2023 + "2023-11-16 18:15:51.1,0,4\n", "input_length 0"),
        (BURSTGPT + "46,GPT-4,many,4,9,x\n", "expected a time and two numbers of tokens"),
        (RATES + "1100,1,1,1,1,1,1,1,1\n", "line 5: expected a later time"),
        (RATES + "1800,x,1,1,1,1,1,1,1\n", "line 5: could not convert"),
        (RATES[: RATES.index("600,")], "expected two rows or more"),
    ],
)
def test_what_is_wrong_with_a_table_is_told(table: Path, text: str, message: str) -> None:
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(table)


def test_a_part_without_requests_is_told(table: Path) -> None:
    done = replayed(table, "--begin", "100")
    assert done.exit_code != 0
    assert "no request is left" in str(done.exception) + done.output

"""``commutator size``: how large storage tiers have to be for a model and its sessions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import attrs
import click
from attrs import frozen

from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit.model_kv import USUAL_BYTES, ModelKv, read_model_kv
from commutator_models.models import STATE_BYTES, rounded

_HOUR_S = 3600
_DAY_HOURS = 24
_RESERVE = Fraction(11, 10)
"""More than what is kept: the last blocks of prompts are partial, and evictions need time."""


@frozen(kw_only=True)
class Workload:
    """What is asked of a deployment."""

    session_tokens: int
    """Prompt and answers of a session at its end, with what all sessions begin with."""
    shared_tokens: int = 0
    """That all sessions begin with: instructions, tools."""
    sessions_per_hour: float
    hours: float
    """How long after its last turn a session should still be found."""
    active: int = 0
    """Sessions that are computed at the same time."""
    block_tokens: int = 16
    number_bytes: int = USUAL_BYTES


@frozen(kw_only=True)
class Sizing:
    """What follows; sizes in bytes, of the whole model over all its GPUs."""

    token_bytes: float
    session_bytes: int
    """Of one session, without what all share."""
    shared_bytes: int
    active_bytes: int
    """In the engines' own memory, for the sessions that are computed."""
    kept_sessions: float
    tiers_bytes: int
    """In all tiers together, with a tenth in reserve."""
    written_bytes_per_s: float
    """Into tiers, in the mean."""
    written_bytes_per_day: float


def sizing(model: ModelKv, load: Workload) -> Sizing | None:
    """None where the model's configuration does not say how large its KV is.

    A session takes, for each of its tokens beyond the shared ones, what the layers that read every
    token keep; and once what windows and recurrent states hold at the place where it is resumed.
    """
    token = model.prefix_token_bytes(load.number_bytes)
    windows = model.window_bytes(load.number_bytes)
    state = model.state_bytes(load.number_bytes, model.state_number_bytes or STATE_BYTES)
    if token is None or windows is None or state is None:
        return None
    shared_tokens = min(load.shared_tokens, load.session_tokens)
    own_tokens = _whole(load.session_tokens - shared_tokens, load.block_tokens)
    once = windows + state
    session = math.ceil(own_tokens * token + once)
    shared = math.ceil(_whole(shared_tokens, load.block_tokens) * token + once)
    shared = shared if shared_tokens else 0
    kept = load.sessions_per_hour * load.hours
    written = load.sessions_per_hour * session / _HOUR_S
    return Sizing(
        token_bytes=float(token),
        session_bytes=session,
        shared_bytes=shared,
        active_bytes=load.active * session + shared,
        kept_sessions=kept,
        tiers_bytes=math.ceil((Fraction(kept) * session + shared) * _RESERVE),
        written_bytes_per_s=written,
        written_bytes_per_day=written * _HOUR_S * _DAY_HOURS,
    )


def _whole(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens) * block_tokens


@click.command(
    epilog="Example: commutator size /models/llama-3-70b --session-tokens 8000 --sessions-per-hour "
    "500 --hours 4 --tier dram=400GB --tier nvme=4TB"
)
@click.argument("source")
@click.option(
    "--session-tokens",
    type=click.IntRange(1),
    required=True,
    help="Tokens of a session at its end: prompts, documents and answers.",
)
@click.option(
    "--shared-tokens",
    type=click.IntRange(0),
    default=0,
    help="Of these, what every session begins with: instructions, tools.",
)
@click.option(
    "--sessions-per-hour",
    type=click.FloatRange(0, min_open=True),
    required=True,
    help="New sessions in an hour.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="How long after its last turn a session should still be found.",
)
@click.option(
    "--active",
    type=click.IntRange(0),
    default=0,
    help="Sessions that are computed at the same time.",
)
@click.option(
    "--kv-bytes",
    type=click.IntRange(1, 4),
    help="Bytes of a number in the KV cache; by default as the model's dtype: 1 for fp8.",
)
@click.option(
    "--block-tokens", type=click.IntRange(1), default=16, show_default=True, help="Of the engine."
)
@click.option(
    "--tier",
    "tiers",
    metavar="KIND=SIZE",
    multiple=True,
    help="A tier, fastest first, such as dram=400GB: how many hours it holds. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(
    source: str,
    session_tokens: int,
    shared_tokens: int,
    sessions_per_hour: float,
    hours: float,
    active: int,
    kv_bytes: int | None,
    block_tokens: int,
    tiers: Sequence[str],
    as_json: bool,
) -> None:
    """Compute how large storage tiers have to be for a model and its sessions.

    SOURCE is a folder with a config.json, that file, or what `source` of a model may be. Sizes are
    of the whole model: divide them by the workers of a tier that each has for itself, as `dram`
    and `nvme` are.
    """
    try:
        path = locate_model(source)
        model = read_model_kv(path if path.is_file() else path / "config.json")
    except ConfigError as error:
        raise click.UsageError(f"{error.where}: {'; '.join(error.problems)}") from error
    load = Workload(
        session_tokens=session_tokens,
        shared_tokens=shared_tokens,
        sessions_per_hour=sessions_per_hour,
        hours=hours,
        active=active,
        block_tokens=block_tokens,
        number_bytes=kv_bytes or model.number_bytes or USUAL_BYTES,
    )
    result = sizing(model, load)
    if result is None:
        raise click.UsageError(f"{source}: not known: {'; '.join(model.unknown)}")
    given = [_tier(text) for text in tiers]
    if as_json:
        held = [
            {"kind": kind, "bytes": capacity, "hours": hours_held(result, load, capacity)}
            for kind, capacity in given
        ]
        click.echo(json.dumps({**attrs.asdict(result), "tiers": held}, indent=2))
        return
    for line in _lines(model, load, result, given):
        click.echo(line)


def hours_held(result: Sizing, load: Workload, capacity: int) -> float:
    """How long a tier of that many bytes holds sessions after their last turn."""
    room = float(capacity / _RESERVE) - result.shared_bytes
    return max(0.0, room / result.session_bytes / load.sessions_per_hour)


_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}


def _tier(text: str) -> tuple[str, int]:
    kind, _, value = text.partition("=")
    for unit, factor in _UNITS.items():
        number = value.removesuffix(unit)
        if number != value:
            try:
                return kind, int(float(number) * factor)
            except ValueError:
                break
    raise click.BadParameter(
        f"expected KIND=SIZE such as dram=400GB, got {text}", param_hint="tier"
    )


def _lines(
    model: ModelKv, load: Workload, result: Sizing, tiers: Sequence[tuple[str, int]]
) -> Iterator[str]:
    yield f"{model.model_type}: {result.token_bytes:,.6g} bytes of KV a token"
    own = load.session_tokens - min(load.shared_tokens, load.session_tokens)
    yield f"a session of {own:,} tokens of its own: {rounded(result.session_bytes)}"
    if result.shared_bytes:
        yield f"what all sessions share, once: {rounded(result.shared_bytes)}"
    if load.active:
        yield f"{load.active} active sessions: {rounded(result.active_bytes)} of GPU memory for KV"
    yield (
        f"{load.sessions_per_hour:g} sessions an hour, kept for {load.hours:g} h: "
        f"{result.kept_sessions:,.0f} sessions, {rounded(result.tiers_bytes)} of tiers, with a "
        "tenth in reserve"
    )
    yield (
        f"written: {rounded(result.written_bytes_per_s)}/s in the mean, "
        f"{rounded(result.written_bytes_per_day)} a day"
    )
    held = 0
    for kind, capacity in tiers:
        held += capacity
        reach = hours_held(result, load, held)
        enough = "enough" if reach >= load.hours else f"{load.hours:g} h are wanted"
        yield f"to {kind} of {rounded(capacity)}: the last {reach:.3g} h; {enough}"

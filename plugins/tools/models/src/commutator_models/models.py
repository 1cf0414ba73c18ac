"""``commutator models``: what a model keeps as KV, and what engines do with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs
import click

from commutator import EngineConnector
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit.model_kv import (
    SUPPORT_NAMES,
    USUAL_BYTES,
    KvLayers,
    ModelKv,
    WithKvSupport,
    model_lines,
    read_model_kv,
    support_lines,
)
from commutator_models.families import families

STATE_BYTES = 4
"""Of a number of a recurrent state, where nothing says it: float32."""


@click.command(epilog="Example: commutator models /models/qwen3-next --engine vllm")
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option("--engine", "engines", multiple=True, help="Only this engine; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(sources: Sequence[str], engines: Sequence[str], *, as_json: bool) -> None:
    """Show what the KV of models needs, and what engines do with it.

    SOURCE is a folder with a config.json, that file, or what `source` of a model in a
    configuration may be. Without one: a table of families, in bfloat16 with states in float32,
    of the sizes that transformers' configuration classes have by default.
    """
    supports = _chosen(engine_supports(), engines)
    if sources:
        read = [(source, _read(source)) for source in sources]
    else:
        read = [(family.title, family.model) for family in families()]
    if as_json:
        click.echo(json.dumps([_plain(name, model, supports) for name, model in read], indent=2))
    elif sources:
        for name, model in read:
            click.echo(f"{name}:")
            for line in _described(model, supports):
                click.echo(f"  {line}")
    else:
        for line in _table([_HEAD, *(sizes_row(name, model) for name, model in read)]):
            click.echo(line)


def engine_supports() -> Mapping[str, WithKvSupport]:
    """The connectors of installed engines that say what they do with a model's KV, by kind."""
    from commutator.plugins import load_plugins

    kinds = load_plugins().engines.kinds
    found: dict[str, Any] = {name: kind.thing for name, kind in kinds.items()}
    return {
        name: connector
        for name, connector in sorted(found.items())
        if isinstance(connector, EngineConnector) and isinstance(connector, WithKvSupport)
    }


def _chosen(
    supports: Mapping[str, WithKvSupport], engines: Sequence[str]
) -> Mapping[str, WithKvSupport]:
    if unknown := sorted(set(engines) - supports.keys()):
        there = ", ".join(supports) or "none"
        raise click.UsageError(
            f"--engine {unknown[0]}: no such engine is installed that knows of models' KV; "
            f"there are: {there}"
        )
    return {name: one for name, one in supports.items() if not engines or name in engines}


def _read(source: str) -> ModelKv:
    try:
        path = locate_model(source)
        if path.suffix != ".gguf":
            return read_model_kv(path if path.is_file() else path / "config.json")
    except ConfigError as error:
        raise click.UsageError(f"{error.where}: {'; '.join(error.problems)}") from error
    raise click.UsageError(f"{source}: a GGUF file has no config.json; name the model's folder")


def _described(model: ModelKv, supports: Mapping[str, WithKvSupport]) -> Iterator[str]:
    state = model.state_number_bytes or STATE_BYTES
    yield from model_lines(model, model.number_bytes or USUAL_BYTES, state)
    for name, connector in supports.items():
        for line in support_lines(connector.kv_support(model)):
            yield f"{name}: {line}"


def _plain(name: str, model: ModelKv, supports: Mapping[str, WithKvSupport]) -> dict[str, Any]:
    def verdicts(connector: WithKvSupport) -> dict[str, Any]:
        support = connector.kv_support(model)
        return {each: attrs.asdict(getattr(support, each)) for each in SUPPORT_NAMES}

    return {
        "name": name,
        **attrs.asdict(model),
        "bytes": dict(zip(("token", "windows", "state"), _sizes(model), strict=True)),
        "engines": {engine: verdicts(connector) for engine, connector in supports.items()},
    }


_HEAD = ("model", "layers", "bytes a token", "windows", "a state", "context")


def sizes_row(name: str, model: ModelKv) -> tuple[str, ...]:
    """A line of the table of families; "?" where a size is not known."""
    token, windows, state = _sizes(model)
    layers = ", ".join(layers_text(each) for each in model.layers)
    context = "?" if model.context_tokens is None else f"{model.context_tokens:,}"
    if model.context_tokens is None and model.context_limit.startswith("no limit"):
        context = "no limit"
    return (
        name,
        layers,
        "?" if token is None else f"{token:,.6g}",
        _size(windows),
        _size(state),
        context,
    )


def layers_text(layers: KvLayers) -> str:
    """How many layers of which kind, such as "36 sliding (4,096)"."""
    window = "" if layers.window is None else f" ({layers.window:,})"
    rate = "" if layers.tokens_per_row == 1 else f" (1:{layers.tokens_per_row})"
    return f"{layers.count} {layers.kind.replace('_', ' ')}{window}{rate}"


def _sizes(model: ModelKv) -> tuple[float | None, float | None, float | None]:
    """Bytes of a further token, of full windows and of a state."""

    def number(size: Fraction | int | None) -> float | None:
        return None if size is None else float(size)

    return (
        number(model.prefix_token_bytes(USUAL_BYTES)),
        number(model.window_bytes(USUAL_BYTES)),
        number(model.state_bytes(USUAL_BYTES, model.state_number_bytes or STATE_BYTES)),
    )


def _size(size: float | None) -> str:
    return "?" if size is None else "" if not size else rounded(size)


def rounded(size: float) -> str:
    """To three digits, in the notation of options."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()

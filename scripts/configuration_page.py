"""Writes ``docs/reference/configuration/``, a page for each section, from the configuration classes themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
from contract_page import write_pages

from commutator.config.model import Config
from commutator.contract.disagg import DisaggregationConfig
from commutator.contract.door import DoorConfig, FrontendConfig
from commutator.contract.planner import PlannerConfig
from commutator.contract.routing import RouterConfig, RouteStage
from commutator.contract.settings import Secret
from commutator.contract.tier import TierConfig
from commutator.plugins import load_plugins
from commutator.schema import describe

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration"
HEAD = """# Configuration

Every option, generated from the classes that read it (`make docs`). `commutator config schema` prints the
same as JSON Schema, so that editors complete it; `commutator config show FILE` shows the effective values
and where each comes from. See [how to configure](../../how-to/configure.md) for overrides and secrets, and
[what should run](../../explanation/desired.md#when-an-option-takes-effect) for when a changed option takes effect.

| section | what it says | kinds |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """The pages by their files' names: the first, and one for each section of a file."""
    host = load_plugins()
    found, rows = {}, []
    attrs.resolve_types(Config, include_extras=True)
    for field in attrs.fields(Config):
        found[f"{field.name}.md"] = text = section(host, field)
        kinds = ", ".join(
            f"[`{kind}`]({field.name}.md#{anchor(title)})"
            for title, kind in re.findall(r"^## `(.*?kind: (\w+))`$", text, re.MULTILINE)
        )
        what = field.metadata["doc"].partition(". ")[0].rstrip(".").replace("|", "\\|")
        rows.append(f"| [`{field.name}`]({field.name}.md) | {what}. | {kinds} |")
    return {"index.md": HEAD + "\n".join(rows) + "\n"} | found


def anchor(title: str) -> str:
    """Of a heading, as Python-Markdown makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def section(host: Any, field: Any) -> str:
    parts = [f"# `{field.name}`\n\n{field.metadata['doc']}\n"]
    parts.append(
        f"Takes effect, where an option says nothing else: {field.metadata['takes_effect']}.\n"
    )
    seam = {
        "engines": host.engines,
        "router": host.routers,
        "tiers": host.tiers,
        "auth": host.authenticators,
        "limiter": host.limiters,
        "traffic": host.traffics,
        "operations": host.operations,
        "registry": host.registries,
        "launcher": host.launchers,
    }
    if field.name == "router":
        parts.append(
            "Every policy has the options from `block_size` to `busy`; the stages of the "
            "`pipeline` come after it.\n"
        )
        parts += inner(field.name, RouterConfig)
        parts += kinds(host.fairness, "router.busy.fairness, ")
    parts += planners(host) if field.name == "planner" else ()
    if field.name == "tiers":
        parts.append("Of every kind; a kind may be there more than once:\n")
        parts.append(table(TierConfig))
        parts += inner("tiers[]", TierConfig)
        parts += kinds(host.evictions, "tiers[].eviction, ")
    if field.name == "frontend":
        parts.append("Of the processes, which all doors share:\n")
        parts.append(table(FrontendConfig))
        parts.append("## `frontend.doors[]`\n")
        parts.append(
            "One door's options may stand in `frontend` itself; `admin: {host, port}` beside "
            "them is a second door with `operations: open` and no protocol. Of every kind:\n"
        )
        parts.append(table(DoorConfig))
        parts += kinds(host.doors, "frontend.doors[], ", base=DoorConfig)
        for kind in host.doors.kinds.values():
            parts += inner("frontend.doors[]", kind.config_class)
        parts += kinds(host.protocols, "frontend.doors[].protocols[], ")
        parts += kinds(host.response_stores, "store, ")
    elif field.name == "observers":
        parts.append("To write another, see [an example](../../plugins/csv_observer/).\n")
        parts += kinds(host.observers)
    elif field.name == "disaggregation":
        parts.append("Of every kind:\n")
        parts.append(table(DisaggregationConfig))
        parts += kinds(host.disaggs, base=DisaggregationConfig)
    elif field.name in seam:
        base = TierConfig if field.name == "tiers" else None
        parts += kinds(seam[field.name], base=base, made_of=host.stages)
    elif field.name != "planner" and (cls := class_of(field)) is not None:
        parts.append(table(cls))
        parts += inner(field.name, cls)
    parts += kinds(host.event_buses, "cluster.events, ") if field.name == "cluster" else ()
    return "\n".join(parts)


def planners(host: Any) -> Iterator[str]:
    """Planners, and what tunes options beside them."""
    yield "Of every kind:\n"
    yield table(PlannerConfig)
    yield from inner("planner", PlannerConfig)
    yield from kinds(host.planners, base=PlannerConfig)
    yield from kinds(host.tunings, "planner.tuning, ")


def class_of(field: Any) -> Any:
    """The class of options that an option itself holds, if it does."""
    kinds = (field.type, *get_args(field.type))
    return next((c for c in kinds if isinstance(c, type) and attrs.has(c)), None)


def inner(path: str, cls: Any) -> Iterator[str]:
    """A section for each option of ``cls`` that is a mapping of options."""
    attrs.resolve_types(cls, include_extras=True)
    for field in attrs.fields(cls):
        if (kind := class_of(field)) is not None:
            yield f"## `{path}.{field.name}`\n\n{inspect.getdoc(kind)}\n"
            yield table(kind)


def kinds(register: Any, where: str = "", base: Any = None, made_of: Any = None) -> Iterator[str]:
    """``base``: its options are listed elsewhere. ``made_of``: the stages of policies."""
    for name, kind in sorted(register.kinds.items()):
        yield f"## `{where}kind: {name}`\n\nFrom `{kind.origin.distribution}` ({kind.stability}).\n"
        yield table(kind.config_class, base)
        for field in attrs.fields(kind.config_class):
            part = class_of(field)
            if part is not None and issubclass(part, RouteStage):
                yield from stages(f"kind: {name}, {field.name}", part, made_of)
            nested = register.seam in {"engine", "registry", "event bus", "planner", "traffic"}
            known = base is not None and hasattr(attrs.fields(base), field.name)
            if nested and not known and (cls := class_of(field)) not in {None, Secret}:
                yield f"## `{where}kind: {name}, {field.name}`\n\n{inspect.getdoc(cls)}\n"
                yield table(cls, hides_kind=False)
                if register.seam == "traffic":
                    yield from inner(f"traffic.{field.name}", cls)


def stages(option: str, base: Any, register: Any) -> Iterator[str]:
    """A section for each stage that an option takes."""
    for name, kind in sorted(register.kinds.items()):
        if issubclass(kind.config_class, base):
            yield f"## `{option}, kind: {name}`\n"
            what = inspect.getdoc(kind.config_class)
            yield f"{what} From `{kind.origin.distribution}` ({kind.stability}).\n"
            yield table(kind.config_class)


def table(cls: Any, base: Any = None, *, hides_kind: bool = True) -> str:
    attrs.resolve_types(cls, include_extras=True)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    known = {"kind"} if hides_kind else set()
    known |= {field.name for field in attrs.fields(base)} if base else set()
    fields = [field for field in attrs.fields(cls) if field.name not in known]
    if not fields:
        return "Without options of its own.\n"
    for field in fields:
        doc = field.metadata["doc"].replace("|", "\\|")
        what = describe(field.type)
        if (effect := field.metadata.get("takes_effect")) is not None:
            what += f"; takes effect: {effect}"
        if (tunable := field.metadata.get("tunable")) is not None:
            what += f"; tunable from {tunable.minimum:,} to {tunable.maximum:,}"
        lines.append(f"| `{field.name}` | {default(field)} | {doc} ({what}) |")
    return "\n".join(lines) + "\n"


def default(field: Any) -> str:
    value = field.default
    if value is attrs.NOTHING:
        return "*required*"
    if (make := getattr(value, "factory", None)) is not None:
        value = make()
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | int | float):
        return f"`{value}`"
    # Where a kind is to be chosen, the text says which one it is by default.
    return "see right" if hasattr(value, "kind") else "its defaults"


if __name__ == "__main__":
    write_pages(FOLDER, pages())

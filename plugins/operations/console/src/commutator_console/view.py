"""Draws a snapshot of the live view."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commutator_console.front_door import start_text

_NONE = "\N{EN DASH}"
_BARS = "▁▂▃▄▅▆▇█"
_STATES = {
    "ready": "green", "degraded": "yellow", "draining": "yellow", "starting": "yellow",
    "unreachable": "red", "failing": "red", "dead": "red",
}  # fmt: skip
_ENDS = {"running": "dim", "done": "green", "failed": "red"}
_TIER_COLORS = ("blue", "magenta", "cyan")
_MOST_CHARACTERS = 24
"""Of a name that is shown whole in a narrow terminal."""
_LINES_AROUND = 17
"""Lines of the screen that neither a worker nor a decision takes."""
_NARROW = 95
"""Characters below which tiles stand in two rows, and tables have fewer columns."""
_TILES = 6
_Tile = tuple[str, str, str, str]
"""Title, value, what stands below it, and the name of its history."""
_TILE_LINES = 4


class History:
    """The last values of what is drawn as a line."""

    def __init__(self, length: int = 24) -> None:
        self._values: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=length))

    def add(self, snapshot: Mapping[str, Any]) -> None:
        now = snapshot["requests"]
        for name in ("per_s", "running", "output_tokens_per_s"):
            self._values[name].append(now[name] or 0.0)
        for name in ("ttft", "itl"):
            self._values[name].append(now[name]["p50_s"] or 0.0)
        self._values["hits"].append(snapshot["cache"]["hit_rate"] or 0.0)

    def line(self, name: str) -> str:
        """The values as a line of bars, the highest as high as there are."""
        values = self._values[name]
        most = max(values, default=0.0)
        if not most:
            return _BARS[0] * len(values)
        return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


def view(
    snapshot: Mapping[str, Any],
    history: History,
    height: int,
    width: int,
    lost: str | None = None,
) -> RenderableType:
    """The screen for one snapshot, in lines and characters. ``lost``: why there is no newer one."""
    narrow = width < _NARROW
    workers = snapshot["workers"]
    planner = _planner(snapshot["planner"])
    around = _LINES_AROUND + len(_flows(snapshot)) + len(planner)
    around += _TILE_LINES + 1 if narrow else 0
    room = max(6, height - around - sum(one["cause"] is not None for one in workers[:3]))
    shown = min(len(workers), max(3, room // 2))
    return Group(
        _head(snapshot, lost),
        _numbers(snapshot, history, _TILES // 2 if narrow else _TILES),
        _workers(workers, shown, snapshot, narrow=narrow),
        _decisions(snapshot["recent"][: max(3, room - shown)], narrow=narrow),
        *planner,
        *_flows(snapshot),
    )


def _head(snapshot: Mapping[str, Any], lost: str | None) -> Text:
    status = snapshot["status"]
    doors = [one["door"] for one in snapshot["doors"]]
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(" Commutator ", "bold reverse")
    head.append(f" {_plain(snapshot['version'])}  ")
    head.append(f"● {status}" if lost is None else f"● {_plain(lost)}, trying again",
                _STATES.get(status, "red") if lost is None else "red")  # fmt: skip
    head.append(f"  {_plain(', '.join(snapshot['models']))}  ", "dim")
    others = snapshot["doors_not_shown"]
    if others:
        head.append(f"only {_plain(', '.join(doors))}; {others} more not shown", "yellow")
    elif len(doors) > 1:
        head.append(f"{len(doors)} front doors", "dim")
    return head


def _numbers(snapshot: Mapping[str, Any], history: History, in_a_row: int) -> Table:
    now = snapshot["requests"]
    waiting = now["queued"] + now["waiting"]
    bad = _rate((now["failed_per_s"] or 0) + (now["refused_per_s"] or 0))
    by_tier = " ".join(
        f"{_plain(one['tier'])} {_percent(one['hit_rate'])}" for one in snapshot["cache"]["by_tier"]
    )
    tiles = (
        ("Requests/s", _rate(now["per_s"]), f"{bad}/s failed", "per_s"),
        ("Running", str(now["running"]), f"{waiting} waiting", "running"),
        ("TTFT", _time(now["ttft"]["p50_s"]), f"p95 {_time(now['ttft']['p95_s'])}", "ttft"),
        ("ITL", _time(now["itl"]["p50_s"]), f"p95 {_time(now['itl']['p95_s'])}", "itl"),
        ("Tokens/s", _rate(now["output_tokens_per_s"]),
         f"{_rate(now['prompt_tokens_per_s'])} prompt", "output_tokens_per_s"),
        ("Cache hits", _percent(snapshot["cache"]["hit_rate"]), by_tier, "hits"),
    )  # fmt: skip
    table = Table(box=box.ROUNDED, expand=True, border_style="dim", show_header=False)
    for _ in range(in_a_row):
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in _rows_of(tiles, in_a_row):
        table.add_row(*(Text(title, "dim") for title, *_ in row))
        table.add_row(*(Text(value, "bold") for _, value, *_ in row))
        table.add_row(*(Text(more, "dim") for _, _, more, _ in row))
        table.add_row(*(Text(history.line(name), "yellow") for *_, name in row), end_section=True)
    return table


def _rows_of(tiles: Sequence[_Tile], size: int) -> Iterator[Sequence[_Tile]]:
    return (tiles[start : start + size] for start in range(0, len(tiles), size))


def _workers(
    workers: Sequence[Mapping[str, Any]],
    shown: int,
    snapshot: Mapping[str, Any],
    *,
    narrow: bool,
) -> Group:
    left_out, now_unix_s = snapshot["workers_left_out"], snapshot["time_unix_s"]
    hidden = len(workers) - shown + left_out
    title = f"Workers ({len(workers) + left_out})"
    table = _table(f"{title}, {hidden} of them not shown" if hidden else title)
    busiest = sorted(workers, key=lambda one: (one["state"] == "ready", -one["requests"]))[:shown]
    for name, values in (
        ("Worker", [_plain(one["worker_id"]) for one in busiest]),
        ("State", [f"● {_plain(one['state'])}" for one in busiest]),
        ("Role", [_plain(one["role"]) for one in busiest]),
    ):
        widest = max(map(len, (name, *values)))
        table.add_column(name, min_width=min(widest, _MOST_CHARACTERS), no_wrap=True)
    for name in ("In flight", "Queue"):
        table.add_column(name, justify="right", min_width=len(name), no_wrap=True)
    table.add_column("KV memory", min_width=10 if narrow else 17, no_wrap=True)
    if not narrow:
        table.add_column("Tiers", no_wrap=True, overflow="ellipsis")
        table.add_column("Pid", no_wrap=True, style="dim")
    for one in busiest if hidden else workers:
        load = one["load"]
        more = [_tiers(one["tiers"]), Text(_NONE if one["pid"] is None else str(one["pid"]))]
        table.add_row(
            Text(_plain(one["worker_id"]), "bold"),
            Text(f"● {_plain(one['state'])}", _STATES.get(one["state"], "red")),
            Text(_plain(one["role"])),
            str(one["requests"]),
            _NONE if load is None else str(load["waiting"]),
            _kv(load, 5 if narrow else 10),
            *([] if narrow else more),
        )
    lines = []
    for one in [one for one in busiest if one["cause"] is not None][:3]:
        line = Text(f" {_plain(one['worker_id'])}  ", "bold", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(_plain(start_text(one, now_unix_s)), "red"))
    return Group(table, *lines)


def _planner(planner: Mapping[str, Any] | None) -> list[RenderableType]:
    if planner is None:
        return []
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(" Planner  ", "bold")
    if "kind" not in planner:
        return [head.append("none answers", "yellow")]
    does = "acts" if planner["mode"] == "act" else "advises only"
    head.append(f"{_plain(planner['kind'])} {does}, every {planner['interval_s']:g} s", "dim")
    lines = [head]
    for one in planner["roles"]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"   {_plain(one['role'])}: ", "bold")
        there = f"{one['ready']} ready, {one['starting']} starting, {one['draining']} draining"
        line.append(f"{one['desired']} wanted, ").append(f"{there}; ", "dim")
        lines.append(line.append(_plain(one["reason"])))
    texts = [(_plain(text), "yellow") for text in planner["warnings"][:2]]
    for one in planner["recent"][:2]:
        when = time.strftime("%H:%M:%S", time.localtime(one["time"]))
        texts.append((f"{when} {_plain(one['text'])}", "dim"))
    lines += [Text(f"   {text}", style, no_wrap=True, overflow="ellipsis") for text, style in texts]
    return list(lines)


def _kv(load: Mapping[str, Any] | None, width: int) -> Text:
    if load is None or not load["kv_capacity_blocks"]:
        return Text(_NONE, "dim")
    capacity = load["kv_capacity_blocks"]
    used = round(width * load["kv_used_blocks"] / capacity)
    cached = min(width - used, round(width * load["kv_cached_blocks"] / capacity))
    part = (load["kv_used_blocks"] + load["kv_cached_blocks"]) / capacity
    bar = Text("█" * used, "yellow")
    bar.append("▓" * cached, "dim yellow").append("░" * (width - used - cached), "dim")
    return bar.append(f" {_percent(part):>4}")


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> Text:
    text = Text()
    for number, tier in enumerate(tiers):
        color = _TIER_COLORS[number % len(_TIER_COLORS)] if tier["up"] else "red"
        capacity = tier["capacity_blocks"]
        full = _percent(tier["blocks"] / capacity) if capacity else f"{tier['blocks']} blocks"
        text.append(f"{_plain(tier['name'])} ", color)
        text.append(f"{full if tier['up'] else 'down'}  ")
    return text if tiers else Text(_NONE, "dim")


def _decisions(rows: Sequence[Mapping[str, Any]], *, narrow: bool) -> Table:
    table = _table("Routing decisions")
    table.add_column("Time", style="dim", no_wrap=True)
    table.add_column("Worker", no_wrap=True)
    table.add_column("Reason", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in ("Cached", "TTFT") if narrow else ("Prompt", "Cached", "TTFT", "Answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        prefill, cached = row["prefill_worker"], row["cached_tokens"]
        worker = f"{prefill} ⇒ {row['worker_id']}" if prefill else row["worker_id"]
        known = cached is not None
        state = f"{row['generated_tokens']} tokens" if row["state"] == "done" else row["state"]
        prompt, answer = str(row["prompt_tokens"]), Text(_plain(state), _ENDS.get(row["state"], ""))
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["time_unix_s"])),
            Text(_plain(worker), "bold"),
            Text(_plain(row["reason"])),
            *([] if narrow else [prompt]),
            _percent(cached / max(1, row["prompt_tokens"])) if known else _NONE,
            _time(row["ttft_s"]),
            *([] if narrow else [answer]),
        )
    if not rows:
        table.add_row("", "", Text("none seen yet", "dim"))
    return table


def _flows(snapshot: Mapping[str, Any]) -> list[Text]:
    moved = [
        f"{_plain(one['source'])} → {_plain(one['target'])} {_rate(one['blocks_per_s'])} blocks/s"
        for one in snapshot["flows"]
        if one["blocks_per_s"]
    ]
    handed = [
        f"{_plain(one['prefill'])} ⇒ {_plain(one['decode'])} {_rate(one['per_s'])}/s "
        f"{_rate((one['bytes_per_s'] or 0) / 1e6)} MB/s"
        for one in snapshot["handovers"][:4]
    ]
    problems = [_plain(text) for text in (snapshot["problems"] + snapshot["warnings"])[:2]]
    events = [
        f"{time.strftime('%H:%M:%S', time.localtime(one['time_unix_s']))} "
        f"{_plain(one['kind'])}: {_plain(one['text'])}"
        for one in snapshot["events"][:3]
    ]
    lines = []
    for name, found, style in (
        ("KV flow", moved + handed, ""), ("Warnings", problems, "yellow"), ("Events", events, "dim")
    ):  # fmt: skip
        if found:
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f" {name}  ", "bold").append("   ".join(found), style)
            lines.append(line)
    return lines


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True,
        header_style="dim", pad_edge=False, padding=(0, 1),
    )  # fmt: skip


def _plain(text: object) -> str:
    """Names and reasons come from plugins and clients: none may steer the terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(text))


def _rate(value: float | None) -> str:
    if value is None:
        return _NONE
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"  # noqa: PLR2004


def _time(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _percent(part: float | None) -> str:
    return _NONE if part is None else f"{part:.0%}"

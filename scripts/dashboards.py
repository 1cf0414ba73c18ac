"""Writes the Grafana dashboards of ``examples/observability`` from the table of metrics.

A dashboard begins with the panels that are written here; every metric that none of these asks for
gets a panel of its own, so a new metric is shown without anybody's doing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.metrics.families import FAMILIES, Family

FOLDER = Path(__file__).resolve().parent.parent / "examples/observability/grafana/dashboards"

_NAME = re.compile(r"commutator_\w+")
_PARTS = ("_bucket", "_sum", "_count")
_QUANTILES = (0.5, 0.9, 0.99)
_UNITS = re.compile(r"(_bytes_per|(?<!_per))_seconds?(_total)?$|_total$")
_COLUMNS, _WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 8, 4
_RATE = "[$__rate_interval]"
_EACH_FRONT_DOOR_SAYS_THE_SAME = frozenset({"worker", "process"})
"""Labels of what a front door repeats of others: the largest of what front doors say is right."""


@frozen(kw_only=True)
class Query:
    expr: str
    legend: str = ""


@frozen(kw_only=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    meaning: str = ""
    stat: bool = False
    """One number instead of a course over time."""

    @property
    def metrics(self) -> set[str]:
        """The metrics that the queries ask for, by the names of their families."""
        return {
            metric for query in self.queries for metric in map(_defined, _NAME.findall(query.expr))
        }


@frozen(kw_only=True)
class Dashboard:
    name: str
    title: str
    what: str
    """Which metrics without a panel it shows: a pattern that their names begin with."""
    panels: tuple[Panel, ...]


@cache
def _names() -> frozenset[str]:
    return frozenset(metric.name for metric in FAMILIES)


def _defined(sampled: str) -> str:
    """The family's name of a sample's: histograms are sampled in parts."""
    names = _names()
    for part in _PARTS:
        if sampled not in names and sampled.endswith(part):
            return sampled.removesuffix(part)
    return sampled


def _one(
    title: str, expr: str, legend: str = "", unit: str = "short", meaning: str = "", **more: Any
) -> Panel:
    queries = (Query(expr=expr, legend=legend),)
    return Panel(title=title, queries=queries, unit=unit, meaning=meaning, **more)


def _quantiles(title: str, metric: str, labels: str = "", meaning: str = "") -> Panel:
    queries = tuple(
        Query(
            expr=f"histogram_quantile({quantile}, "
            f"sum by (le) (rate({metric}_bucket{labels}{_RATE})))",
            legend=f"p{quantile * 100:g}",
        )
        for quantile in _QUANTILES
    )
    return Panel(title=title, queries=queries, unit=_unit(metric), meaning=meaning)


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}{_RATE})) / sum(rate({whole}{_RATE}))"


def _unit(name: str) -> str:
    for end, unit in (
        ("bytes_per_second", "Bps"),
        ("_seconds", "s"),
        ("_seconds_total", "s"),
        ("_bytes", "bytes"),
        ("_bytes_total", "bytes"),
        ("_hit_rate", "percentunit"),
    ):
        if name.endswith(end):
            return unit
    return "short"


MODEL = '{model=~"$model"}'
DASHBOARDS = (
    Dashboard(
        name="overview",
        title="Overview",
        what="",
        panels=(
            _one(
                "Alerts firing",
                'count(ALERTS{alertstate="firing", alertname=~"Commutator.*"}) or vector(0)',
                stat=True,
            ),
            _one("Models ready", "min by (model) (commutator_model_ready)", "{{model}}", stat=True),
            _one(
                "Workers by state",
                "count by (state) (max by (worker, state) (commutator_worker_state))",
                "{{state}}",
                stat=True,
            ),
            _one(
                "Versions", "count by (version) (commutator_build_info)", "{{version}}", stat=True
            ),
            _one(
                "Requests by code",
                f"sum by (code) (rate(commutator_requests_total{MODEL}{_RATE}))",
                "{{code}}",
                "reqps",
            ),
            _one(
                "Part of requests that failed (5xx)",
                'sum(rate(commutator_requests_total{code=~"5.."}[$__rate_interval])) '
                "/ sum(rate(commutator_requests_total[$__rate_interval])) or vector(0)",
                unit="percentunit",
            ),
            _quantiles("Time to the first token", "commutator_time_to_first_token_seconds", MODEL),
            _quantiles("Inter-token latency", "commutator_inter_token_latency_seconds", MODEL),
            Panel(
                title="Tokens",
                queries=(
                    Query(
                        expr=f"sum(rate(commutator_prompt_tokens_total{MODEL}{_RATE}))",
                        legend="prompt",
                    ),
                    Query(
                        expr=f"sum(rate(commutator_cached_tokens_total{MODEL}{_RATE}))",
                        legend="prompt, cached",
                    ),
                    Query(
                        expr=f"sum(rate(commutator_output_tokens_total{MODEL}{_RATE}))",
                        legend="generated",
                    ),
                ),
                unit="suffix: tokens/s",
            ),
            _one(
                "Part of prompts found in KV caches",
                _share(
                    f"commutator_cached_tokens_total{MODEL}",
                    f"commutator_prompt_tokens_total{MODEL}",
                ),
                unit="percentunit",
                meaning="Of all prompt tokens, as the workers tell.",
            ),
            Panel(
                title="Requests in the front doors",
                queries=(
                    Query(expr="sum(commutator_active_requests)", legend="being served"),
                    Query(expr="sum(commutator_queued_requests)", legend="waiting for a place"),
                    Query(
                        expr="sum(commutator_router_queue_requests)", legend="waiting for a worker"
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        name="routing",
        title="Routing",
        what=r"commutator_(router_(?!event|indexed)|migra|registry|prompt_cache|tokenizer)",
        panels=(
            _quantiles("Time of a decision", "commutator_router_decision_seconds", MODEL),
            Panel(
                title="KV hit rate: as routed, and as the workers found",
                queries=(
                    Query(
                        expr=_share(
                            "commutator_router_kv_hit_rate_sum",
                            "commutator_router_kv_hit_rate_count",
                        ),
                        legend="as routed",
                    ),
                    Query(
                        expr=_share(
                            "commutator_cached_tokens_total", "commutator_prompt_tokens_total"
                        ),
                        legend="as found",
                    ),
                ),
                unit="percentunit",
                meaning="Routed well above found: the router believes in blocks that are gone.",
            ),
            _one(
                "Part of reuse given up for balance",
                "sum(rate(commutator_router_given_up_blocks_total[$__rate_interval])) / "
                "(sum(rate(commutator_router_given_up_blocks_total[$__rate_interval])) + "
                "sum(rate(commutator_router_overlap_blocks_total[$__rate_interval])))",
                unit="percentunit",
            ),
        ),
    ),
    Dashboard(
        name="kv-tiers",
        title="KV tiers",
        what="commutator_kv_",
        panels=(
            _one(
                "Tiers that are down",
                "sum by (tier) (1 - max by (worker, tier) (commutator_kv_tier_up))",
                "{{tier}}",
                stat=True,
            ),
            _one(
                "Used part of each tier",
                'sum by (tier) (max by (worker, tier) (commutator_kv_blocks{state="published"})) / '
                "sum by (tier) (max by (worker, tier) (commutator_kv_capacity_blocks))",
                "{{tier}}",
                "percentunit",
                "Of bounded tiers.",
            ),
            _one(
                "KV of one more token of a sequence",
                "max by (layers) (commutator_kv_token_bytes)",
                "{{layers}}",
                "bytes",
                "By kind of layers, on each rank; 0 for states.",
            ),
            _one(
                "The most KV of a sequence",
                "max by (layers) (commutator_kv_sequence_most_bytes)",
                "{{layers}}",
                "bytes",
                "In layers with a window or a state, on each rank.",
            ),
        ),
    ),
    Dashboard(
        name="disaggregation",
        title="Disaggregation",
        what="commutator_(disaggregation|handover|prefill|worker_handover)",
        panels=(
            _one(
                "Part of requests prefilled elsewhere",
                _share(
                    'commutator_disaggregation_decisions_total{separate="yes"}',
                    "commutator_disaggregation_decisions_total",
                ),
                unit="percentunit",
                meaning="Of those that could have been.",
            ),
            _one(
                "Part of sides that failed",
                '(sum by (leg) (rate(commutator_handover_legs_total{outcome="failed"}'
                "[$__rate_interval])) or 0 * sum by (leg) "
                "(rate(commutator_handover_legs_total[$__rate_interval]))) / sum by (leg) "
                "(rate(commutator_handover_legs_total[$__rate_interval]))",
                "{{leg}}",
                "percentunit",
            ),
        ),
    ),
    Dashboard(
        name="engines",
        title="Engines",
        what="commutator_(worker_(?!handover)|router_event|router_indexed|model|refused)",
        panels=(
            _one(
                "Requests in flight at each worker",
                "topk(20, max by (worker) (commutator_worker_active_requests))",
                "{{worker}}",
            ),
            _one(
                "Workers by state and role",
                "count by (role, state) (max by (worker, role, state) (commutator_worker_state))",
                "{{role}} {{state}}",
            ),
        ),
    ),
    Dashboard(
        name="planner",
        title="Planner",
        what="commutator_planner_",
        panels=(
            Panel(
                title="Workers: wanted, and there",
                queries=tuple(
                    Query(
                        expr=f"max by (role) (commutator_planner_{what}_workers)",
                        legend=f"{{{{role}}}} {word}",
                    )
                    for what, word in (("desired", "wanted"), ("ready", "ready"))
                ),
            ),
            Panel(
                title="Workers on their way",
                queries=tuple(
                    Query(
                        expr=f"max by (role) (commutator_planner_{what}_workers)",
                        legend=f"{{{{role}}}} {what}",
                    )
                    for what in ("starting", "draining")
                ),
            ),
            _one(
                "Part of requests that met the target",
                "max by (target) (commutator_planner_attained_ratio)",
                "{{target}}",
                "percentunit",
            ),
        ),
    ),
    Dashboard(
        name="tenants",
        title="Tenants",
        what="commutator_(principal|requests_rejected)",
        panels=(
            _one(
                "Tokens of each principal",
                "topk(20, sum by (principal) (rate(commutator_principal_prompt_tokens_total"
                "[$__rate_interval]) + rate(commutator_principal_output_tokens_total"
                "[$__rate_interval])))",
                "{{principal}}",
                "suffix: tokens/s",
            ),
            _one(
                "Part of each principal's prompts found in KV caches",
                "sum by (principal) (rate(commutator_principal_cached_tokens_total"
                "[$__rate_interval])) / sum by (principal) "
                "(rate(commutator_principal_prompt_tokens_total[$__rate_interval]))",
                "{{principal}}",
                "percentunit",
            ),
        ),
    ),
)
"""A metric without a panel goes to the first whose ``what`` matches, or else to the overview."""


def filled(dashboards: Iterable[Dashboard] = DASHBOARDS) -> Iterator[tuple[Dashboard, list[Panel]]]:
    """Each dashboard with all of its panels."""
    dashboards = tuple(dashboards)
    shown = {metric for each in dashboards for panel in each.panels for metric in panel.metrics}
    rest: dict[str, list[Panel]] = {each.name: list(each.panels) for each in dashboards}
    for metric in FAMILIES:
        if metric.name not in shown:
            rest[_home(metric, dashboards).name].append(_panel(metric))
    for each in dashboards:
        yield each, rest[each.name]


def _home(metric: Family, dashboards: tuple[Dashboard, ...]) -> Dashboard:
    matching = (d for d in dashboards if d.what and re.match(d.what, metric.name))
    return next(matching, dashboards[0])


def _panel(metric: Family) -> Panel:
    """A metric's panel by its kind and labels."""
    words = _UNITS.sub("", metric.name.removeprefix("commutator_")).split("_")
    title = " ".join(["KV" if word == "kv" else word for word in words])
    title = title[0].upper() + title[1:]
    selector = MODEL if "model" in metric.labels else ""
    if metric.kind == "histogram":
        return _quantiles(title, metric.name, selector, metric.meaning)
    repeated = _EACH_FRONT_DOOR_SAYS_THE_SAME & set(metric.labels)
    value = f"{metric.name}{selector}"
    unit = _unit(metric.name)
    if metric.kind == "counter":
        value = f"rate({value}{_RATE})"
        unit = {"bytes": "Bps", "s": "suffix: s/s"}.get(unit, "ops")
    if repeated:
        value = f"max by ({', '.join(metric.labels)}) ({value})"
    labels = [label for label in metric.labels if label != "worker"] or list(metric.labels)
    # What is an age, a time or a fact about each is not a sum of them.
    most = re.search(r"_(seconds|age_seconds|info|up)$", metric.name) and metric.kind == "gauge"
    # Every front door says the same of the one planner.
    combine = "max" if most or metric.name.startswith("commutator_planner_") else "sum"
    expr = f"{combine} by ({', '.join(labels)}) ({value})" if labels else f"{combine}({value})"
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    if labels == ["worker"]:
        expr = f"topk(20, {expr})"
    return _one(title, expr, legend, unit, metric.meaning)


def files() -> dict[str, str]:
    """Text of every dashboard's file, by name."""
    return {
        f"{dashboard.name}.json": json.dumps(_json(dashboard, panels), indent=1) + "\n"
        for dashboard, panels in filled()
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _json(dashboard: Dashboard, panels: list[Panel]) -> dict[str, Any]:
    """Grafana's model of a dashboard."""
    laid, x, y, row = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        width = _COLUMNS // 4 if panel.stat else _WIDTH
        height = _STAT_HEIGHT if panel.stat else _HEIGHT
        if x + width > _COLUMNS or (x and height != row):
            x, y = 0, y + row
        row = height
        laid.append(_panel_json(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x += width
    return {
        "uid": f"commutator-{dashboard.name}",
        "title": f"Commutator: {dashboard.title}",
        "tags": ["commutator"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {
                "type": "dashboards", "tags": ["commutator"], "asDropdown": False,
                "title": "", "includeVars": True, "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource", "label": "Prometheus", "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "model", "label": "Model", "type": "query", "datasource": _SOURCE,
                    "query": "label_values(commutator_model_ready, model)", "refresh": 2,
                    "multi": True, "includeAll": True, "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": laid,
    }  # fmt: skip


def _panel_json(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "noValue": "none yet"},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or panel.title,
                "instant": panel.stat,
                "range": not panel.stat,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def write() -> None:
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()

"""``python -m bench [SCENARIO ...]``: run scenarios and print one table.

A scenario that needs what is not installed is left out, and told of; exit status 1 if it was named.
"""

from __future__ import annotations

import importlib
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.needs import NotInstalledError
from bench.result import Figure, save

SCENARIOS = {
    "decode": "the reference engine against transformers, same weights",
    "routing": "hashing, events and matching against Dynamo's own index",
    "agents": "sessions of agents with tools, also beside Dynamo's door, parsers, constraints",
    "parsers": "reading an answer, by token and family of models (needs `make test-parsers`)",
    "tokenization": "prompts of seven kinds to tokens, against the library tokenizers",
    "decision": "a whole routing decision, by prompt length and number of workers",
    "load": "chats under load against Dynamo's front door, with the load generator wrk",
    "routers": "chats over HTTP engines through sglang-router and vllm-router, and through ours",
    "keys": "chats under load with keys, limits and fairness against the same without",
    "connections": "new connections while 512 clients stream",
    "hosts": "chats with workers on another host, plain and with TLS, against one host (root)",
    "embeddings": "an encoder in process and through the door, against sentence-transformers",
    "gateway": "an endpoint picker behind Envoy, beside Envoy alone (needs `make peers`)",
    "kserve": "requests over KServe's gRPC beside Dynamo's own server",
    "handover": "KV handed over between two workers, against bare NIXL with the same descriptors",
    "kv_manager": "the KV manager's own time for each block, by number of blocks",
    "events": "CPU of a KV event on its way over NATS, against a ZMQ connection for each pair",
    "eviction": "what each eviction policy keeps of a trace, against Belady's optimum",
    "fairness": "what a flood by one key costs another, and shares by weight, end to end",
    "frontdoor": "a request through the front door against the worker asked directly",
    "places": "the part of workers' places that more streams than places use, with defaults",
    "policies": "what routing policies find in caches and how soon they answer, beside peers'",
    "registry": "workers' leases and front doors' watches in a real etcd, up to 1,000 and 20",
    "recall": "a prompt's blocks loaded from each tier against computing them",
    "planner": "worker-hours at equal attainment of the planner and nine others, in virtual time",
    "vllm": "what front doors add to a real vLLM server (needs `make vllm`)",
    "vllm_tiers": "a prompt loaded into real vLLM servers from each tier against computing it",
    "tiers": "each storage tier against raw NIXL and boto3, and LMCache",
    "transfer": "blocks moved with results, limits and checksums against bare NIXL calls",
}

_WIDTH = 140
"""Of the table in a file."""


def main(names: list[str]) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        console.print(f"unknown scenario {unknown[0]}; there are: {', '.join(SCENARIOS)}")
        return 2
    figures: list[Figure] = []
    left_out: dict[str, NotInstalledError] = {}
    for name in names or SCENARIOS:
        console.print(f"[bold]{name}[/]: {SCENARIOS[name]}")
        started_s = time.perf_counter()
        try:
            found: list[Figure] = importlib.import_module(f"bench.{name}").run()
        except NotInstalledError as missing:
            left_out[name] = missing
            continue
        console.print(f"  {time.perf_counter() - started_s:.0f} s")
        save(found, name)
        figures += found
    if figures:
        console.print(table(figures))
    for name, why in left_out.items():
        console.print(f"{name} is left out: {why}", soft_wrap=True)
    return 1 if names and left_out else 0


def table(figures: list[Figure]) -> Table:
    made = Table(title="Benchmarks: ratios above 1 are better than what stands beside them")
    for column in ("scenario", "what", "ours", "beside it", "ratio", "aim"):
        made.add_column(column, justify="right" if column in ("ours", "ratio") else "left")
    for figure in figures:
        other = f"{figure.other:.4g} ({figure.other_name})" if figure.other is not None else "-"
        ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else "-"
        made.add_row(
            figure.scenario, figure.what, f"{figure.ours:.4g} {figure.unit}", other, ratio,
            figure.aim,
        )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

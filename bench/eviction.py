"""How much of a trace each eviction policy keeps, beside the best that could be known afterwards.

``python -m bench.eviction TRACE.jsonl``: a request a line with ``timestamp`` (ms), ``input_length``
and ``hash_ids``, as Mooncake publishes them. In virtual time: each request loads the blocks of its
prompt that the tiers have and then offers all of them. The real manager decides; stores and loads
take no time. A ratio is prompt tokens found over all prompt tokens.

The optimum is Belady's with bypassing: of what is there and what comes, the block whose next use is
furthest away is not kept. A chain's beginning is needed whenever its end is, so no end is kept
without its beginning, and the optimum for blocks is the optimum for prefixes.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

from bench.kv_manager import POLICIES
from bench.result import Figure
from commutator.contract.block import BlockDescriptor, BlockKey, RetentionHints
from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.block_manager.actions import Action, LoadResult, StoreBlocks
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_engine_kit.kv.block_manager.manager import BlockManager

BLOCK_TOKENS = 512
PARTS = (0.01, 0.05, 0.2)
"""Capacities, as parts of the different blocks in the trace."""
UPPER = 0.25
"""Part of the capacity that the upper of two tiers gets."""


@frozen
class Prompt:
    """One request of the trace."""

    time_s: float
    tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Prompt]:
    prompts = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            prompts.append(
                Prompt(row["timestamp"] / 1000, row["input_length"], tuple(row["hash_ids"]))
            )
    return prompts


def made_up_trace(requests: int = 4000, seed: int = 1) -> list[Prompt]:
    """Conversations that come back, of which some share a system prompt."""
    chance = random.Random(seed)
    last, sessions, prompts = 0, list[list[int]](), list[Prompt]()

    def fresh(blocks: int) -> list[int]:
        nonlocal last
        last += blocks
        return list(range(last - blocks, last))

    systems = [fresh(chance.randint(1, 8)) for _ in range(20)]
    for number in range(requests):
        if sessions and chance.random() < 0.6:
            session = sessions[-1 - min(len(sessions) - 1, int(chance.expovariate(1 / 60)))]
        else:
            system = systems[min(len(systems) - 1, int(chance.expovariate(0.3)))]
            session = [*system]
            sessions.append(session)
        session += fresh(chance.randint(1, 12))
        prompts.append(Prompt(number * 0.3, len(session) * BLOCK_TOKENS, tuple(session)))
    return prompts


def replay(prompts: Sequence[Prompt], tiers: Sequence[TierSpec]) -> float:
    """Part of the prompt tokens that the tiers had."""
    manager = BlockManager(tiers, most_waiting=sys.maxsize)
    keys: dict[int, BlockKey] = {}
    offers: dict[int, BlockDescriptor] = {}
    hit_tokens = 0
    for number, prompt in enumerate(prompts):
        now_s = prompt.time_s
        for depth, block in enumerate(prompt.blocks):
            if block not in offers:
                keys[block] = block.to_bytes(32, "little")
                offers[block] = BlockDescriptor(
                    key=keys[block],
                    parent=keys[prompt.blocks[depth - 1]] if depth else None,
                    token_ids=(),
                    facts=RetentionHints(depth=depth),
                )
        wanted = [keys[block] for block in prompt.blocks]
        plan = manager.begin_onboard(str(number), wanted, 0, now_s, compute_s=None)
        if plan.blocks:
            loaded = {key: LoadResult.LOADED for key, _ in plan.blocks}
            _carry_out(manager, manager.finish_onboard(str(number), loaded, now_s), now_s)
        hit_tokens += min(prompt.tokens, len(plan.blocks) * BLOCK_TOKENS)
        offered = [offers[block] for block in prompt.blocks]
        _carry_out(manager, manager.offer(offered, now_s), now_s)
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def _carry_out(manager: BlockManager, actions: Iterable[Action], now_s: float) -> None:
    for action in actions:
        if isinstance(action, StoreBlocks):
            written = [
                StoredBlock(key=key, slot=0, size_bytes=1, checksum=0) for key in action.keys
            ]
            _carry_out(manager, manager.finish_store(action.move_id, written, {}, now_s), now_s)


def belady(prompts: Sequence[Prompt], capacity: int) -> float:
    """The hit ratio of the policy that knows the future."""
    never = len(prompts)
    next_use: list[list[int]] = [[] for _ in prompts]
    seen: dict[int, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        next_use[number] = [seen.get(block, never) for block in prompts[number].blocks]
        seen.update(dict.fromkeys(prompts[number].blocks, number))
    kept: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hit_tokens = 0
    for prompt, uses in zip(prompts, next_use, strict=True):
        found = 0
        while found < len(prompt.blocks) and prompt.blocks[found] in kept:
            found += 1
        hit_tokens += min(prompt.tokens, found * BLOCK_TOKENS)
        for depth, (block, use) in enumerate(zip(prompt.blocks, uses, strict=True)):
            kept[block] = use
            heapq.heappush(furthest, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(furthest)
            if kept.get(block) == -use:
                del kept[block]
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def one_tier(policy: str, capacity: int) -> list[TierSpec]:
    return [
        TierSpec(name="dram", medium="CPU", capacity_blocks=capacity, eviction=POLICIES[policy])
    ]


def two_tiers(policy: str, capacity: int) -> list[TierSpec]:
    """The same capacity in two: what the upper tier gives up goes down."""
    upper = int(UPPER * capacity)
    lower = TierSpec(
        name="nvme",
        medium="NVME",
        capacity_blocks=capacity - upper,
        eviction=POLICIES[policy],
        write="on_evict",
    )
    return [*one_tier(policy, upper), lower]


Row = dict[str, float]


def ratios(prompts: Sequence[Prompt]) -> dict[int, Row]:
    """For each capacity in blocks: the ratio of each policy, and of the optimum."""
    different = len({block for prompt in prompts for block in prompt.blocks})
    layouts: dict[str, Callable[[str, int], list[TierSpec]]] = {
        "": one_tier,
        ", two tiers": two_tiers,
    }
    rows: dict[int, Row] = {}
    for part in PARTS:
        capacity = int(part * different)
        row = {
            policy + suffix: replay(prompts, layout(policy, capacity))
            for suffix, layout in layouts.items()
            for policy in POLICIES
        }
        rows[capacity] = row | {"optimum": belady(prompts, capacity)}
    return rows


def table(rows: dict[int, Row]) -> Table:
    made = Table(title="Part of the prompt tokens found, and in parentheses of Belady's optimum")
    made.add_column("policy")
    for capacity in rows:
        made.add_column(f"{capacity:,} blocks", justify="right")
    for name in next(iter(rows.values())):
        cells = [f"{row[name]:.1%} ({row[name] / row['optimum']:.2f})" for row in rows.values()]
        made.add_row(name, *cells)
    return made


def run() -> list[Figure]:
    """For ``python -m bench``: the trace named by COMMUTATOR_TRACE, or a made-up one."""
    path = os.environ.get("COMMUTATOR_TRACE")
    rows = ratios(read_trace(Path(path)) if path else made_up_trace())
    return [
        Figure(
            scenario="eviction",
            what=f"{name}, {capacity:,} blocks, {'trace' if path else 'made-up trace'}",
            ours=ratio,
            other=row["optimum"],
            unit="of prompt tokens",
            other_name="Belady",
        )
        for capacity, row in rows.items()
        for name, ratio in row.items()
        if name != "optimum"
    ]


def main(arguments: Sequence[str]) -> int:
    prompts = read_trace(Path(arguments[0])) if arguments else made_up_trace()
    Console().print(table(ratios(prompts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

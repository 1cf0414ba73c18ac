"""What a tier keeps of models with windows and recurrent states, by how it evicts their blocks.

``python -m bench.group_eviction TRACE.jsonl [REQUESTS]``: a trace as for ``bench.eviction``. In
virtual time: each request loads the boundary that all groups can serve, and offers the blocks that
it computed. The real manager decides; stores and loads take no time. A ratio is prompt tokens
before the boundary over all prompt tokens.

*equal*: a block behind a window or a state before the last has the worth of any other. *behind
first*: as the kit does it. *never stored*: such blocks are not offered at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.eviction import BLOCK_TOKENS, Prompt, _carry_out, made_up_trace, read_trace
from bench.kv_manager import POLICIES
from commutator.contract.block import BlockDescriptor, RetentionHints
from commutator_engine_kit.kv import KvGroup, KvKind, is_behind
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.block_manager.onboard import GroupChain

FULL = KvGroup(kind=KvKind.FULL, block_size=BLOCK_TOKENS)
WINDOW = KvGroup(kind=KvKind.SLIDING, block_size=BLOCK_TOKENS, window=1024)
STATE = KvGroup(kind=KvKind.RECURRENT, block_size=BLOCK_TOKENS)
MODELS: Mapping[str, Sequence[KvGroup]] = {
    "5 windows of 1,024 : 1 full (Gemma 3)": (FULL, *[WINDOW] * 5),
    "1 window of 1,024 : 1 full (gpt-oss)": (FULL, WINDOW),
    "3 states : 1 full (Qwen3-Next)": (FULL, *[STATE] * 3),
}
RULES = ("equal", "behind first", "never stored")
PARTS = (0.02, 0.1, 0.4)
"""Capacities, as parts of the different blocks of all groups."""


def replay(prompts: Sequence[Prompt], groups: Sequence[KvGroup], capacity: int, rule: str) -> float:
    """Part of the prompt tokens that need not be computed."""
    spec = TierSpec(name="dram", medium="CPU", capacity_blocks=capacity, eviction=POLICIES["lru"])
    manager = BlockManager([spec], most_waiting=sys.maxsize)
    hit_tokens = 0
    for number, prompt in enumerate(prompts):
        now_s = prompt.time_s
        keys = [
            [sha256(b"%d %d" % (group, block)).digest() for block in prompt.blocks]
            for group in range(len(groups))
        ]
        chains = [GroupChain(group=g, keys=own) for g, own in zip(groups, keys, strict=True)]
        limit = max(0, prompt.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        plan = manager.begin_group_onboard(str(number), chains, limit, now_s, token_s=None)
        if plan.blocks:
            loaded = {key: LoadResult.LOADED for key, _ in plan.blocks}
            _carry_out(manager, manager.finish_onboard(str(number), loaded, now_s), now_s)
        hit_tokens += plan.boundary
        first = plan.boundary // BLOCK_TOKENS
        whole = prompt.tokens // BLOCK_TOKENS
        for depth in range(first, min(whole, len(prompt.blocks))):
            offers = []
            for group, own in zip(groups, keys, strict=True):
                behind = is_behind(group, depth, prompt.tokens, BLOCK_TOKENS)
                if behind and rule == "never stored":
                    continue
                parent = own[depth - 1] if depth and group.keeps_prefix else None
                facts = RetentionHints(depth=depth, behind=behind and rule == "behind first")
                offers.append(
                    BlockDescriptor(key=own[depth], parent=parent, token_ids=(), facts=facts)
                )
            _carry_out(manager, manager.offer(offers, now_s), now_s)
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def table(prompts: Sequence[Prompt]) -> Table:
    made = Table(title="Part of the prompt tokens that a tier serves in every group (lru)")
    for title in ("model", "capacity, of all blocks", *RULES):
        made.add_column(title, justify="left" if title == "model" else "right")
    different = len({block for prompt in prompts for block in prompt.blocks})
    for name, groups in MODELS.items():
        for part in PARTS:
            capacity = int(part * different * len(groups))
            ratios = [replay(prompts, groups, capacity, rule) for rule in RULES]
            made.add_row(name, f"{part:.0%}", *(f"{ratio:.1%}" for ratio in ratios))
    return made


def main() -> None:
    """Print the table for a trace, or for made-up conversations."""
    prompts = read_trace(Path(sys.argv[1])) if len(sys.argv) > 1 else made_up_trace()
    if len(sys.argv) > 2:
        prompts = prompts[: int(sys.argv[2])]
    Console(width=100).print(table(prompts))


if __name__ == "__main__":
    main()

"""Makes storage tiers from the entries of ``tiers``, for any engine.

entries --read_tiers--> TierConfig --make_tiers--> TierSetup --spec--> TierSpec, for decisions
+------build_io--> BlockIo, for bytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import field, frozen

from commutator.config.kinds import config_converter, unknown_kind
from commutator.config.load import blocked_plugins
from commutator.config.model import PluginsConfig
from commutator.config.tree import plain
from commutator.config.yaml_file import read_file
from commutator.contract.eviction import EvictionConfig, EvictionPolicy
from commutator.contract.settings import Secret
from commutator.contract.tier import Memory, StorageTier, TierConfig
from commutator.errors import ConfigError, TierError
from commutator.plugins import PluginHost, installed_plugins
from commutator.schema import StructureError, structure
from commutator_engine_kit.kv.arena import Arena, BlockArena
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_engine_kit.kv.tiers.block_io import BlockIo, DirectIo, StagedIo, Staging
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, AesGcm, Codec, Gmac, Lz4, Zstd
from commutator_engine_kit.kv.tiers.guards import Breaker, GuardedIo, GuardedTier, IoGuards
from commutator_engine_kit.kv.tiers.mover import LocalMover, TierMover
from commutator_engine_kit.nixl.agent import TransferAgent

_CODEC_SLACK = 128
"""A codec may add 1/128 of a block beside its ``overhead_bytes``: see ``Codec``."""


@frozen(kw_only=True)
class TierSetup:
    """One tier, not open yet, with its configuration and the parts made from it."""

    name: str
    """Its kind; ``KIND-2`` for the second tier of a kind, and so on."""
    tier: StorageTier
    config: TierConfig
    eviction: Callable[[int], EvictionPolicy]
    """Makes a policy for a tier of the given number of blocks."""
    codecs: tuple[Codec, ...] = ()
    """In the order in which they encode a block."""
    breaker: Breaker = field(factory=Breaker)
    wrap_io: Callable[[BlockIo], BlockIo] = lambda io: io
    """Wraps the transfers inside all guards, to inject faults or to measure."""

    @property
    def framed(self) -> bool:
        """Whether stored bytes begin with a header."""
        return self.tier.framed or bool(self.codecs)

    @property
    def write(self) -> Literal["through", "on_evict", "never"]:
        """When blocks are stored there; see ``TierSpec``."""
        return self.config.write if self.tier.writable else "never"

    @property
    def capacity(self) -> int:
        """In blocks; UNBOUNDED while the tier is not open."""
        return self.guarded.capacity()

    @property
    def guarded(self) -> GuardedTier:
        """The tier behind the boundary for its exceptions."""
        return GuardedTier(self.tier, self.name)

    def spec(self) -> TierSpec:
        """The tier's properties for the block manager, read once the tier is open."""
        return TierSpec(
            name=self.name,
            medium=self.tier.medium,
            capacity_blocks=self.capacity,
            shared=self.tier.shared,
            eviction=self.eviction,
            admission=self.config.admission,
            write=self.write,
            prefetch=self.config.prefetch,
            tenant_share=self.config.tenant_share,
            tenant_shares=self.config.tenant_shares,
        )

    def is_direct(self, arena: Arena) -> bool:
        """Whether blocks of ``arena`` move to the tier without staging memory."""
        if self.framed:
            return False
        alignment = self.tier.alignment_bytes
        if isinstance(arena, BlockArena) and arena.memory is Memory.DRAM:
            return arena.address % alignment == 0 and arena.block_bytes % alignment == 0
        # A checksum needs the block's bytes in one piece in this process's host memory.
        in_memory = self.tier.memory is Memory.DRAM and not self.tier.asks_peers
        return in_memory and alignment == 1

    def slot_bytes(self, block_bytes: int) -> int:
        """Largest size of a stored block, with its header and the codecs' growth."""
        if not self.framed:
            return block_bytes
        overhead = sum(codec.overhead_bytes for codec in self.codecs)
        return HEADER_BYTES + block_bytes + block_bytes // _CODEC_SLACK + overhead


def build_io(
    setup: TierSetup,
    agents: Sequence[TransferAgent],
    local: TransferAgent,
    arena: Arena,
    staging: Staging,
    guards: IoGuards,
) -> tuple[BlockIo, TierMover]:
    """The tier's I/O for blocks of ``arena``, with all its guards.

    ``agents`` share the transfers; ``local`` copies between the arena and staging memory.
    """
    io: BlockIo
    if setup.is_direct(arena):
        mover = TierMover(agents, setup.tier, arena)
        io = DirectIo(mover)
    else:
        mover = TierMover(agents, setup.tier, staging.arena)
        io = StagedIo(
            mover, LocalMover(local, arena), staging, framed=setup.framed, codecs=setup.codecs
        )
    return GuardedIo(setup.wrap_io(io), setup.name, guards), mover


TierEntries = str | Path | Sequence[Mapping[str, Any]] | Sequence[TierSetup]
"""The path of a YAML or JSON file with `tiers:`, such as a whole configuration; the entries
themselves; or the result of ``make_tiers``."""


@frozen(kw_only=True)
class _Tiers:
    tiers: tuple[TierConfig, ...]
    plugins: PluginsConfig


def read_tiers(entries: TierEntries, worker_id: str) -> tuple[TierSetup, ...]:
    """The configured tiers, fastest first. None is open yet.

    Plugins that the file's `plugins.block` names are not loaded. Raises ConfigError with every
    mistake, PluginError when a plugin breaks the contract, TierError when a codec's package or key
    is missing.
    """
    plugins: Any = {}
    if isinstance(entries, str | Path):
        data = plain(read_file(entries))
        where, found, plugins = str(entries), data.get("tiers"), data.get("plugins", {})
    else:
        if made := tuple(entry for entry in entries if isinstance(entry, TierSetup)):
            return made
        where, found = "tiers", list(entries)
    if not isinstance(found, list) or not found:
        raise ConfigError(["tiers: expected a list of at least one tier"], where)
    host = installed_plugins(blocked_plugins(plugins))
    try:
        read = structure(config_converter(host), {"tiers": found, "plugins": plugins}, _Tiers)
    except StructureError as error:
        raise ConfigError([f"{path}: {text}" for path, text in error.problems], where) from error
    return make_tiers(read.tiers, host, worker_id)


def make_tiers(
    configs: Sequence[TierConfig], host: PluginHost, worker_id: str
) -> tuple[TierSetup, ...]:
    """One setup for each entry of ``tiers``, in the same order. None is open yet.

    ``{worker}`` in a text option is replaced by ``worker_id``. Raises ConfigError for an unknown
    eviction policy, TierError when a codec's package or key is missing, and any exception of a
    tier's factory.
    """
    seen = Counter[str]()
    setups = []
    for entry in configs:
        seen[entry.kind] += 1
        number = seen[entry.kind]
        config = _for_worker(entry, worker_id)
        setups.append(
            TierSetup(
                name=config.kind if number == 1 else f"{config.kind}-{number}",
                tier=host.tiers.kinds[config.kind].thing(config),
                config=config,
                eviction=eviction_factory(config.eviction, host),
                codecs=_codecs(config),
                breaker=Breaker(max_failures=config.max_failures),
            )
        )
    return tuple(setups)


def eviction_factory(
    config: EvictionConfig, host: PluginHost | None = None
) -> Callable[[int], EvictionPolicy]:
    """A factory of the configured policy for a tier of the given number of blocks.

    ``host`` None: all installed plugins. Raises ConfigError when none of them has the kind.
    """
    host = host or installed_plugins()
    kind = host.evictions.kinds.get(config.kind)
    if kind is None:
        raise ConfigError([f"eviction: {unknown_kind(config.kind, host.evictions, host)}"], "tiers")
    return partial(kind.thing, config)


_WORKER = "{worker}"


def _for_worker(config: TierConfig, worker_id: str) -> TierConfig:
    changes: dict[str, Any] = {}
    for option in attrs.fields(type(config)):
        value = getattr(config, option.name)
        if isinstance(value, str) and _WORKER in value:
            changes[option.name] = value.replace(_WORKER, worker_id)
    return attrs.evolve(config, **changes)


def _codecs(config: TierConfig) -> tuple[Codec, ...]:
    codecs: list[Codec] = []
    if config.compression != "none":
        codecs.append(Zstd() if config.compression == "zstd" else Lz4())
    read = [_secret(config, "read_keys", key) for key in config.read_keys]
    if config.encryption_key is not None:
        current = _secret(config, "encryption_key", config.encryption_key)
        codecs.append(AesGcm(current, *read))
    if config.integrity_key is not None:
        codecs.append(Gmac(_secret(config, "integrity_key", config.integrity_key), *read))
    return tuple(codecs)


def _secret(config: TierConfig, option: str, secret: Secret) -> bytes:
    try:
        return bytes.fromhex(secret.reveal())
    except ValueError:
        raise TierError(
            f"{config.kind}: {option}: expected 32, 48 or 64 hex digits, such as those of "
            "`openssl rand -hex 32`"
        ) from None

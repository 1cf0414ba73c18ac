"""The messages of KV transfer: between two workers, and from routing to each of them.

Each worker that lends blocks has an exporter with a port of its own (``exporter.py``). Readers
connect to it and send questions in frames (see ``commutator.frames``):

    reader -> exporter                     exporter -> reader
    ["ask", number, question, arguments]   ["answer", number, value]
                                           ["failed", number, reason]

    question  arguments        answer
    hello     {}               ExportedMemory: an arena's NIXL agent, and the place of its blocks
    watch     WatchRequest     ExportUpdate, once something is new, or after ``wait_s``
    look_up   LookupRequest    LentBlocks: the blocks of a prompt that a tier in host memory has
    release   ReleaseRequest   nil; the reader no longer needs these blocks

Blocks are held under a lease with an id. For a hand-over from prefill to decode, routing chooses
the id and sends it to both workers: ``PrefillTransferParams`` and ``DecodeTransferParams`` in
``GenerateRequest.handover``. The decode worker watches the lease, to which the prefill worker adds
blocks. A look-up is a hand-over that is complete at once: the reader chooses the id, and no block
is added later. In both cases a release may arrive before its lease begins; the lease then holds
nothing.

Of a model with several kinds of KV, what the decode worker needs at the prompt's last boundary is
handed over: ``handover_places`` says which blocks, and in which order they are published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from attrs import asdict, evolve, frozen

from commutator.contract.block import BlockKey, CacheIdentity, block_keys
from commutator.contract.disagg import HandoverRequest, HandoverStyle, mismatch
from commutator.contract.request import GenerateRequest
from commutator.contract.tier import RemoteAgent, Span
from commutator.contract.worker import KvTransferInfo
from commutator.errors import EngineHandoverError, RequestError
from commutator_engine_kit.kv.groups import KvGroup, alignment, group_identities

SERVICE = "KV exporter"
"""The service that both ends of a connection prove themselves for."""


# What another process may say, checked when a message is read: nothing of it makes this process
# hold more memory, wait longer, or read or count outside of what there can be.
_Id = Annotated[str, msgspec.Meta(max_length=128)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Place = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
_KeyBytes = Annotated[bytes, msgspec.Meta(max_length=64)]
_MOST_BLOCKS = msgspec.Meta(max_length=1 << 20)


@frozen
class PrefillTransferParams:
    """Tells the prefill worker to hold the prompt's blocks until they have been read."""

    pull: str
    """Id of the hand-over; the decode worker gets the same id."""
    lease_s: float
    """The blocks are freed when the reader asks nothing for this time."""


@frozen
class DecodeTransferParams:
    """Tells the decode worker to read those of the prompt's blocks that it does not have."""

    pull: str
    """Id of the hand-over."""
    address: str
    """Address of the prefill worker's exporter, "host:port"."""
    block_size: int
    """Tokens in a block of the prefill worker."""
    timeout_s: float
    """Seconds until the request fails."""


class ExportState(StrEnum):
    """The state of a lease, as its reader sees it."""

    UNKNOWN = "unknown"
    """The lease has not begun yet."""
    RUNNING = "running"
    COMPLETE = "complete"
    """No more blocks will be added."""
    FAILED = "failed"
    """The lease has ended: no block can be read."""


@frozen
class ReadyBlock:
    """A block that can be read until it is released or its lease lapses."""

    index: _Place
    """Number of the block in the exporter's arena, or of its slot in the exporter's tier."""
    key: _KeyBytes
    """For an arena, the key from ``handover_keys``; for a tier, the tier's key."""
    checksum: _Place
    """xxh3_64 of its bytes; 0 for a tier that stores the checksum in a header."""
    span: Span | None = None
    """The place of its bytes; None for an arena, where ``ExportedMemory`` gives it."""


@frozen
class WatchRequest:
    """Asks for news of a lease, and renews it."""

    id: _Id
    have: _Count
    """How many of the blocks that were published first the reader already knows."""
    state: ExportState
    """The state in the last answer to the reader."""
    wait_s: _Seconds
    """Longest time until the answer, which then has no news."""


@frozen
class ExportUpdate:
    """News of a lease: the blocks after the ones that the reader knows."""

    state: ExportState
    blocks: Annotated[tuple[ReadyBlock, ...], _MOST_BLOCKS] = ()
    reason: _Text = ""
    """Why the lease failed; empty otherwise."""


@frozen
class LookupRequest:
    """Asks for the first blocks of one chain. Those that are found are leased."""

    id: _Id
    """Id of the lease, unique among all look-ups."""
    identity: _Name
    slot_bytes: _Place
    """With ``identity``: blocks of another model, layout or encoding are never lent."""
    keys: Annotated[tuple[_KeyBytes, ...], _MOST_BLOCKS]


@frozen
class LentBlocks:
    """The first blocks of the chain that the exporter has, in order."""

    agent: RemoteAgent
    """The NIXL agent of the memory with their spans."""
    lease_s: _Seconds
    """Seconds until the lease lapses."""
    blocks: Annotated[tuple[ReadyBlock, ...], _MOST_BLOCKS] = ()


@frozen
class ReleaseRequest:
    """Ends the reader's use of blocks. A lease that has not begun yet will hold nothing."""

    id: _Id
    blocks: Annotated[tuple[int, ...], _MOST_BLOCKS] | None = None
    """``ReadyBlock.index`` of each block; None ends the whole lease."""


@frozen
class ExportedMemory:
    """An engine's arena that other workers may read; a restarted engine has another one."""

    info: KvTransferInfo
    agent: _Name
    """The name of its NIXL agent, unique among all processes."""
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 22)]
    """The agent's metadata, with which another NIXL agent can read from it."""
    memory: str
    """A value of ``Memory``."""
    address: _Place
    """Block ``i`` begins ``i * block_bytes`` after this address."""
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    blocks: _Count
    """Number of blocks."""
    device: _Count = 0
    runs: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    """Runs of equal size in a block; each has a part of every token, in order."""


def parse_transfer_params(
    request: GenerateRequest, block_size: int
) -> PrefillTransferParams | DecodeTransferParams | None:
    """A request's role in a hand-over, at a worker with blocks of ``block_size`` tokens.

    None: this worker serves the whole request. Raises RequestError for parameters that are not
    valid or do not fit the block size.
    """
    if request.handover is None:
        return None
    try:
        if "address" not in request.handover:
            return msgspec.convert(request.handover, PrefillTransferParams)
        params = msgspec.convert(request.handover, DecodeTransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"handover: {error}", "handover") from error
    if not convertible(params.block_size, block_size):
        raise RequestError(
            f"handover: blocks of {params.block_size} tokens cannot be read as blocks of "
            f"{block_size}: neither size divides the other",
            "handover",
        )
    return params


PROTOCOL = "pull-1"
"""``KvTransferInfo.protocol`` of engines that use this protocol."""

GROUPS_PROTOCOL = "pull-groups-1"
"""The same, of engines whose blocks are those of groups; both sides need blocks of one size."""

LEASE_S = 30.0
"""Long compared with a question's round trip; short, because a lost decode worker's blocks stay
held for this time."""


class PullHandover(HandoverStyle):
    """Both workers begin at once; the decode worker reads each block once it is computed."""

    sequential: ClassVar[bool] = False

    def __init__(self, lease_s: float = LEASE_S) -> None:
        """``lease_s``: the prefill worker frees blocks after this time without a question."""
        self._lease_s = lease_s

    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        request = handover.request
        # The prefill worker's token is discarded, so options that shape the answer have no use.
        sampling = evolve(
            request.sampling,
            max_tokens=request.generated_prefix + 1,
            min_tokens=0,
            stop=(),
            stop_token_ids=(),
            top_logprobs=None,
        )
        rank = None if request.data_parallel_rank is None else handover.prefill_rank
        params = PrefillTransferParams(handover.handover_id, self._lease_s)
        return evolve(request, sampling=sampling, data_parallel_rank=rank, handover=asdict(params))

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        info = handover.prefill.info.handover
        if info is None or info.address is None:
            raise EngineHandoverError(f"worker {handover.prefill.worker_id} cannot hand KV over")
        params = DecodeTransferParams(
            handover.handover_id, info.address, info.block_size, handover.timeout_s
        )
        return evolve(handover.request, handover=asdict(params))

    def mismatch(self, prefill: KvTransferInfo, decode: KvTransferInfo) -> str | None:
        """Block sizes may differ if one divides the other; all other properties must be equal.

        With groups, block sizes must be equal, too.
        """
        names = ("protocol", "identity", "token_bytes", "tensor_parallel_size")
        if (reason := mismatch(prefill, decode, *names)) is not None:
            return reason
        if prefill.protocol == GROUPS_PROTOCOL:
            return mismatch(prefill, decode, "block_size")
        if not convertible(prefill.block_size, decode.block_size):
            return (
                f"block_size is {prefill.block_size} at the prefill worker and "
                f"{decode.block_size} at the decode worker: neither divides the other"
            )
        return None


def handover_places(groups: Sequence[KvGroup], prompt_tokens: int) -> list[tuple[int, int]]:
    """The blocks that are handed over: group and number of each, in the order of publication.

    They are what all groups need at the last boundary before the prompt's last token, which the
    decode worker computes. Those of groups that need the whole prefix come first, as a prefill
    computes them: what windows and states need is known to stay only at the end.
    """
    step = alignment(groups)
    boundary = (prompt_tokens - 1) // step * step
    places = [
        (not group.keeps_prefix, (number + 1) * group.block_size, which, number)
        for which, group in enumerate(groups)
        for number in group.needed(boundary)
    ]
    return [(which, number) for _, _, which, number in sorted(places)]


def handover_keys(
    prefill: KvTransferInfo, request: GenerateRequest, groups: Sequence[KvGroup] = ()
) -> list[BlockKey]:
    """The key of each block that is handed over, in the order of publication.

    Without ``groups``, those are all full blocks of the prompt, in the prefill worker's block size.
    Equal keys mean equal KV: a key covers the workers' common identity, adapter, salt, tokens, and
    its group.
    """
    identity = CacheIdentity(
        model=prefill.identity,
        weights="",
        tokenizer="",
        dtype="",
        layout=prefill.protocol,
        block_size=prefill.block_size,
        adapter=request.adapter_digest,
        cache_salt=request.cache_salt,
    )
    if not groups:
        return block_keys(identity, request.token_ids, media=request.media)
    keys = [
        block_keys(each, request.token_ids, media=request.media)
        for each in group_identities(identity, groups)
    ]
    return [
        keys[which][number] for which, number in handover_places(groups, len(request.token_ids))
    ]


def convertible(one_tokens: int, other_tokens: int) -> bool:
    """Whether blocks of one size can be read as blocks of the other: one must divide the other."""
    smaller, larger = sorted((one_tokens, other_tokens))
    return smaller >= 1 and larger % smaller == 0


class Piece(NamedTuple):
    """A piece of a block that is contiguous in the source and in the target."""

    source_offset: int
    """Offset in the source block."""
    target_block: int
    """Number of the target block, counted from the one in which the source block begins."""
    target_offset: int
    size_bytes: int


@frozen
class BlockShapes:
    """Two block sizes, of which one divides the other, with the same number of bytes for a token.

    A block consists of ``runs`` runs of equal size; each run has a part of every token, in order.
    """

    source_tokens: int
    target_tokens: int
    token_bytes: int
    runs: int = 1

    @property
    def unit_tokens(self) -> int:
        """The larger of the two block sizes: the smallest unit of whole blocks on both sides."""
        return max(self.source_tokens, self.target_tokens)

    def aligned(self, tokens: int) -> int:
        """``tokens``, rounded down to whole units."""
        return tokens // self.unit_tokens * self.unit_tokens

    @property
    def period(self) -> int:
        """The pieces of source blocks repeat after this number of blocks."""
        return max(1, self.target_tokens // self.source_tokens)

    def target_block(self, source_block: int) -> int:
        """The prompt's target block in which a source block begins."""
        return source_block * self.source_tokens // self.target_tokens

    def pieces(self, source_block: int) -> list[Piece]:
        """The pieces of one of the prompt's source blocks, in their order in it."""
        source, target = self.source_tokens, self.target_tokens
        if source == target:
            return [Piece(0, 0, 0, source * self.token_bytes)]
        step = min(source, target)
        run_token_bytes = self.token_bytes // self.runs
        skipped = source_block * source % target
        return [
            Piece(
                source_offset=(run * source + token) * run_token_bytes,
                target_block=(skipped + token) // target,
                target_offset=(run * target + (skipped + token) % target) * run_token_bytes,
                size_bytes=step * run_token_bytes,
            )
            for run in range(self.runs)
            for token in range(0, source, step)
        ]

"""One request on its way through the engine: its tokens, and how far their KV is computed."""

from __future__ import annotations

from attrs import define, field

from commutator.kv import BlockFacts, CacheIdentity, block_facts
from commutator.types import GenerateRequest, SamplingParams
from commutator_reference.block_identity import ANONYMOUS, BlockIdentity, Namespace

__all__ = ["Sequence"]


@define(eq=False)
class Sequence:
    """Prompt and output tokens with the blocks that hold their KV.

    The KV of the newest token is computed in the step that samples the next one, so a sequence
    that decodes has exactly one token more than ``computed``.
    """

    key: int
    request: GenerateRequest
    arrival: int
    tokens: list[int]
    """The prompt, then the output."""
    prompt_length: int
    """Without what another worker generated before."""
    seed: int
    namespace: Namespace
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    blocks: list[int] = field(factory=list)
    identities: list[BlockIdentity] = field(factory=list)
    """Of the leading full blocks, as far as they are known."""
    registered: int = 0
    """Leading blocks that are in the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    tiers_asked: bool = False
    """Whether what lies in storage tiers was loaded, or need not be."""
    started: bool = False
    """Whether a delta has been emitted."""

    @classmethod
    def start(
        cls,
        key: int,
        request: GenerateRequest,
        arrival: int,
        seed: int,
        base: CacheIdentity = ANONYMOUS,
    ) -> Sequence:
        """A sequence that has not been scheduled yet."""
        return cls(
            key,
            request,
            arrival,
            tokens=list(request.token_ids),
            prompt_length=len(request.token_ids) - request.generated_prefix,
            seed=seed,
            namespace=Namespace(request.lora_name, request.cache_salt, base),
        )

    @property
    def sampling(self) -> SamplingParams:
        """How this request wants its tokens chosen."""
        return self.request.sampling

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower priority value first, then first come, first served."""
        return self.request.priority, self.arrival

    def facts(self, index: int, block_size: int) -> BlockFacts:
        """What tiers are told of full block ``index``: its place, and what the client asked for."""
        request = self.request
        return block_facts(
            index, block_size, self.prompt_length, request.cache_salt, request.retention
        )

    def identity(self, index: int, block_size: int) -> BlockIdentity:
        """The identity of full block ``index``; computed once, survives preemption."""
        while len(self.identities) <= index:
            start = len(self.identities) * block_size
            token_ids = self.tokens[start : start + block_size]
            if self.identities:
                self.identities.append(self.identities[-1].child(token_ids))
            else:
                self.identities.append(BlockIdentity.first(self.namespace, token_ids))
        return self.identities[index]

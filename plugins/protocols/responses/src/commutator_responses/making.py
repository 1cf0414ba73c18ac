"""One response, from a request that was read to an answer that is written and kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from attrs import evolve, frozen

from commutator.contract.response_store import StoredResponse
from commutator.frontend import Call, Plan, TimeLimit, answer
from commutator_responses.conversations import Turn
from commutator_responses.reading import Asked
from commutator_responses.writer import ResponseWriter

Keep = Callable[[ResponseWriter], Awaitable[None]]


@frozen(kw_only=True)
class Making:
    """What is to be made."""

    key: str
    """Of its ids."""
    turn: Turn
    asked: Asked
    keeps: bool
    """Whether it is stored."""
    input: bytes
    """JSON of the items that are new; empty unless it is stored."""

    @property
    def id(self) -> str:
        return f"resp_{self.key}"

    def stored(self, owner: str, response: bytes) -> StoredResponse:
        """As it is kept."""
        return StoredResponse(
            id=self.id,
            owner=owner,
            previous=self.turn.previous,
            session=self.asked.generate.session_id,
            input=self.input,
            response=response,
        )

    def streamed(self) -> Making:
        """The same, its events wanted as they come."""
        asked = evolve(self.asked, generate=evolve(self.asked.generate, stream=True))
        return evolve(self, asked=asked)


async def make(
    call: Call,
    making: Making,
    limit: TimeLimit,
    keep: Keep,
    *,
    in_lines: bool = False,
    on_writer: Callable[[ResponseWriter], None] = lambda _: None,
) -> None:
    """Answer ``call``. ``keep`` is awaited before the client has the end.

    ``on_writer`` learns when its turn has come. Raises what ``answer`` and ``keep`` do.
    """
    asked = making.asked
    made: list[ResponseWriter] = []

    def writer(plan: Plan) -> ResponseWriter:
        wanted = asked.generate.top_logprobs is not None
        one = ResponseWriter(
            making.key, plan, asked.toolbox, asked.echo, logprobs=wanted, in_lines=in_lines
        )
        made.append(one)
        on_writer(one)
        return one

    async def written() -> None:
        await keep(made[-1])  # another model may have been asked before

    await answer(call, asked.generate, writer, limit, written=written)

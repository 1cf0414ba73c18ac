"""Response stores: where a protocol keeps answers that clients continue and read by their ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from attrs import frozen

from commutator.contract.answer import Failure
from commutator.contract.settings import PositiveSeconds, Size, setting

__all__ = ["ResponseStore", "ResponseStoreConfig", "StoredResponse"]


@frozen(kw_only=True)
class ResponseStoreConfig:
    """Options of every response store; each plugin adds its own."""

    in_one_process: ClassVar[bool] = False
    """Whether each front-door process keeps its own: another one does not find them."""

    kind: str = setting("The response store plugin: where responses are kept.", "memory")
    max_bytes: Size = setting(
        "The most that all responses together take. When it is full, the principal that holds the "
        "most loses those that it used least recently.",
        256 << 20,
    )
    ttl_s: PositiveSeconds = setting(
        "Seconds after which a response is forgotten that was neither read nor continued.",
        86_400.0,
    )


@frozen(kw_only=True)
class StoredResponse:
    """One response and what was new in its request."""

    id: str
    """Unique for its owner."""
    owner: str
    """The name of the principal that asked for it; others do not see it."""
    previous: str | None
    """The id of the response that it continues."""
    session: str | None
    """The session of its request, which those that continue it belong to as well."""
    input: bytes
    """JSON: the items of its request, without those of earlier ones."""
    response: bytes
    """JSON: the response."""
    maker: str | None = None
    """Who is still making it, a name that nobody else has; None: it is complete."""
    until_unix_s: float = 0.0
    """Its maker is heard of before that, or is gone."""

    @property
    def size_bytes(self) -> int:
        """What it counts in a store."""
        return len(self.input) + len(self.response)


class ResponseStore(ABC):
    """Where responses are kept. Used from one event loop.

    Methods end within seconds. They raise ``unavailable`` when they cannot do it now.
    """

    max_bytes: int
    """The most that all responses together take; one that is larger is not kept."""

    @abstractmethod
    async def put(self, stored: StoredResponse) -> None:
        """Keep a response; others may be given up for it."""

    @abstractmethod
    async def replace(self, stored: StoredResponse, maker: str) -> bool:
        """Keep ``stored`` instead of the one of its owner and id, if ``maker`` still makes that.

        False: nothing has changed. Of several that replace it at the same time one succeeds at
        most, unless they are the maker's own.
        """

    @abstractmethod
    async def history(
        self, owner: str, response_id: str, limit: int | None = None
    ) -> list[StoredResponse]:
        """The response and those that it continues, the earliest first.

        Ends, at its beginning, where one is no longer kept, or after ``limit``; empty where the
        response itself is not the owner's, or not kept. All of them count as used.
        """

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one to forget."""

    @staticmethod
    def unavailable() -> Failure:
        """What methods raise while responses cannot be reached."""
        text = "what is kept of responses cannot be read or written now; try again, or send "
        text += "store: false without previous_response_id"
        return Failure(503, text, "store_unavailable", headers={"Retry-After": "1"})

    async def close(self) -> None:
        """Give up connections and files. Called once, last."""

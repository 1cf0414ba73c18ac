"""Traffic: which model serves a request that names one, an alias of several, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from commutator.contract.request import AdapterIdentity
from commutator.contract.settings import setting
from commutator.errors import CommutatorError

__all__ = ["DEFAULT_ALIAS", "FallBack", "Traffic", "TrafficConfig"]

DEFAULT_ALIAS = "default"
"""What a request asks for that names no model."""


@frozen(kw_only=True)
class TrafficConfig:
    """What names of models stand for; each plugin adds its options."""

    kind: str = setting("The traffic plugin.", "table")

    def problems(self, config: Any) -> Iterable[tuple[str, str]]:
        """(path within the section, what is wrong) where the rest of ``config`` does not fit it."""
        del config
        return ()


@frozen
class FallBack:
    """Another model that serves a request."""

    model: str
    """One that the sender may use."""
    reason: str
    """One word for clients and metrics, of few different ones."""


class Traffic(ABC):
    """What names of models stand for in one front door. Every method is quick, and changes nothing.

    A change of the configuration makes another one, which requests from then on ask. Only models
    that the sender of a request may use are ever ``usable``.
    """

    aliases: Mapping[str, Sequence[str]] = {}
    """By each name that is no model, or stands for others as well, the models that may be chosen
    for it. Those that only take another's place are not among them."""

    @abstractmethod
    def chosen(self, alias: str, key: str, usable: Sequence[str]) -> str | None:
        """The model that serves a request for one of ``aliases``; None: none of those is usable.

        ``key`` is the session of the request, or its id where it has none: the same key gets the
        same answer.
        """

    def adapter(self, alias: str, model: str) -> AdapterIdentity | None:
        """With which adapter ``model`` serves a request for ``alias``; None: with none."""
        del alias, model
        return None

    @abstractmethod
    def after(
        self, alias: str, tried: Sequence[str], error: CommutatorError, usable: Sequence[str]
    ) -> FallBack | None:
        """What serves a request for ``alias`` that ended with ``error`` before its answer began.

        ``tried`` are the models that have served it, in order; none of them is returned. None: the
        client gets the error.
        """

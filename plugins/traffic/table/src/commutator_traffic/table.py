"""The table of aliases and adapters by which a front door finds the model of a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from commutator.contract.request import AdapterIdentity
from commutator.contract.traffic import FallBack, Traffic
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineOverloadedError,
    OverloadedError,
    RequestError,
    RoutingError,
)
from commutator_traffic.adapters import identity
from commutator_traffic.config import Reason, TableConfig
from commutator_traffic.shares import choose

log = logging.getLogger(__name__)

_TOO_LONG = "context_length_exceeded"
_FULL_ITSELF = "too_much_work"
"""An overload of the front door, where another model helps nobody."""


class Table(Traffic):
    """Aliases and adapters as the configuration has them."""

    def __init__(self, config: TableConfig) -> None:
        self._aliases = config.aliases
        self.aliases: dict[str, Sequence[str]] = {
            name: tuple(model for model, weight in alias.models.items() if weight > 0)
            for name, alias in config.aliases.items()
        }
        self._adapters: dict[str, AdapterIdentity] = {}
        for name, adapter in config.adapters.items():
            if adapter is None:
                continue
            try:
                self._adapters[name] = identity(name, adapter.source)
            except OSError as error:  # the others are served all the same
                log.warning("traffic.adapters.%s is not served: %s", name, error)
            else:
                self.aliases[name] = (adapter.model,)

    def chosen(self, alias: str, key: str, usable: Sequence[str]) -> str | None:
        if alias in self._adapters:
            return next((model for model in self.aliases[alias] if model in usable), None)
        weights = self._aliases[alias].models
        return choose({name: one for name, one in weights.items() if name in usable}, key)

    def adapter(self, alias: str, model: str) -> AdapterIdentity | None:
        found = self._adapters.get(alias)
        return found if found is not None and model in self.aliases[alias] else None

    def after(
        self, alias: str, tried: Sequence[str], error: CommutatorError, usable: Sequence[str]
    ) -> FallBack | None:
        if (reason := reason_of(error)) is None or alias in self._adapters:
            return None
        for one in self._aliases[alias].fall_back:
            if reason in one.when and one.model in usable and one.model not in tried:
                return FallBack(one.model, reason)
        return None


def reason_of(error: CommutatorError) -> Reason | None:
    """Why a model could not serve a request; None: no other model is to serve it.

    None for what is wrong with the request itself, for limits of its principal and its deadline.
    """
    match error:
        case OverloadedError():
            return None if error.reason == _FULL_ITSELF else "overload"
        case EngineOverloadedError():
            return "overload"
        case RoutingError():
            return "no_worker"
        case RequestError():
            return "context_length" if error.code == _TOO_LONG else None
        case EngineError():
            return "error"
    return None

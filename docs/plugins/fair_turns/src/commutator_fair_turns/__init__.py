"""Serves teams in turns: a request each, however many keys a team has or how long its prompts."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.fairness import FairnessConfig, FairnessPolicy
from commutator.contract.registration import FairnessRegister

_MOST_TEAMS = 1000


class FairTurns(FairnessPolicy):
    """The team that was served longest ago is next. A principal "team.key" belongs to "team"."""

    def __init__(self) -> None:
        self._turns = 0
        self._last_turn: dict[str | None, int] = {}
        """In the order of the turns."""

    def flow(self, principal: str | None) -> str | None:
        return None if principal is None else principal.partition(".")[0]

    def admitted(self, flow: str | None) -> None:
        self._turns += 1
        self._last_turn.pop(flow, None)
        self._last_turn[flow] = self._turns
        if len(self._last_turn) > _MOST_TEAMS:  # the one served longest ago is next anyway
            del self._last_turn[next(iter(self._last_turn))]

    def rank(self, flow: str | None) -> float:
        return self._last_turn.get(flow, 0)


@hookimpl
def fairness_register(register: FairnessRegister) -> None:
    register("fair_turns", FairnessConfig, lambda _config: FairTurns())

"""Which prefill worker's KV can become which decode worker's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from commutator.config.model import EngineConfig
from commutator.engine.handover import HandoverStyle
from commutator.plugins import PluginHost
from commutator.types import Role, WorkerRecord

__all__ = ["HandoverPairs", "RefusedPair"]


@frozen
class RefusedPair:
    """Two workers of which one cannot prefill for the other."""

    prefill_worker: str
    decode_worker: str
    problem: str

    def __str__(self) -> str:
        return f"{self.prefill_worker} cannot prefill for {self.decode_worker}: {self.problem}"


class HandoverPairs:
    """Asks the engines' hand-over styles."""

    def __init__(self, engines: Mapping[str, EngineConfig], host: PluginHost) -> None:
        self._engines = engines
        self._host = host
        self._styles: dict[str, HandoverStyle | None] = {}

    def style(self, worker: WorkerRecord) -> HandoverStyle | None:
        """How the worker's engine hands over; None when it does not."""
        if worker.engine not in self._styles:
            config = self._engines[worker.engine]
            connector = self._host.engines.kinds[config.kind].thing
            self._styles[worker.engine] = connector.handover_style(config)
        return self._styles[worker.engine]

    def problem(self, prefill: WorkerRecord, decode: WorkerRecord) -> str | None:
        """Why the first cannot prefill for the second; None if it can."""
        try:
            return self._problem(prefill, decode)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            return f"its hand-over style raised {type(error).__name__}: {error}"

    def _problem(self, prefill: WorkerRecord, decode: WorkerRecord) -> str | None:
        there, here = self.style(prefill), self.style(decode)
        for worker, style in ((prefill, there), (decode, here)):
            if style is None or worker.info.handover is None:
                return f"{worker.worker_id} takes no part in hand-overs"
        assert there is not None
        assert here is not None
        assert prefill.info.handover is not None
        assert decode.info.handover is not None
        if type(there) is not type(here):
            return f"{prefill.kind} and {decode.kind} hand over in different ways"
        return here.mismatch(prefill.info.handover, decode.info.handover)

    def refused(self, workers: Iterable[WorkerRecord]) -> list[RefusedPair]:
        """Each pair of a prefill and another worker of its model that does not fit."""
        known = list(workers)
        return [
            RefusedPair(one.worker_id, other.worker_id, problem)
            for one in known
            if one.role is Role.PREFILL
            for other in known
            if other.role is not Role.PREFILL and other.model == one.model
            if (problem := self.problem(one, other)) is not None
        ]

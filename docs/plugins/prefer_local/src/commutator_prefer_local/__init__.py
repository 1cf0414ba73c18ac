"""A scorer for the `pipeline` policy: prefer workers whose name begins with a prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from commutator import Candidate, RouteRequest, Scorer, StageRegister, hookimpl, setting


@frozen(kw_only=True)
class PreferLocal(Scorer):
    """1 for workers of the preferred group, 0 for the others."""

    prefix: str = setting("Worker ids that begin like this are preferred.")

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        return {c.worker_id: float(c.worker_id.startswith(self.prefix)) for c in candidates}


@hookimpl
def route_stage_register(register: StageRegister) -> None:
    register("prefer_local", PreferLocal)

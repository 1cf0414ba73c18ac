"""A launcher of agents for tests: all of them on this machine, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from attrs import define

from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState, PlacedAgent
from commutator_ray.hosted import HostedAgent

__all__ = ["HostedAgents"]


@define
class _Hosted:
    plan: AgentPlan
    agent: HostedAgent
    task: asyncio.Task[None]


class HostedAgents(AgentLauncher):
    """Its cluster is a mapping that several of them may share."""

    def __init__(self, cluster: dict[str, _Hosted]) -> None:
        self._cluster = cluster

    async def open(self) -> None:
        pass

    async def agents(self) -> Sequence[PlacedAgent]:
        return [
            PlacedAgent(
                name=name,
                generation=one.plan.generation,
                state=one.agent.state,
                host="127.0.0.1",
                cause=one.agent.cause,
            )
            for name, one in self._cluster.items()
        ]

    async def place(self, plan: AgentPlan) -> None:
        if plan.name in self._cluster:
            return
        agent = HostedAgent(
            plan, address="127.0.0.1", control="127.0.0.1:1", on_line=lambda *_: None
        )
        assert agent.state is AgentState.RUNNING
        self._cluster[plan.name] = _Hosted(plan, agent, asyncio.create_task(agent.run()))

    async def remove(self, name: str, grace_s: float) -> None:
        if (one := self._cluster.get(name)) is not None:
            one.agent.stop(grace_s)
            await asyncio.wait({one.task})  # which goes on if this is cancelled
            self._cluster.pop(name, None)

    async def close(self) -> None:
        pass

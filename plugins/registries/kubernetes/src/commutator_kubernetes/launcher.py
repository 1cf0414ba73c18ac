"""The launcher: an object with the plan and a pod for each agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import ceil

from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState, PlacedAgent
from commutator.errors import LauncherError
from commutator_kubernetes.access import find_access
from commutator_kubernetes.client import ApiClient, ApiError, Json, Resource, resource
from commutator_kubernetes.config import KubernetesLauncherConfig
from commutator_kubernetes.pods import (
    AGENT,
    ENDING,
    is_own,
    is_spent,
    name_of,
    plan_object,
    plan_of,
    pod_of,
    state_of,
)
from commutator_kubernetes.view import CLUSTER_LABEL

_POLL_S = 0.3
_MARGIN_S = 15.0
"""How long a node may take beyond the grace before its word is waited for no longer."""


class KubernetesLauncher(AgentLauncher):
    """Places each agent in a pod of its own, which it makes again when the pod is lost."""

    def __init__(
        self, config: KubernetesLauncherConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError."""
        access = find_access(config.kubeconfig)
        namespace = config.namespace or access.namespace
        selector = f"{CLUSTER_LABEL}={config.cluster},app.kubernetes.io/managed-by=commutator"
        self._config = config
        self._access = access
        self._clock = clock
        self._plans = resource("", "v1", "configmaps", namespace, selector)
        self._pods = resource("", "v1", "pods", namespace, selector)
        self._api: ApiClient | None = None
        self._deleting_s: dict[str, float] = {}
        """Since when pods were seen to be deleted, by unique id."""

    async def open(self) -> None:
        self._api = ApiClient(self._access, self._config.call_timeout_s, self._clock)
        async with self._asked():
            await self._api.list(self._plans)

    async def agents(self) -> Sequence[PlacedAgent]:
        async with self._asked() as api:
            plans = (await api.list(self._plans)).items
            pods = {pod["metadata"]["name"]: pod for pod in (await api.list(self._pods)).items}
            found = []
            for stored in plans:
                if AGENT not in (stored["metadata"].get("annotations") or {}):
                    continue
                pod = pods.get(stored["metadata"]["name"])
                agent = state_of(stored, pod)
                found.append(agent)
                if agent.state is not AgentState.ENDING:
                    await self._restore(api, stored, pod)
            kept = {pod["metadata"]["uid"] for pod in pods.values()}
            self._deleting_s = {uid: s for uid, s in self._deleting_s.items() if uid in kept}
        return sorted(found, key=lambda agent: agent.name)

    async def place(self, plan: AgentPlan) -> None:
        name = name_of(self._config, plan.name)
        async with self._asked() as api:
            stored = await self._created(api, self._plans, plan_object(plan, self._config))
            if stored is None:
                stored = await api.get(self._plans, name)
                if stored is None or state_of(stored, None).generation != plan.generation:
                    raise LauncherError(f"{plan.name}: another generation of it is there still")
                if state_of(stored, None).state is AgentState.ENDING:
                    raise LauncherError(f"{plan.name}: it is being removed")
            # A pod that is there is its own, or still ends; then `agents` makes it.
            await self._created(api, self._pods, pod_of(plan, self._config, stored))

    async def remove(self, name: str, grace_s: float) -> None:
        objects = name_of(self._config, name)
        async with self._asked() as api:
            stored = await api.get(self._plans, objects)
            if stored is None:
                return
            await api.merge(self._plans, objects, {"metadata": {"annotations": {ENDING: "true"}}})
            ends_s = self._clock() + grace_s + _MARGIN_S
            asked: set[str] = set()
            while (pod := await api.get(self._pods, objects)) is not None:
                uid = pod["metadata"]["uid"]
                if self._clock() >= ends_s:  # its node does not answer
                    await api.delete(self._pods, objects, uid=uid, grace_s=0)
                elif uid not in asked:
                    asked.add(uid)
                    await api.delete(self._pods, objects, uid=uid, grace_s=max(1, ceil(grace_s)))
                await asyncio.sleep(_POLL_S)
            await api.delete(self._plans, objects, uid=stored["metadata"]["uid"])

    async def close(self) -> None:
        api, self._api = self._api, None
        if api is not None:
            await api.close()

    async def _restore(self, api: ApiClient, stored: Json, pod: Json | None) -> None:
        """Make the pod of an agent again that was deleted, evicted, or lost with its node."""
        name = stored["metadata"]["name"]
        if pod is None:
            await self._created(api, self._pods, pod_of(plan_of(stored), self._config, stored))
            return
        uid = pod["metadata"]["uid"]
        if pod["metadata"].get("deletionTimestamp"):
            since_s = self._deleting_s.setdefault(uid, self._clock())
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            if self._clock() - since_s > grace_s + _MARGIN_S:
                await api.delete(self._pods, name, uid=uid, grace_s=0)
        elif is_spent(pod) or not is_own(stored, pod):
            await api.delete(self._pods, name, uid=uid)

    async def _created(self, api: ApiClient, place: Resource, body: Json) -> Json | None:
        """The new object; None: there is one of its name."""
        try:
            return await api.create(place, body)
        except ApiError as error:
            if error.is_conflict:
                return None
            raise

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[ApiClient]:
        if self._api is None:
            raise LauncherError("the launcher is closed")
        try:
            yield self._api
        except ApiError as error:
            raise LauncherError(str(error)) from error

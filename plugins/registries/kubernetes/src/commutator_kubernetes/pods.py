"""From the plan of an agent to the objects that run it, and back to what it does. Pure.

An agent is a ConfigMap with its plan and a pod of the same name, which belongs to it. The ConfigMap
is what makes the agent exist: a pod that somebody deletes, or that a node takes with it, is made
again from it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from math import ceil
from typing import Any

from attrs import asdict

from commutator.contract.launcher import AgentPlan, AgentState, PlacedAgent
from commutator_kubernetes.client import Json
from commutator_kubernetes.config import CONTAINER, KubernetesLauncherConfig, PodOptions
from commutator_kubernetes.view import CLUSTER_LABEL, GROUP, object_name

AGENT, ENGINE, GENERATION = f"{GROUP}/agent", f"{GROUP}/engine", f"{GROUP}/generation"
ENDING = f"{GROUP}/ending"
"""An annotation of the plan of an agent that is being removed."""
PLAN = "plan.json"
FOLDER, MESSAGE = "/etc/commutator-agent", "/dev/termination-log"
"""Where the plan is mounted, and where a container says why it ended."""
_USER = 10001
_MARGIN_S = 5
"""What the process that hosts an agent may take beyond the agent's grace."""
_NAMED_BY = {"volumeMounts": "mountPath"}
"""By what the things of a list are told apart, if not by name."""


def name_of(config: KubernetesLauncherConfig, agent: str) -> str:
    """The name of an agent's objects."""
    return object_name(f"{config.cluster}-{agent}")


def plan_object(plan: AgentPlan, config: KubernetesLauncherConfig) -> Json:
    """The ConfigMap that holds the plan."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "immutable": True,
        "metadata": _metadata(plan, config),
        "data": {PLAN: json.dumps(asdict(plan))},
    }


def plan_of(stored: Json) -> AgentPlan:
    """The plan that a ConfigMap holds. Raises ValueError for one that holds none."""
    try:
        return AgentPlan(**json.loads(stored["data"][PLAN]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{stored['metadata']['name']} holds no plan") from error


def pod_of(plan: AgentPlan, config: KubernetesLauncherConfig, owner: Json) -> Json:
    """The pod that runs an agent; ``owner`` is the ConfigMap, as it is stored.

    It passes the Pod Security Standard `restricted`, as far as the options' template leaves that.
    """
    options = config.resources.get(plan.engine, PodOptions())
    mounts = [
        {"name": "plan", "mountPath": FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the pod
    ]
    volumes: list[Json] = [
        {"name": "plan", "configMap": {"name": name_of(config, plan.name)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if options.shm is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - of the pod
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}})
    container = {
        "name": CONTAINER,
        "image": config.image,
        "command": ["python", "-m", "commutator_kubernetes.hosting", FOLDER, MESSAGE],
        "env": [
            _from_pod("POD_IP", "status.podIP"),
            _from_pod("POD_NAME", "metadata.name"),
            _from_pod("POD_UID", "metadata.uid"),
        ],
        "resources": _resources(options),
        "volumeMounts": mounts,
        "terminationMessagePath": MESSAGE,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    lost = [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": ceil(config.lost_after_s),
        }
        for what in ("not-ready", "unreachable")
    ]
    spec: Json = {
        "automountServiceAccountToken": config.service_account is not None,
        "containers": [container],
        "volumes": volumes,
        # It ends without an error only when no further start can succeed.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": ceil(plan.grace_s) + _MARGIN_S,
        "tolerations": lost,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if config.service_account is not None:
        spec["serviceAccountName"] = config.service_account
    metadata = _metadata(plan, config)
    metadata["ownerReferences"] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
    ]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    made: Json = merged(pod, options.template)
    return made


def merged(ours: Any, theirs: Any, of: str = "") -> Any:
    """``theirs`` over ``ours``: mappings by key, lists of named things by name; else theirs."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        both = {name: merged(ours[name], value, name) if name in ours else copy.deepcopy(value)
                for name, value in theirs.items()}  # fmt: skip
        return {**copy.deepcopy(dict(ours)), **both}
    key = _NAMED_BY.get(of, "name")
    if _is_named(ours, key) and _is_named(theirs, key):
        found = {one[key]: one for one in ours}
        for one in theirs:
            found[one[key]] = merged(found.get(one[key], {}), one)
        return list(copy.deepcopy(found).values())
    return copy.deepcopy(theirs)


def state_of(stored: Json, pod: Json | None) -> PlacedAgent:
    """What an agent does, by its plan's object and its pod."""
    metadata = stored["metadata"]
    name = metadata["annotations"][AGENT]
    generation = metadata["labels"][GENERATION]

    def placed(state: AgentState, cause: str | None = None) -> PlacedAgent:
        host = "" if pod is None else str((pod.get("status") or {}).get("podIP") or "")
        return PlacedAgent(name=name, generation=generation, state=state, host=host, cause=cause)

    if ENDING in metadata["annotations"]:
        return placed(AgentState.ENDING)
    if pod is None:
        return placed(AgentState.WAITING, "its pod is gone, and is made again")
    if not is_own(stored, pod) or pod["metadata"].get("deletionTimestamp"):
        return placed(AgentState.WAITING, "a pod of its name is being deleted")
    status = pod.get("status") or {}
    match status.get("phase"):
        case "Running":
            return placed(AgentState.RUNNING, _last_end(status))
        case "Succeeded":
            return placed(AgentState.FAILED, _message(status, "state") or "it cannot start")
        case "Failed":
            said = status.get("message") or status.get("reason") or "its pod has failed"
            return placed(AgentState.WAITING, str(said))
    return placed(AgentState.WAITING, _waits_for(status))


def is_own(stored: Json, pod: Json) -> bool:
    """Whether a pod is that of an agent, not of one that had its name before."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == stored["metadata"]["uid"] for owner in owners)


def is_spent(pod: Json) -> bool:
    """Whether a pod will never run again, though its agent may: its node evicted it, or is gone."""
    return (pod.get("status") or {}).get("phase") == "Failed"


def _metadata(plan: AgentPlan, config: KubernetesLauncherConfig) -> Json:
    labels = {
        CLUSTER_LABEL: config.cluster,
        ENGINE: object_name(plan.engine),
        GENERATION: plan.generation,
        "app.kubernetes.io/managed-by": "commutator",
    }
    return {
        "name": name_of(config, plan.name),
        "labels": labels,
        "annotations": {AGENT: plan.name},
    }


def _resources(options: PodOptions) -> Json:
    requests: Json = {"cpu": f"{options.cpus:g}"} if options.cpus else {}
    limits: Json = {}
    if options.memory is not None:
        requests["memory"] = limits["memory"] = options.memory
    if options.gpus:
        limits[options.gpu_resource] = str(options.gpus)
    found = {"requests": requests, "limits": limits}
    return {name: values for name, values in found.items() if values}


def _from_pod(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _is_named(value: Any, key: str) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(one, Mapping) and key in one for one in value
    )


def _container(status: Json) -> Json:
    every = status.get("containerStatuses") or []
    return next((one for one in every if one.get("name") == CONTAINER), {})


def _message(status: Json, state: str) -> str | None:
    ended = (_container(status).get(state) or {}).get("terminated") or {}
    return str(ended.get("message") or "").strip() or None


def _last_end(status: Json) -> str | None:
    """Why the container ended last; None: it never did."""
    for state in ("state", "lastState"):
        ended = (_container(status).get(state) or {}).get("terminated")
        if ended:
            reason = f"{ended.get('reason') or 'ended'} with status {ended.get('exitCode')}"
            return _message(status, state) or reason
    return None


def _waits_for(status: Json) -> str:
    """In the words of the scheduler or the kubelet."""
    waiting = (_container(status).get("state") or {}).get("waiting") or {}
    if waiting.get("message") or waiting.get("reason"):
        return ": ".join(filter(None, [waiting.get("reason"), waiting.get("message")]))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return "the cluster has not started its pod yet"

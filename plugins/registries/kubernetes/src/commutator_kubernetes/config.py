"""The options of the registry and of the launcher `kubernetes`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from attrs import Attribute, frozen

from commutator import Bounds, NonNegativeInt, PositiveSeconds, setting
from commutator.contract.launcher import AgentLauncherConfig
from commutator.contract.registry import RegistryConfig

_NAMESPACE = "By default that of the pod, or of the kubeconfig's context."
_KUBECONFIG = (
    "A kubeconfig file; by default a pod's own service account, or else the file that kubectl uses."
)
CONTAINER = "agent"
"""The container of a pod that runs an agent."""


def name_of_cluster(_: object, _field: Attribute[Any], value: str) -> None:
    """Part of labels and of names of objects."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", value):
        raise ValueError(
            "expected up to 30 lower-case letters, digits and '-', a letter or digit first and "
            f"last, got {value!r}"
        )


@frozen(kw_only=True)
class KubernetesRegistryConfig(RegistryConfig):
    """Workers in the API server of a Kubernetes cluster, without an etcd of one's own."""

    cluster: str = setting(
        "Deployments of a namespace with the same name, and the same `runtime.secret`, share their "
        "workers; `cluster.name` by default.",
        "default",
        validator=name_of_cluster,
    )
    namespace: str | None = setting(_NAMESPACE, None)
    kubeconfig: str | None = setting(_KUBECONFIG, None)
    lease_s: PositiveSeconds = setting(
        "How long the workers of a process stay known after it has ended without a word. It writes "
        "three times in this time, however many workers it has.",
        15.0,
    )
    call_timeout_s: PositiveSeconds = setting("How long the API server may take to answer.", 5.0)
    resync_s: PositiveSeconds = setting(
        "How often everything is listed anew, beside being watched.", 300.0
    )


_SET_BY_US: Mapping[str, tuple[str, ...]] = {
    "metadata": ("name", "namespace", "ownerReferences", "finalizers"),
    "spec": ("restartPolicy", "terminationGracePeriodSeconds"),
    "container": ("command", "args", "terminationMessagePath"),
}
_OUR_LABELS = "commutator.dev/"


def _template(_: object, _field: Attribute[Any], value: Mapping[str, Any]) -> None:
    """Refuse what would break what the launcher relies on."""
    if value.keys() - {"metadata", "spec"}:
        raise ValueError(f"expected only metadata and spec, got {min(map(str, value))!r}")
    parts = {name: value.get(name) or {} for name in ("metadata", "spec")}
    if not all(isinstance(part, Mapping) for part in parts.values()):
        raise ValueError("expected mappings as metadata and spec")
    labels = [parts["metadata"].get(name) or {} for name in ("labels", "annotations")]
    foreign = {f"{part}.{name}" for part in parts for name in parts[part].keys() & _SET_BY_US[part]}
    foreign |= {str(name) for some in labels for name in some if str(name).startswith(_OUR_LABELS)}
    for container in parts["spec"].get("containers") or ():
        if not isinstance(container, Mapping) or not container.get("name"):
            raise ValueError("spec.containers: expected a name in each")
        if container["name"] == CONTAINER:
            foreign |= {f"containers.{n}" for n in container.keys() & _SET_BY_US["container"]}
    if foreign:
        raise ValueError(f"{min(foreign)} is set by the launcher")


_NEVER_S = 1e9


def _not_set(_: object, _field: Attribute[Any], value: float) -> None:
    if value != _NEVER_S:
        raise ValueError("a pod is never cut off; remove it")


@frozen(kw_only=True)
class PodOptions:
    """What the pods of one engine's workers get."""

    cpus: Annotated[float, Bounds(minimum=0)] = setting("CPUs that are requested.", 1.0)
    memory: str | None = setting("Memory, requested and as the limit, such as 64Gi.", None)
    gpus: NonNegativeInt = setting(
        "GPUs: as many as the engine's tensor-parallel size.",
        0,
    )
    gpu_resource: str = setting(
        "What the device plugin of the nodes calls a GPU, such as amd.com/gpu.", "nvidia.com/gpu"
    )
    shm: str | None = setting(
        "Size of /dev/shm, such as 16Gi, which counts as memory; 64 MiB by default, too little for "
        "NCCL.",
        None,
    )
    template: Mapping[str, Any] = setting(
        "A pod's `metadata` and `spec`, merged over what is made: lists of things with names by "
        "name; the container is `agent`.",
        {},
        validator=_template,
    )


@frozen(kw_only=True)
class KubernetesLauncherConfig(AgentLauncherConfig):
    """Workers in pods of a Kubernetes cluster, each in one of its own, found by its name."""

    cut_off_s: PositiveSeconds = setting(
        "Not for pods, which are never cut off: another one gets a worker's name from the registry "
        "only.",
        _NEVER_S,
        validator=_not_set,
    )
    cluster: str = setting(
        "Pods of other clusters are left alone; `cluster.name` by default.",
        "default",
        validator=name_of_cluster,
    )
    namespace: str | None = setting(_NAMESPACE, None)
    kubeconfig: str | None = setting(_KUBECONFIG, None)
    image: str = setting("The image of the pods: this version, with the plugins that workers need.")
    service_account: str | None = setting(
        "The service account of the pods; without one they get no token, and cannot use the "
        "registry `kubernetes`.",
        None,
    )
    resources: Mapping[str, PodOptions] = setting(
        "What pods get, by the name of the `engines` entry; one CPU by default.", {}
    )
    lost_after_s: PositiveSeconds = setting(
        "How long a node may be unreachable before its workers are placed on another one; they may "
        "still serve where they were.",
        300.0,
    )
    call_timeout_s: PositiveSeconds = setting("How long the API server may take to answer.", 5.0)

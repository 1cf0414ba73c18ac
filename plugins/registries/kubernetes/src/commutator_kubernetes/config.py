"""The options of the registry `kubernetes`."""

from __future__ import annotations

import re
from typing import Any

from attrs import Attribute, frozen

from commutator import PositiveSeconds, setting
from commutator.contract.registry import RegistryConfig


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
    namespace: str | None = setting(
        "By default that of the pod, or of the kubeconfig's context.", None
    )
    kubeconfig: str | None = setting(
        "A kubeconfig file; by default a pod's own service account, or else the file that kubectl "
        "uses.",
        None,
    )
    lease_s: PositiveSeconds = setting(
        "How long the workers of a process stay known after it has ended without a word. It writes "
        "three times in this time, however many workers it has.",
        15.0,
    )
    call_timeout_s: PositiveSeconds = setting("How long the API server may take to answer.", 5.0)
    resync_s: PositiveSeconds = setting(
        "How often everything is listed anew, beside being watched.", 300.0
    )

"""The Kubernetes objects of a plan, as plain data; equal plans give equal objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator_kubernetes_tools.plan import (
    CONFIG_FILE,
    CONFIG_FOLDER,
    HOME,
    MODELS,
    PROBES_PORT,
    Mount,
    Options,
    Plan,
    Pods,
    Port,
)

Object = dict[str, Any]

DIGEST = "commutator.dev/configuration"
"""Annotation of pods: the digest of what they read, so that a change starts them anew."""
_USER = 10001
_PERIOD_S = 10
_FAILURES = 6
_START_PERIOD_S = 2
_START_FAILURES = 150
"""Five minutes, in which the programs start; engines may take as long as their entry allows."""


def objects_of(plan: Plan) -> list[Object]:
    """Every object, in an order in which they can be created."""
    return [*_objects(plan)]


def _objects(plan: Plan) -> Iterator[Object]:
    options = plan.options
    yield _object("v1", "ServiceAccount", options, "", automountServiceAccountToken=False)
    if plan.asks_api:
        yield _role_binding(options)
    yield _object("v1", "ConfigMap", options, "", data={CONFIG_FILE: plan.text})
    yield from _services(plan)
    if options.network_policy:
        yield from _network_policies(plan)
    for pods in plan.pods:
        yield _budget(pods, options)
    for pods in plan.workers:
        yield _stateful_set(pods, plan)
    yield _deployment(plan.front, plan)
    if options.monitoring is not None:
        yield from _pod_monitor(plan.front, options)


def _object(version: str, kind: str, options: Options, suffix: str, /, **more: Any) -> Object:
    metadata: dict[str, Any] = {"name": _named(options, suffix)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    metadata["labels"] = {
        "app.kubernetes.io/name": "commutator",
        "app.kubernetes.io/instance": options.name,
    }
    if suffix:
        metadata["labels"]["app.kubernetes.io/component"] = suffix
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def _named(options: Options, suffix: str) -> str:
    return f"{options.name}-{suffix}" if suffix else options.name


def _selector(options: Options, component: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/instance": options.name}
    if component is not None:
        labels["app.kubernetes.io/component"] = component
    return labels


def _role_binding(options: Options) -> Object:
    """Gives the pods the Role that the registry's own manifests have."""
    account = {"kind": "ServiceAccount", "name": options.name}
    if options.namespace is not None:
        account["namespace"] = options.namespace
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": options.name}
    version = "rbac.authorization.k8s.io/v1"
    return _object(version, "RoleBinding", options, "", roleRef=role, subjects=[account])


# --- services, policies, budgets ----------------------------------------------------------------


def _services(plan: Plan) -> Iterator[Object]:
    options, front = plan.options, plan.front
    for suffix, ports in (
        ("", [port for port in front.ports if not port.is_admin]),
        ("admin", [port for port in front.ports if port.is_admin]),
    ):
        if ports:
            service = _object("v1", "Service", options, suffix)
            service["spec"] = {
                "selector": _selector(options, front.component),
                "ports": [
                    {"name": port.name, "port": port.number, "targetPort": port.name}
                    for port in ports
                ],
            }
            yield service
    for pods in plan.workers:
        service = _object("v1", "Service", options, pods.component)
        service["spec"] = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(options, pods.component),
            "ports": [{"name": "probes", "port": PROBES_PORT, "targetPort": "probes"}],
        }
        yield service


def _network_policies(plan: Plan) -> Iterator[Object]:
    options, front = plan.options, plan.front
    ours = {"from": [{"podSelector": {"matchLabels": _selector(options)}}]}
    rules: list[Any] = []
    if plan.workers:
        rules.append(ours)
    if clients := [_policy_port(port) for port in front.ports if not port.is_admin]:
        rules.append({"ports": clients})
    if admins := [_policy_port(port) for port in front.ports if port.is_admin]:
        sources: list[Any] = [{"podSelector": {}}]
        if options.monitoring is not None:
            names = {"kubernetes.io/metadata.name": options.monitoring}
            sources.append({"namespaceSelector": {"matchLabels": names}})
        rules.append({"from": sources, "ports": admins})
    yield _policy(front, options, rules)
    for pods in plan.workers:
        yield _policy(pods, options, [ours])


def _policy_port(port: Port) -> dict[str, Any]:
    return {"port": port.name, "protocol": "TCP"}


def _policy(pods: Pods, options: Options, ingress: Sequence[Any]) -> Object:
    policy = _object("networking.k8s.io/v1", "NetworkPolicy", options, pods.component)
    policy["spec"] = {
        "podSelector": {"matchLabels": _selector(options, pods.component)},
        "policyTypes": ["Ingress"],
        "ingress": list(ingress),
    }
    return policy


def _budget(pods: Pods, options: Options) -> Object:
    budget = _object("policy/v1", "PodDisruptionBudget", options, pods.component)
    budget["spec"] = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": _selector(options, pods.component)},
    }
    return budget


def _pod_monitor(front: Pods, options: Options) -> Iterator[Object]:
    https = [port for port in front.ports if port.is_http]
    ports = [port for port in https if port.is_admin] or https[:1]
    if not ports:
        return
    monitor = _object("monitoring.coreos.com/v1", "PodMonitor", options, front.component)
    endpoint: dict[str, Any] = {"port": ports[0].name, "path": "/metrics"}
    if ports[0].https:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    monitor["spec"] = {
        "selector": {"matchLabels": _selector(options, front.component)},
        "podMetricsEndpoints": [endpoint],
    }
    yield monitor


# --- pods ---------------------------------------------------------------------------------------


def _deployment(pods: Pods, plan: Plan) -> Object:
    options = plan.options
    deployment = _object("apps/v1", "Deployment", options, pods.component)
    strategy: dict[str, Any] = {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    if pods.gpus:  # the new pod may only find them once the old one is gone
        strategy = {"type": "Recreate"}
    deployment["spec"] = {
        "replicas": pods.replicas,
        "strategy": strategy,
        "selector": {"matchLabels": _selector(options, pods.component)},
        "template": _template(pods, plan),
    }
    return deployment


def _stateful_set(pods: Pods, plan: Plan) -> Object:
    options = plan.options
    workload = _object("apps/v1", "StatefulSet", options, pods.component)
    workload["spec"] = {
        "serviceName": _named(options, pods.component),
        "replicas": pods.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": _selector(options, pods.component)},
        "template": _template(pods, plan),
    }
    claims = [one for one in enumerate(pods.mounts) if one[1].kind == "claim"]
    if claims:
        workload["spec"]["volumeClaimTemplates"] = [_claim(*one) for one in claims]
    return workload


def _claim(number: int, mount: Mount) -> Object:
    size, _, storage_class = mount.source.partition(":")
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"metadata": {"name": f"mount-{number}"}, "spec": spec}


def _template(pods: Pods, plan: Plan) -> Object:
    options = plan.options
    labels = {"app.kubernetes.io/name": "commutator", **_selector(options, pods.component)}
    spec: dict[str, Any] = {
        "serviceAccountName": options.name,
        "automountServiceAccountToken": plan.asks_api,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pods.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if pods.replicas > 1:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(options, pods.component)},
            }
        ]
    if pods.fetches:
        spec["initContainers"] = [_fetching(pods, options)]
    spec["containers"] = [_container(pods, options)]
    if plan.asks_api:  # the record of a pod's worker goes with the pod
        spec["containers"][0]["env"] += [
            _of_pod("POD_NAME", "metadata.name"),
            _of_pod("POD_UID", "metadata.uid"),
        ]
    spec["volumes"] = [*_volumes(pods, options)]
    metadata = {"labels": labels, "annotations": {DIGEST: pods.digest}}
    return {"metadata": metadata, "spec": spec}


def _fetching(pods: Pods, options: Options) -> Object:
    """Downloads models before probes begin, however long it takes."""
    file = f"{CONFIG_FOLDER}/{CONFIG_FILE}"
    container = _base(pods, options, "models", ["kubernetes", "fetch", file])
    if pods.resources:
        container["resources"] = _resources(pods, gpus=False, options=options)
    return container


def _container(pods: Pods, options: Options) -> Object:
    container = _base(pods, options, "commutator", list(pods.arguments))
    container["ports"] = [
        {"name": port.name, "containerPort": port.number} for port in pods.ports
    ] or [{"name": "probes", "containerPort": PROBES_PORT}]
    container |= _probes(pods)
    if pods.pre_stop_s:
        command = ["sleep", str(pods.pre_stop_s)]
        container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    if resources := _resources(pods, gpus=True, options=options):
        container["resources"] = resources
    return container


def _base(pods: Pods, options: Options, name: str, arguments: list[str]) -> Object:
    return {
        "name": name,
        "image": pods.image,
        "command": ["commutator"],
        "args": arguments,
        "env": [*_environment(pods, options)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*_volume_mounts(pods, options)],
    }


def _environment(pods: Pods, options: Options) -> Iterator[Object]:
    yield {"name": "HOME", "value": HOME}
    if pods.fetches:
        folder = f"{MODELS}/hub" if options.models is not None else f"{HOME}/hub"
        yield {"name": "HF_HOME", "value": folder}
    if pods.joins:
        for variable, path in (("NAME", "metadata.name"), ("LISTEN", "status.podIP")):
            yield _of_pod(f"COMMUTATOR__CLUSTER__HOST__{variable}", path)
    for variable in pods.variables:
        reference = {"name": options.secret_name, "key": variable}
        yield {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _of_pod(variable: str, path: str) -> Object:
    return {
        "name": variable,
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}},
    }


def _probes(pods: Pods) -> dict[str, Any]:
    ports = [port for port in pods.ports if port.is_http]
    if pods.ports and not ports:  # gRPC alone
        asked: dict[str, Any] = {"tcpSocket": {"port": pods.ports[0].name}}
        return {"startupProbe": _starting(asked), "readinessProbe": asked | {"periodSeconds": 2}}
    get: dict[str, Any] = {"port": ports[0].name if ports else "probes"}
    if ports and ports[0].https:
        get["scheme"] = "HTTPS"
    live: dict[str, Any] = {"httpGet": {"path": "/live", **get}}
    ready = {"httpGet": {"path": "/ready", **get}}
    return {
        "startupProbe": _starting(live),
        "livenessProbe": {
            **live,
            "periodSeconds": _PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": _FAILURES,
        },
        "readinessProbe": {**ready, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 2},
    }


def _starting(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **asked,
        "periodSeconds": _START_PERIOD_S,
        "timeoutSeconds": 5,
        "failureThreshold": _START_FAILURES,
    }


def _resources(pods: Pods, *, gpus: bool, options: Options) -> dict[str, Any]:
    requests = dict(sorted(pods.resources.items()))
    limits = {"memory": requests["memory"]} if "memory" in requests else {}
    if gpus and pods.gpus:
        limits[options.gpu_resource] = str(pods.gpus)
        requests[options.gpu_resource] = str(pods.gpus)
    both = {"requests": requests, "limits": limits}
    return {name: values for name, values in both.items() if values}


def _all_mounts(pods: Pods) -> Iterator[tuple[str, Mount]]:
    for number, mount in enumerate(pods.mounts):
        yield f"mount-{number}", mount


def _volume_mounts(pods: Pods, options: Options) -> Iterator[Object]:
    yield {"name": "configuration", "mountPath": CONFIG_FOLDER, "readOnly": True}
    yield {"name": "scratch", "mountPath": "/tmp"}  # noqa: S108 - a volume of the pod alone
    yield {"name": "home", "mountPath": HOME}
    if pods.gpus:
        yield {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108 - as above
    for name, mount in _all_mounts(pods):
        is_read = mount.kind in ("secret", "configmap") or (
            mount == options.models and not pods.fetches
        )
        more = {"readOnly": True} if is_read else {}
        yield {"name": name, "mountPath": mount.path, **more}


def _volumes(pods: Pods, options: Options) -> Iterator[Object]:
    yield {"name": "configuration", "configMap": {"name": options.name}}
    yield {"name": "scratch", "emptyDir": {}}
    yield {"name": "home", "emptyDir": {}}
    if pods.gpus:
        yield {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    for name, mount in _all_mounts(pods):
        if mount.kind != "claim" or pods.engine is None:
            yield {"name": name, **_source(mount)}


def _source(mount: Mount) -> dict[str, Any]:
    if mount.kind == "secret":
        return {"secret": {"secretName": mount.source, "defaultMode": 0o440}}
    if mount.kind == "configmap":
        return {"configMap": {"name": mount.source}}
    if mount.kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": mount.source}}
    if mount.kind == "host":
        return {"hostPath": {"path": mount.source}}
    if mount.kind == "claim":
        claim = {"spec": _claim(0, mount)["spec"]}
        return {"ephemeral": {"volumeClaimTemplate": claim}}
    return {"emptyDir": {"sizeLimit": mount.source} if mount.source else {}}

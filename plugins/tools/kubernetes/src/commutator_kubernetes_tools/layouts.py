"""Objects as a folder: a base of Kustomize, or a chart of Helm."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from commutator_kubernetes_tools.output import one_as_yaml
from commutator_kubernetes_tools.plan import Plan, Pods

Object = dict[str, Any]
_PLACE = "PLACE-{}-OF-VALUE"
_CHOICES = ("nodeSelector", "tolerations")
"""Of a pod's fields, those that values add."""
_WORKLOADS = ("Deployment", "StatefulSet")


def kustomize_base(objects: Sequence[Object]) -> dict[str, str]:
    """Texts by file name; `kubectl kustomize` makes of them what was rendered."""
    files = {_file_of(one): one_as_yaml(one) for one in objects}
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {"kustomization.yaml": one_as_yaml(base), **files}


def helm_chart(plan: Plan, objects: Sequence[Object], version: str) -> dict[str, str]:
    """Texts by file name. With the values that it has, its templates are what was rendered."""
    values: dict[str, Any] = {"frontend": _values_of(plan.front)}
    if plan.workers:
        values["engines"] = {pods.component: _values_of(pods) for pods in plan.workers}
    templates = {
        f"templates/{_file_of(one)}": _template_of(one, plan.front.component) for one in objects
    }
    chart = {
        "apiVersion": "v2",
        "name": plan.options.name,
        "description": f"The deployment {plan.options.name} of Commutator, as rendered",
        "type": "application",
        "version": version,
        "kubeVersion": ">=1.25.0-0",
    }
    return {
        "Chart.yaml": one_as_yaml(chart),
        "values.yaml": one_as_yaml(values),
        "values.schema.json": json.dumps(_schema(values), indent=2) + "\n",
        "templates/tests/ready.yaml": _test_of(plan),
        **templates,
    }


def _file_of(one: Object) -> str:
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", one["kind"]).lower()
    return f"{kind}-{one['metadata']['name']}.yaml"


# --- Helm ---------------------------------------------------------------------------------------


def _values_of(pods: Pods) -> dict[str, Any]:
    return {
        "image": pods.image,
        "replicas": pods.replicas,
        "nodeSelector": {},
        "tolerations": [],
    }


_SCHEMAS: Mapping[str, Any] = {
    "image": {"type": "string", "minLength": 1},
    "replicas": {"type": "integer", "minimum": 0},
    "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
    "tolerations": {"type": "array", "items": {"type": "object"}},
}


def _schema(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``values``: what each may be, and that there is nothing else. Helm adds `global`."""

    def of(part: Mapping[str, Any]) -> dict[str, Any]:
        properties = {key: _SCHEMAS.get(key) or of(item) for key, item in part.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}

    whole = of(values)
    whole["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole}


def _template_of(one: Object, front: str) -> str:
    one = copy.deepcopy(one)
    expressions: list[str] = []

    def token(expression: str) -> str:
        expressions.append(expression)
        return _PLACE.format(len(expressions) - 1)

    one["metadata"]["namespace"] = token("{{ .Release.Namespace }}")
    for subject in one.get("subjects", []):
        subject["namespace"] = token("{{ .Release.Namespace }}")
    choices: dict[str, str] = {}
    if one["kind"] in _WORKLOADS:
        component = one["metadata"]["labels"]["app.kubernetes.io/component"]
        values = ".Values.frontend"
        if component != front:
            values = f'(index .Values.engines "{component}")'
        spec = one["spec"]["template"]["spec"]
        one["spec"]["replicas"] = token(f"{{{{ int {values}.replicas }}}}")
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            container["image"] = token(f"{{{{ toJson {values}.image }}}}")
        choices = {name: f"{values}.{name}" for name in _CHOICES}
        for name, expression in choices.items():
            spec[name] = token(expression)
    text = one_as_yaml(one).replace("{{", '{{ "{{" }}')
    for number in reversed(range(len(expressions))):
        text = _filled(text, _PLACE.format(number), expressions[number], set(choices.values()))
    return text


def _filled(text: str, token: str, expression: str, choices: set[str]) -> str:
    if expression not in choices:
        return text.replace(token, expression)
    line = re.compile(rf"^( *)(\w+): {token}\n", re.MULTILINE)
    return line.sub(
        lambda match: (
            f"{match[1]}{{{{- with {expression} }}}}\n"
            f"{match[1]}{match[2]}: {{{{ toJson . }}}}\n"
            f"{match[1]}{{{{- end }}}}\n"
        ),
        text,
    )


def _test_of(plan: Plan) -> str:
    """`helm test`: a pod that asks whether the deployment is ready, as a client reaches it."""
    port = next((one for one in plan.front.ports if one.is_http and not one.is_admin), None)
    name = plan.options.name
    if port is None:
        code = f"import socket; socket.create_connection(('{name}', {plan.front.ports[0].number}))"
    else:
        scheme = "https" if port.https else "http"
        context = ", context=ssl._create_unverified_context()" if port.https else ""
        code = (
            "import ssl, urllib.request as r; "
            f"r.urlopen('{scheme}://{name}:{port.number}/ready', timeout=30{context})"
        )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-test-ready",
            "namespace": _PLACE.format(0),
            "annotations": {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "hook-succeeded"},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "ask",
                    "image": _PLACE.format(1),
                    "command": ["python3", "-c", code],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
    text = one_as_yaml(pod).replace(_PLACE.format(0), "{{ .Release.Namespace }}")
    return text.replace(_PLACE.format(1), "{{ toJson .Values.frontend.image }}")

"""The custom resources of the registry, and the rights that it needs."""

from __future__ import annotations

from typing import Any

from commutator_kubernetes.view import GROUP, VERSION

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_PLAIN = ("worker", "model", "engine", "role", "host", "address", "generation", "process")
"""Fields that are shown to people."""


def custom_resources() -> list[Json]:
    """Their definitions, for `apiextensions.k8s.io/v1`; Kubernetes 1.16 and later have that."""
    member = {
        "type": {"type": "string", "enum": ["worker", "wish", "process"]},
        **dict.fromkeys(_PLAIN, _TEXT),
        "draining": {"type": "boolean"},
        "sealed": _TEXT,
    }
    columns = {name.title(): name for name in ("type", "worker", "model", "engine", "role")}
    columns |= {"Draining": "draining", "Host": "host"}
    return [
        _definition("Member", ("cmm",), member, columns),
        _definition("Document", ("cmd",), {"document": _TEXT, "sealed": _TEXT}, {}),
    ]


def roles(name: str) -> list[Json]:
    """A Role with the rights that a process with this registry uses."""
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": name},
            "rules": [
                {
                    "apiGroups": [GROUP],
                    "resources": ["commutatormembers"],
                    "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
                },
                {
                    "apiGroups": [GROUP],
                    "resources": ["commutatordocuments"],
                    "verbs": ["get", "create", "update", "delete"],
                },
            ],
        }
    ]


def _definition(kind: str, short: tuple[str, ...], fields: Json, columns: dict[str, str]) -> Json:
    kind = f"Commutator{kind}"
    plural = f"{kind.lower()}s"
    printed = [
        {
            "name": title,
            "type": "boolean" if fields[field]["type"] == "boolean" else "string",
            "jsonPath": f".spec.{field}",
        }
        for title, field in columns.items()
    ]
    age = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": {"type": "object", "required": ["sealed"], "properties": fields},
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": list(short),
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "additionalPrinterColumns": [*printed, age],
                }
            ],
        },
    }

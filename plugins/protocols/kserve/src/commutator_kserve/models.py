"""What is said of the server and its models: metadata, configuration, readiness."""

from __future__ import annotations

from typing import Any

from commutator import Operation
from commutator.frontend import Call, FrontendServices, installed_versions
from commutator_kserve.asking import VERSION, check_version, operations_of

PLATFORM = "commutator"
_EXTENSIONS = (
    *("binary_tensor_data", "generate", "model_configuration", "model_repository"),
    "parameters",
)
_TYPES = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "INT32": "TYPE_INT32", "FP32": "TYPE_FP32"}

_Tensors = list[tuple[str, str, list[int], bool]]
"""(name, datatype, shape, whether it may be left out); -1 is any size."""
_GENERATES: tuple[_Tensors, _Tensors] = (
    [
        ("text_input", "BYTES", [1], False),
        ("streaming", "BOOL", [1], True),
        ("sampling_parameters", "BYTES", [1], True),
        ("exclude_input_in_output", "BOOL", [1], True),
    ],
    [("text_output", "BYTES", [-1], False), ("finish_reason", "BYTES", [-1], False)],
)
_EMBEDS: tuple[_Tensors, _Tensors] = (
    [("text_input", "BYTES", [-1], False)],
    [("embedding", "FP32", [-1, -1], False)],
)


def server_is_ready(services: FrontendServices) -> bool:
    """Whether every model has a worker, and the process is not about to end."""
    return services.is_ready()


def model_is_ready(call: Call, model: str, version: str) -> bool:
    """Raises RequestError for one that is not served."""
    return call.services.is_ready(_name(call, model, version))


def server_metadata() -> dict[str, Any]:
    """Of this server."""
    version = installed_versions().get("commutator", "")
    return {"name": PLATFORM, "version": version, "extensions": list(_EXTENSIONS)}


def model_metadata(call: Call, model: str, version: str) -> dict[str, Any]:
    """Raises RequestError for one that is not served."""
    name = _name(call, model, version)
    inputs, outputs = _tensors(call, name)
    return {
        "name": name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_metadata(one) for one in inputs],
        "outputs": [_metadata(one) for one in outputs],
    }


def model_config(call: Call, model: str, version: str) -> dict[str, Any]:
    """Raises RequestError for one that is not served."""
    name = _name(call, model, version)
    inputs, outputs = _tensors(call, name)
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [_config(one) | {"optional": one[3]} for one in inputs],
        "output": [_config(one) for one in outputs],
        "model_transaction_policy": {"decoupled": inputs is _GENERATES[0]},
    }


def index(call: Call, *, ready: bool = False) -> list[dict[str, str]]:
    """The models of the sender; ``ready``: only those that are."""
    services, states = call.services, call.services.dispatcher.models_ready()
    names = {
        name: any(states[one] for one in services.meant(name, call.principal))
        for name in services.names_for(call.principal)
    }
    return [
        {
            "name": name,
            "version": VERSION,
            "state": "READY" if is_ready else "UNAVAILABLE",
            "reason": "" if is_ready else "no worker is ready",
        }
        for name, is_ready in names.items()
        if is_ready or not ready
    ]


def _name(call: Call, model: str, version: str) -> str:
    name, _ = call.text_model(model)
    check_version(version)
    return name


def _tensors(call: Call, name: str) -> tuple[_Tensors, _Tensors]:
    can = operations_of(call, name)
    embeds = Operation.EMBED in can and Operation.GENERATE not in can
    return _EMBEDS if embeds else _GENERATES


def _metadata(tensor: tuple[str, str, list[int], bool]) -> dict[str, Any]:
    name, datatype, shape, _ = tensor
    return {"name": name, "datatype": datatype, "shape": shape}


def _config(tensor: tuple[str, str, list[int], bool]) -> dict[str, Any]:
    name, datatype, shape, _ = tensor
    return {"name": name, "data_type": _TYPES[datatype], "dims": shape}

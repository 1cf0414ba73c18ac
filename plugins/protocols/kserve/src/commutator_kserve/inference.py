"""One inference request, in neither form: read from a message of gRPC's, or from JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from attrs import field, frozen

from commutator.errors import RequestError
from commutator_kserve.tensors import Tensor, from_raw, from_typed, json_values
from commutator_openai.values import object_at, optional, shown, wrong

_MAX_ID = 256
_RAW_MIXED = "expected raw_input_contents for all inputs, or for none"


@frozen(kw_only=True)
class Inference:
    """What a client asks of a model."""

    model: str
    version: str = ""
    id: str = ""
    """The client's own; "": it has none."""
    parameters: Mapping[str, Any] = field(factory=dict)
    """By name; of gRPC's messages bools, numbers and strings, of JSON also lists and objects."""
    inputs: Mapping[str, Tensor] = field(factory=dict)
    outputs: Sequence[str] | None = None
    """The tensors that the answer is to have; None: those that it usually has."""
    binary: Mapping[str, bool] = field(factory=dict)
    """REST: which outputs are to be raw, by name; "" for all others."""


def from_message(sent: Any) -> Inference:
    """Of a ``ModelInferRequest``. Raises RequestError."""
    raw = sent.raw_input_contents
    if raw and len(raw) != len(sent.inputs):
        raise wrong("raw_input_contents", _RAW_MIXED)
    inputs = dict[str, Tensor]()
    for number, one in enumerate(sent.inputs):
        _check_new(inputs, one.name)
        _refuse_parameters(one.name, one.parameters)
        if not raw:
            values = partial(getattr, one.contents)
            tensor = from_typed(one.name, one.datatype, one.shape, values)
        elif one.HasField("contents"):
            raise wrong(one.name, _RAW_MIXED)
        else:
            tensor = from_raw(one.name, one.datatype, one.shape, raw[number])
        inputs[one.name] = tensor
    for one in sent.outputs:
        _refuse_parameters(one.name, one.parameters)
    return Inference(
        model=sent.model_name,
        version=sent.model_version,
        id=_id(sent.id),
        parameters={name: _value(name, one) for name, one in sent.parameters.items()},
        inputs=inputs,
        outputs=tuple(one.name for one in sent.outputs) or None,
    )


def from_json(
    body: Mapping[str, Any], model: str, version: str, binary: bytes | None = None
) -> Inference:
    """Of the body of POST .../infer; ``binary`` is what follows its JSON. Raises RequestError."""
    for name in body.keys() - {"id", "parameters", "inputs", "outputs"}:
        raise _unknown(name)
    inputs, at = dict[str, Tensor](), 0
    for number, one in enumerate(_objects(body, "inputs")):
        path = f"inputs[{number}]"
        name, datatype, shape = _named(one, path)
        _check_new(inputs, name)
        parameters = dict(optional(one, "parameters", dict, "an object", path) or {})
        size = parameters.pop("binary_data_size", None)
        _refuse_parameters(name, parameters)
        if size is None:
            given = json_values(name, datatype, one.get("data"))
            inputs[name] = from_typed(name, datatype, shape, given)
            continue
        if type(size) is not int or size < 0 or binary is None or at + size > len(binary):
            raise wrong(f"{path}.parameters.binary_data_size", "there is not as much binary data")
        inputs[name] = from_raw(name, datatype, shape, binary[at : at + size])
        at += size
    if binary is not None and at != len(binary):
        raise wrong("inputs", f"{len(binary) - at} bytes of binary data belong to no input")
    parameters = dict(optional(body, "parameters", dict, "an object") or {})
    wants = {"": parameters.pop("binary_data_output", False)}
    outputs = list[str]()
    for number, one in enumerate(_objects(body, "outputs")):
        output = one.get("name")
        if not isinstance(output, str):
            raise wrong(f"outputs[{number}].name", f"expected a string, got {shown(output)}")
        more = dict(optional(one, "parameters", dict, "an object", f"outputs[{number}]") or {})
        if "binary_data" in more:
            wants[output] = more.pop("binary_data")
        _refuse_parameters(output, more)
        outputs.append(output)
    if not all(isinstance(one, bool) for one in wants.values()):
        raise wrong("outputs", "binary_data: expected true or false")
    return Inference(
        model=model,
        version=version,
        id=_id(optional(body, "id", str, "a string") or ""),
        parameters=parameters,
        inputs=inputs,
        outputs=tuple(outputs) or None,
        binary=wants,
    )


def from_generate(body: Mapping[str, Any], model: str, version: str) -> Inference:
    """Of the body of POST .../generate: values of tensors and parameters side by side.

    Raises RequestError.
    """
    given = dict(body)
    request_id = optional(given, "id", str, "a string") or ""
    parameters = dict(optional(given, "parameters", dict, "an object") or {})
    for name in ("id", "parameters"):
        given.pop(name, None)
    inputs = {
        name: _tensor(name, datatype, given.pop(name))
        for name, datatype in _OF_GENERATE.items()
        if name in given
    }
    for name in given.keys() & parameters.keys():
        raise wrong(name, "parameters has it, too; remove one")
    return Inference(
        model=model,
        version=version,
        id=_id(request_id),
        parameters={**given, **parameters},
        inputs=inputs,
    )


_OF_GENERATE = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "input_ids": "INT64",
    "sampling_parameters": "BYTES",
    "stream": "BOOL",
    "streaming": "BOOL",
    "exclude_input_in_output": "BOOL",
}
"""What is a tensor there, and its datatype."""


def _tensor(name: str, datatype: str, value: Any) -> Tensor:
    if name in {"messages", "sampling_parameters"} and not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    values = json_values(name, datatype, value)("")
    return Tensor(name, datatype, (len(values),), values)


def _objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = optional(body, name, list, "a list") or []
    return [object_at(one, f"{name}[{number}]") for number, one in enumerate(found)]


def _named(one: Mapping[str, Any], path: str) -> tuple[str, str, list[int]]:
    name, datatype, shape = one.get("name"), one.get("datatype"), one.get("shape")
    if not isinstance(name, str):
        raise wrong(f"{path}.name", f"expected a string, got {shown(name)}")
    if not isinstance(datatype, str):
        raise wrong(f"{path}.datatype", f"expected a string, got {shown(datatype)}")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise wrong(f"{path}.shape", f"expected a list of integers, got {shown(shape)}")
    return name, datatype, shape


def _value(name: str, given: Any) -> Any:
    kind = given.WhichOneof("parameter_choice")
    if kind is None:
        raise wrong(name[:100], "the parameter has no value")
    return getattr(given, kind)


def _check_new(inputs: Mapping[str, Tensor], name: str) -> None:
    if name in inputs:
        raise wrong(name[:100], "the input was sent twice")


def _refuse_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    for one in parameters:
        where = f"{name[:100]}.parameters.{one[:100]}"
        raise RequestError(f"{where}: not served; leave it out", where, "unknown_parameter")


def _unknown(name: str) -> RequestError:
    return RequestError(f"{name[:100]}: unknown key", name[:100], "unknown_parameter")


def _id(given: str) -> str:
    if len(given) > _MAX_ID:
        raise wrong("id", f"expected at most {_MAX_ID} characters, got {len(given)}")
    return given

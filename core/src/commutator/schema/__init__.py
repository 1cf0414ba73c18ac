"""One description of a value serves four ends: types, validation, error texts and JSON Schema."""

from commutator.schema.fields import (
    Bounds,
    Count,
    Fraction,
    NonNegativeInt,
    Port,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    setting,
)
from commutator.schema.jsonschema import json_schema
from commutator.schema.size import ByteSize, Size
from commutator.schema.structure import Mismatch, StructureError, build_converter, structure

__all__ = [
    "Bounds",
    "ByteSize",
    "Count",
    "Fraction",
    "Mismatch",
    "NonNegativeInt",
    "Port",
    "PositiveInt",
    "PositiveSeconds",
    "Seconds",
    "Size",
    "StructureError",
    "build_converter",
    "json_schema",
    "setting",
    "structure",
]

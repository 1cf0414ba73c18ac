"""Types, validation, error messages and JSON Schema from one description of a value."""

from commutator.contract.settings import ByteSize, Count, Port
from commutator.schema.json_schema import json_schema
from commutator.schema.structure import Mismatch, StructureError, build_converter, structure

__all__ = [
    "ByteSize",
    "Count",
    "Mismatch",
    "Port",
    "StructureError",
    "build_converter",
    "json_schema",
    "structure",
]

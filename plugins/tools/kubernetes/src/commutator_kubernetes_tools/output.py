"""Objects as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def one_as_yaml(thing: Any) -> str:
    """One object."""
    return yaml.dump(thing, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def as_yaml(objects: Sequence[Any]) -> str:
    """A stream of documents."""
    return "---\n".join(one_as_yaml(one) for one in objects)


def as_json_list(objects: Sequence[Any]) -> str:
    """A `List`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}, indent=2) + "\n"

"""A public example with parts that are gone or other is converted or refused, with every field."""

from __future__ import annotations

import copy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.errors import ConfigError
from commutator_kubernetes_tools.import_cli import converted
from commutator_kubernetes_tools.source import Source

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import imports_page  # noqa: E402 - it lies in scripts/

EXAMPLES = [
    (imports_page.server_of(file), next(one for one in yaml.safe_load_all(file.read_text()) if one))
    for file in imports_page.EXAMPLES
]
OTHERS = st.sampled_from([None, 0, -1, 1.5, True, "", "x", "--tp", [], ["--model"], {}, {"a": 1}])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EXAMPLES), st.lists(st.tuples(st.integers(0, 400), OTHERS), max_size=6))
def test_no_form_of_a_file_surprises_it(
    example: tuple[str, Any], changes: list[tuple[int, Any]]
) -> None:
    server, content = example
    content = copy.deepcopy(content)
    for number, value in changes:
        places = [*_places(content)]
        if places:
            parent, key = places[number % len(places)]
            parent[key] = copy.deepcopy(value)
    source = Source(content, "changed.yaml")
    with suppress(ConfigError):
        text = converted(source, server)
        assert text.count("\n#   ") == len(source.left())


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        items = list(enumerate(value))
    for key, item in list(items):
        yield value, key
        yield from _places(item)

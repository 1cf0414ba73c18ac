"""The client's face: few imports, the same twice, by the names of `dynamo_client` as well."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import commutator_client
import dynamo_client
from commutator_client import AsyncClient, Client
from commutator_client.aio import AsyncPieces
from commutator_client.sync import Pieces


def test_its_import_loads_few_modules() -> None:
    def modules(code: str) -> int:
        said = f"import sys; {code}; print(len(sys.modules))"
        return int(subprocess.check_output([sys.executable, "-c", said]))

    loaded = modules("import commutator_client") - modules("pass")
    print(loaded)
    assert loaded < 200


def test_nothing_large_is_imported_before_the_first_request() -> None:
    code = (
        "import sys, commutator_client as c; c.Client(), c.AsyncClient(), c.DynamoClient()\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"openai", "httpx2", "httpx", "pydantic", "anyio", "commutator"}


def _face(cls: type) -> dict[str, Any]:
    return {
        name: inspect.signature(one) if callable(one) else type(one)
        for name, one in vars(cls).items()
        if not name.startswith("_")
    }


def _plain(face: dict[str, Any]) -> dict[str, Any]:
    """Without what a client of one kind returns."""
    return {
        name.removeprefix("a") if name == "aclose" else name: one.replace(
            return_annotation=None,
            parameters=[p.replace(annotation=None) for p in one.parameters.values()],
        )
        if isinstance(one, inspect.Signature)
        else one
        for name, one in face.items()
    }


def test_both_clients_have_the_same_methods() -> None:
    assert _plain(_face(AsyncClient)) == _plain(_face(Client))
    assert _plain(_face(AsyncPieces)) == _plain(_face(Pieces))


@pytest.mark.parametrize("name", dynamo_client.__all__)
def test_the_other_names_are_the_same_things(name: str) -> None:
    assert getattr(dynamo_client, name) is getattr(commutator_client, name)


def test_what_the_document_says_of_its_configuration() -> None:
    config = dynamo_client.DynamoConfig()
    assert config.base_url == "http://localhost:8000"
    assert (config.api_key, config.timeout) == (None, 30)
    assert (config.max_retries, config.retry_delay) == (3, 1.0)

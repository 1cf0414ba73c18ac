"""Every connection, listener and program has a bound in the table, and a test that shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bounds_page  # noqa: E402

PLANTED = {
    "a listener": "import asyncio\nasync def f():\n    await asyncio.start_server(None, port=1)\n",
    "a socket": "from socket import socket as s\ndef f():\n    s()\n",
    "a lookup": "import socket\nclass C:\n    def f(self):\n        socket.getaddrinfo('a', 1)\n",
    "a client": "import aiohttp as a\nasync def f():\n    return a.ClientSession()\n",
    "a client's subclass": "import httpx\nclass f(httpx.Client):\n    ...\n",
    "a program": "import subprocess\ndef f():\n    subprocess.run(['true'], check=False)\n",
    "a loop's method": "def f(loop):\n    loop.create_connection(print)\n",
    "a ZMQ socket": "def f(context):\n    context.socket(1)\n",
    "gRPC": "import grpc.aio\ndef f():\n    grpc.aio.insecure_channel('a')\n",
    "another library": "import requests\ndef f():\n    requests.get('http://a')\n",
    "imported on use": "def f():\n    from urllib.request import urlopen\n    urlopen('http://a')\n",
    "our own wire": "from commutator.trust import listen as hear\nasync def f():\n    hear()\n",
}


def test_each_site_is_in_the_table_once() -> None:
    named = [site for row in bounds_page.rows() for site in row.get("sites", [])]
    assert sorted(named) == sorted(set(named)), "a site stands in two rows"
    found = bounds_page.all_sites()
    missing = {site: used for site, used in found.items() if site not in named}
    assert not missing, "add rows to scripts/bounds.toml, and bounds to the code"
    assert not set(named) - set(found), "these are no longer in the code"


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_one_is_found(what: str) -> None:
    assert [where.rpartition(".")[2] for where, _ in bounds_page.sites(PLANTED[what])] == ["f"]


def test_what_opens_nothing_is_no_site() -> None:
    source = "import asyncio, socket\ndef f(link):\n    link.connect()\n    socket.gethostname()\n"
    assert list(bounds_page.sites(source)) == []


def test_each_row_names_options_and_tests_that_exist() -> None:
    pages = (ROOT / "docs" / "reference" / "configuration").glob("*.md")
    options = "".join(page.read_text() for page in pages)
    for row in bounds_page.rows():
        assert {*row} - {"options", "sites"} == {"peer", "sends", "bound", "then", "test"}
        for option in row.get("options", []):
            assert f"| `{option}` |" in options, f"{option} of {row['peer']}"
        path, _, function = row["test"].partition("::")
        assert (ROOT / path).exists(), row["test"]
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(), row["test"]


def test_the_page_is_current() -> None:
    assert bounds_page.PAGE.read_text() == bounds_page.page(), "run `make docs`"

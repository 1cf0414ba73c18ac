"""docs/how-to/python-client.md: every program of it, against a running deployment."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.client_deployment import everything

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "python-client.md"
PROGRAMS = re.findall(
    r"^## (.+?)$|^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
SAID = {
    "Tools": "It is sunny.\n",
    "Health": "ready\n['m']\n",
    "When it fails": "",
    "Sessions": "",
}
"""Of the programs under these headings. All others print something."""
URL = "http://localhost:8000"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(everything(tmp_path_factory.mktemp("client"), replicas=1)) as running:
        yield running


def test_every_program_runs(cluster: LocalCluster) -> None:
    heading, ran = "", set()
    for title, program in PROGRAMS:
        if title:
            heading = title
            continue
        assert URL in program
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program.replace(URL, cluster.url)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), heading
        assert done.stdout == SAID[heading] if heading in SAID else done.stdout, heading
        ran.add(heading)
    assert ran > SAID.keys()

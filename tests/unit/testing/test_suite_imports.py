"""`commutator_testing` outside this checkout, where not everything is installed."""

from __future__ import annotations

import subprocess
import sys

import commutator_testing


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_name_can_be_imported() -> None:
    for name in commutator_testing.__all__:
        assert getattr(commutator_testing, name).__module__.startswith("commutator")


def test_a_missing_package_is_named_with_what_to_install() -> None:
    done = run(
        "import sys; sys.modules['hypothesis'] = None; from commutator_testing import collect\n"
        "from commutator_testing import RouterContract"
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "RouterContract needs hypothesis: pip install 'commutator[testing]'" in last

"""An agent that says what it was given, and waits for SIGTERM: for suites of agent launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from commutator.launcher.child import StartFailure, report_start_failure

_CHILD = "import time; time.sleep(600)"


def main() -> None:
    folder, address, control = sys.argv[1:]
    order = json.loads((Path(folder) / "order.json").read_text())
    if order.get("problem"):
        failure = StartFailure(problems=[order["problem"]], is_permanent=True)
        report_start_failure(Path(folder), failure)
        sys.exit(1)
    report = Path(order["report"])
    argv = [sys.executable, "-c", _CHILD]
    child = subprocess.Popen(argv, start_new_session=True)  # noqa: S603 - our own command line

    def end(*_: object) -> None:
        report.with_suffix(".ended").touch()
        while order.get("ends_with") and not Path(order["ends_with"]).exists():
            time.sleep(0.05)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    given = {
        "pid": os.getpid(), "child": child.pid, "parent": os.getppid(), "address": address,
        "control": control, "threads": os.environ.get("OMP_NUM_THREADS"),
    }  # fmt: skip
    draft = report.with_suffix(".draft")
    draft.write_text(json.dumps(given))
    draft.replace(report)
    time.sleep(600)


if __name__ == "__main__":
    main()

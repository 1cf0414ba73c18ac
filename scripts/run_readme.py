"""Runs the README's own commands in order, as a newcomer would, and fails where one fails.

``make serve`` is started and left running until the end; everything else must exit with 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READY_URL = "http://localhost:8000/ready"
READY_TIMEOUT_S = 900


def main() -> int:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    server: subprocess.Popen[bytes] | None = None
    try:
        for language, code in blocks:
            print(f"\n--- README: {code.strip().splitlines()[0]}", flush=True)
            started_s = time.monotonic()
            if code.strip() == "make serve":
                server = subprocess.Popen(["make", "serve"], cwd=ROOT, start_new_session=True)
                wait_ready(server)
            elif language == "sh":
                subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=ROOT, check=True)
            else:
                python = ROOT / ".venv" / "bin" / "python"
                subprocess.run([python, "-c", code], cwd=ROOT, check=True)
            print(f"\n--- {time.monotonic() - started_s:.0f} s", flush=True)
    finally:
        if server is not None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
    return 0


def wait_ready(server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            sys.exit("make serve ended by itself")
        try:
            with urllib.request.urlopen(READY_URL, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"make serve was not ready within {READY_TIMEOUT_S} s")


if __name__ == "__main__":
    sys.exit(main())

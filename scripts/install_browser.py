"""Installs what the tests of the page at /ui need: Chromium with its driver, Selenium and axe.

The browser comes from Debian's packages, which needs root. Where it cannot be had this says so and
ends without an error: the tests that need it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ["chromium", "chromium-driver"]


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["-c", "constraints.txt"]
    subprocess.run([*pip, "selenium"], check=True)
    # Only its copy of axe is wanted, not Playwright with a Node of its own.
    subprocess.run([*pip, "--no-deps", "axe-playwright-python"], check=True)
    if all(map(shutil.which, PROGRAMS)):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print("no browser: install Chromium and its driver to run the tests of the page")
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update", "-qq"], install):
        if subprocess.run(command, env=quiet, check=False, stdout=subprocess.DEVNULL).returncode:
            print(f"no browser: {' '.join(command)} failed; the tests of the page are skipped")
            return


if __name__ == "__main__":
    main()

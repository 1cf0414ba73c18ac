"""Brings every generated part of the docs up to date: console blocks and the configuration page."""

from __future__ import annotations

import sys

import configuration_page
import docs_console

if __name__ == "__main__":
    configuration_page.write()
    sys.argv.append("--write")
    docs_console.main()

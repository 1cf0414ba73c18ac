"""Brings every generated part of the docs up to date: console blocks, reference, dashboards."""

from __future__ import annotations

import sys

import bounds_page
import cli_page
import client_page
import clients_page
import configuration_page
import contract_page
import dashboards
import defaults_page
import docs_console
import engines_page
import findings_page
import http_page
import imports_page
import kit_page
import logs_page
import metrics_page
import models_page
import protocols_page

if __name__ == "__main__":
    bounds_page.write()
    cli_page.write()
    client_page.write()
    clients_page.write()
    contract_page.write_pages(configuration_page.FOLDER, configuration_page.pages())
    contract_page.write_pages(contract_page.FOLDER, contract_page.pages())
    dashboards.write()
    defaults_page.write()
    engines_page.write()
    findings_page.write()
    http_page.write()
    imports_page.write()
    kit_page.write()
    logs_page.write()
    metrics_page.write()
    models_page.write()
    protocols_page.write()
    sys.argv.append("--write")
    docs_console.main()

"""``commutator doctor``: gathers facts, has them checked, prints the findings."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commutator.cli.options import DEFAULT_FILE, no_plugin_option, set_option
from commutator.errors import CommutatorError, ConfigError
from commutator_console.front_door import FrontDoor
from commutator_doctor.bundle import last_lines, write_bundle
from commutator_doctor.deployment import DEPLOYMENT
from commutator_doctor.findings import Finding
from commutator_doctor.hit_rate import HIT_RATE, HitRate, hit_rate, read_trace
from commutator_doctor.look_at_deployment import Seen, look_at_deployment
from commutator_doctor.look_at_machine import look_at_machine
from commutator_doctor.machine import MACHINE
from commutator_doctor.report import Report, dumps, report_json, report_lines, report_text
from commutator_engine_kit.model_kv import model_at

if TYPE_CHECKING:
    from commutator.config.load import Loaded

_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog="Example: commutator doctor cluster.yaml --url http://127.0.0.1:8000\n\n"
    "Exit codes: 0 nothing found, 1 an error, 3 warnings only, 2 a wrong command line."
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=_PATH)
@set_option
@no_plugin_option
@click.option(
    "--url",
    envvar="COMMUTATOR_URL",
    show_envvar=True,
    help="Look at the deployment that this front door serves.",
)
@click.option(
    "--admin-url",
    envvar="COMMUTATOR_ADMIN_URL",
    show_envvar=True,
    help="URL of `frontend.admin`, if the deployment has it.",
)
@click.option(
    "--api-key",
    envvar="COMMUTATOR_API_KEY",
    show_envvar=True,
    help="Key with the permission `metrics`, if the deployment asks for keys.",
)
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(0, 600),
    default=5.0,
    show_default=True,
    help="Seconds of traffic to look at; with little traffic, all since the start.",
)
@click.option("--ask", is_flag=True, help="Send each model two short test requests, too.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=_PATH,
    help="A trace of the observer `recording`: says why the hit rate is low. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a zip file for a bug report, without secrets.",
)
@click.option("--log", "log_file", type=_PATH, help="A log whose last lines go into the bundle.")
def doctor(
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    no_plugins: tuple[str, ...],
    url: str | None,
    admin_url: str | None,
    api_key: str | None,
    window_s: float,
    ask: bool,
    traces: tuple[Path, ...],
    as_json: bool,
    bundle: Path | None,
    log_file: Path | None,
) -> None:
    """Find what is wrong, and say what to do.

    Looks at this machine: limits, memory, disks, clock, GPUs, NIXL, ports; with FILE
    (commutator.yaml if it is here) also at what it names: engines, folders, certificates, other
    hosts. With --url also at a running deployment: slow, senseless answers, 503, low hit rate.
    """
    if url is not None and not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"expected http://HOST:PORT, got {url}", param_hint="--url")
    if not files and Path(DEFAULT_FILE).is_file():
        files = (Path(DEFAULT_FILE),)
    try:
        rate = hit_rate(read_trace(traces)) if traces else None
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    _log_errors_only()
    loaded, problems, warnings = _configuration(files, sets, no_plugins)
    seen = None
    if url is not None:
        door = FrontDoor(
            url.rstrip("/").removesuffix("/v1"),
            api_key,
            None if admin_url is None else admin_url.rstrip("/"),
        )
        seen = look_at_deployment(
            door, window_s=window_s, ask=ask, resumes_anywhere=dict(_resuming(loaded))
        )
    report = _report(loaded, problems, warnings, seen, rate)
    if as_json:
        click.echo(dumps(report_json(report)), nl=False)
    else:
        for line in report_lines(report):
            click.echo(line)
    if bundle is not None:
        _write(bundle, report, loaded, seen, log_file, api_key)
    raise SystemExit(report.exit_code)


def _log_errors_only() -> None:
    """While the command runs: each problem is a finding."""
    logger = logging.getLogger("commutator")
    click.get_current_context().call_on_close(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.ERROR)


def _report(
    loaded: Loaded | None,
    problems: Sequence[str],
    warnings: Sequence[str],
    seen: Seen | None,
    rate: HitRate | None,
) -> Report:
    machine = look_at_machine(
        None if loaded is None else loaded.config,
        problems=problems,
        warnings=warnings,
        against_deployment_s=None if seen is None else seen.clock_off_s,
    )
    findings: list[Finding] = MACHINE.findings(machine)
    if seen is not None:
        findings += DEPLOYMENT.findings(seen.facts)
    if rate is not None:
        findings += HIT_RATE.findings(rate)
    return Report(
        machine=machine,
        deployment=None if seen is None else seen.facts,
        hit_rate=rate,
        findings=findings,
    )


def _configuration(
    files: tuple[Path, ...], sets: tuple[str, ...], no_plugins: tuple[str, ...]
) -> tuple[Loaded | None, list[str], list[str]]:
    """The configuration, what is wrong with it on this machine, and its warnings."""
    if not files:
        return None, [], []
    from commutator.cli.likely_mistakes import warnings_of
    from commutator.config.load import load_config
    from commutator.supervisor.preflight import check_machine, machine_warnings

    try:
        with redirect_stderr(io.StringIO()):
            loaded = load_config(files, sets=sets, no_plugins=no_plugins)
    except ConfigError as error:
        return None, [*error.problems], []
    warnings = [*warnings_of(loaded.config, loaded.host)]
    try:
        check_machine(loaded.config, loaded.host)
    except ConfigError as error:
        return loaded, [*error.problems], warnings
    return loaded, [], [*warnings, *machine_warnings(loaded.config, loaded.host)]


def _resuming(loaded: Loaded | None) -> Iterator[tuple[str, bool]]:
    """Whether each model's prompts can be resumed at every block, where its config.json says it."""
    for model in () if loaded is None else loaded.config.models:
        if (kept := model_at(model.source)) is not None:
            yield model.name, kept.is_plain


def _write(
    path: Path,
    report: Report,
    loaded: Loaded | None,
    seen: Seen | None,
    log_file: Path | None,
    api_key: str | None,
) -> None:
    from commutator.config.show import show_config

    shown = "" if loaded is None else show_config(loaded.config, loaded.tree)
    versions = "".join(f"{name} {version}\n" for name, version in report.machine.versions)
    parts: Mapping[str, str] = {
        "report.txt": report_text(report),
        "report.json": dumps(report_json(report)),
        "configuration.yaml": shown,
        "versions.txt": versions,
        "health.json": dumps(seen.facts.health) if seen is not None and seen.facts.health else "",
        "metrics.txt": "" if seen is None else seen.metrics_page,
        "tiers.json": dumps(seen.facts.tiers) if seen is not None and seen.facts.tiers else "",
        "log.txt": "" if log_file is None else last_lines(log_file),
    }
    try:
        write_bundle(path, parts, [*_secrets(loaded), *([api_key] if api_key else [])])
    except OSError as error:
        raise CommutatorError(f"{path}: {error.strerror}") from error
    names = ", ".join(name for name, text in parts.items() if text)
    click.echo(f"{path}: {names}; read it before you send it", err=True)


def _secrets(loaded: Loaded | None) -> Iterator[str]:
    """Those of the configuration that this user can read."""
    from commutator.config.secrets import secrets_in

    for _, secret in () if loaded is None else secrets_in(loaded.config):
        try:
            yield secret.reveal()
        except ConfigError:
            continue

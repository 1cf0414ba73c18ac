"""Findings as text and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import click

from commutator_doctor.deployment import Deployment, figures
from commutator_doctor.facts import Machine
from commutator_doctor.findings import Finding, Severity, exit_code, worst_first
from commutator_doctor.hit_rate import HitRate, hit_rate_lines

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_GB = 1e9


@attrs.frozen(kw_only=True)
class Report:
    """Everything that one run found."""

    machine: Machine
    deployment: Deployment | None = None
    hit_rate: HitRate | None = None
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return exit_code(self.findings)


def report_lines(report: Report) -> Iterator[str]:
    """For people."""
    yield click.style("This machine", bold=True)
    yield from (f"  {line}" for line in _machine_lines(report.machine))
    if report.deployment is not None:
        yield click.style(f"Deployment at {report.deployment.url}", bold=True)
        yield from (f"  {line}" for line in _deployment_lines(report.deployment))
    if report.hit_rate is not None:
        yield click.style("Hit rate", bold=True)
        yield from (f"  {line}" for line in hit_rate_lines(report.hit_rate))
    yield ""
    if not report.findings:
        yield click.style("Nothing is wrong, as far as this command looks.", fg="green")
        return
    for one in worst_first(report.findings):
        head = click.style(f"{one.severity:<7}", fg=_COLOURS[one.severity], bold=True)
        where = f"{one.subject}: " if one.subject else ""
        yield f"{head} {click.style(one.code, bold=True)}  {where}{one.text}"
        yield f"        {one.remedy}"
    yield ""
    yield _summary(report.findings)


def _summary(findings: Sequence[Finding]) -> str:
    parts = []
    for severity in Severity:
        count = sum(1 for one in findings if one.severity is severity)
        if count:
            parts.append(f"{count} {severity}{'s' if count > 1 else ''}")
    return f"{', '.join(parts)}. Each is explained in docs/reference/findings.md."


def _machine_lines(machine: Machine) -> Iterator[str]:
    memory = machine.memory
    yield (
        f"{machine.system}, Python {machine.python}, {machine.cores:g} cores, "
        f"load {machine.load:.1f}"
    )
    shared = "no shared memory"
    if memory.shared_total is not None:
        shared = f"shared memory {memory.shared_total / _GB:.3g} GB"
    yield (
        f"memory {memory.total / _GB:.3g} GB, {memory.available / _GB:.3g} GB available; {shared}"
    )
    files, locked = machine.limits.open_files, machine.limits.locked_bytes
    yield (
        f"open files {'unlimited' if files is None else f'{files:,}'}, locked memory "
        f"{'unlimited' if locked is None else f'{locked / 1e6:.3g} MB'}"
    )
    if machine.gpus.found:
        for gpu in machine.gpus.found:
            yield (
                f"GPU {gpu.index} {gpu.name}, {gpu.total_bytes / _GB:.3g} GB, "
                f"{gpu.used_bytes / _GB:.3g} GB in use, driver {gpu.driver}"
            )
    else:
        yield "no NVIDIA GPU" + (
            f"; {', '.join(machine.gpus.others)}" if machine.gpus.others else ""
        )
    rdma = [one.name for one in machine.interfaces if one.rdma]
    nixl = machine.nixl.version or "not installed"
    yield f"NIXL {nixl}; RDMA: {', '.join(rdma) or 'none'}"
    core = dict(machine.versions).get("commutator", "?")
    yield f"Commutator {core} and {len(machine.versions) - 1} packages more"
    for one in machine.engines:
        version = f" {one.version}" if one.version else ""
        gpus = f", {one.gpus_each} GPUs each" if one.gpus_each else ""
        yield f"{one.option}: {one.workers} x {one.kind}{version}{gpus}"
    for disk in machine.disks:
        speed = ""
        if disk.write_bytes_per_s is not None:
            speed = f", {disk.write_bytes_per_s / 1e6:.0f} MB/s written in a small trial"
        yield f"{disk.option}: {disk.file_system}, {disk.free_bytes / _GB:.4g} GB free{speed}"
    for peer in machine.peers:
        if peer.connect_s is not None:
            yield f"{peer.option}: {peer.address} in {peer.connect_s * 1000:.1f} ms"


def _deployment_lines(facts: Deployment) -> Iterator[str]:
    if facts.problem is not None:
        yield "no answer"
        return
    if facts.closed is not None:
        yield "it answers; health and metrics may not be read"
        return
    for name, value in figures(facts).items():
        yield f"{name.replace('_', ' '):<22} {value}"
    for one in facts.trials:
        if one.problem is None and one.seconds:
            yield f"test request to {one.model}: {one.tokens} tokens in {one.seconds:.2f} s"


def report_json(report: Report) -> dict[str, Any]:
    """For scripts; the names of its keys stay."""
    deployment, rate = report.deployment, report.hit_rate
    numbers = None if deployment is None else {"url": deployment.url, **figures(deployment)}
    return {
        "exit_code": report.exit_code,
        "findings": [attrs.asdict(one) for one in worst_first(report.findings)],
        "machine": attrs.asdict(report.machine),
        "deployment": numbers,
        "hit_rate": None if rate is None else attrs.asdict(rate),
        "python": platform.python_version(),
    }


def report_text(report: Report) -> str:
    """The lines without colours."""
    return "".join(f"{click.unstyle(line)}\n" for line in report_lines(report))


def dumps(value: Mapping[str, Any]) -> str:
    """JSON for people to read as well."""
    return json.dumps(value, indent=2, default=str) + "\n"

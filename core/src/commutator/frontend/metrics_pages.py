"""Prometheus pages of several front doors as one page. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["merged_pages"]

_LABEL = "frontend"
_HELP = "# HELP "


def merged_pages(pages: Mapping[str, str]) -> str:
    """One page with every sample of ``pages``, which are by front door; a label tells whose it is.

    Samples of one metric stand together under one header, as the format asks for.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        label = f'{_LABEL}="{name}"'
        metric = ""
        for line in filter(None, page.split("\n")):  # values may hold other ends of lines
            if line.startswith(_HELP):
                metric = line.removeprefix(_HELP).split(" ", 1)[0]
            if not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, label))
            elif line not in (header := headers.setdefault(metric, [])):
                header.append(line)
    lines = (
        line for metric, header in headers.items() for line in (*header, *samples.get(metric, ()))
    )
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, label: str) -> str:
    """``name{a="b"} 1`` or ``name 1`` with one label more."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"

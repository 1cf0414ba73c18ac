"""``commutator kubernetes``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commutator.cli.options import Sources, configuration_options

if TYPE_CHECKING:
    from commutator_kubernetes_tools.plan import Mount

_DNS = re.compile(r"[a-z]([-a-z0-9]{0,18}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?")
_KINDS = ("secret", "configmap", "pvc", "claim", "empty", "host", "image")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@click.group(epilog="Example: commutator kubernetes render cluster.yaml --image IMAGE")
def kubernetes() -> None:
    """Write a deployment as Kubernetes objects."""


def _name(_context: click.Context, option: click.Parameter, value: str) -> str:
    if not _DNS.fullmatch(value):
        problem = f"expected at most 20 lower-case letters, digits and dashes, got {value!r}"
        raise click.BadParameter(problem, param=option)
    return value


def _namespace(_context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _LABEL.fullmatch(value):
        raise click.BadParameter(f"expected a name of DNS, got {value!r}", param=option)
    return value


def _pairs(
    _context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not (key and equals and text):
            raise click.BadParameter(f"expected NAME=VALUE, got {value!r}", param=option)
        pairs[key] = text
    return pairs


def _counts(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    pairs = _pairs(context, option, values)
    for name, text in pairs.items():
        if not re.fullmatch(r"\d{1,2}", text):
            problem = f"expected {name}=NUMBER of at most 99, got {text!r}"
            raise click.BadParameter(problem, param=option)
    return {name: int(text) for name, text in pairs.items()}


def _amounts(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, text in _pairs(context, option, values).items():
        for part in text.split(","):
            key, colon, amount = part.partition(":")
            if not (key and colon and _QUANTITY.fullmatch(amount)):
                problem = f"expected {name}=cpu:4,memory:32Gi, got {part!r}"
                raise click.BadParameter(problem, param=option)
            found.setdefault(name, {})[key] = amount
    return found


def _mount(path: str, text: str, option: click.Parameter) -> Mount:
    from commutator_kubernetes_tools.plan import Mount

    kind, _, source = text.partition(":")
    problem = None
    if kind not in _KINDS:
        problem = f"expected one of {', '.join(_KINDS)}, got {kind!r}"
    elif not path.startswith("/") or path.rstrip("/") == "":
        problem = f"expected a path that starts with /, got {path!r}"
    elif kind in ("secret", "configmap", "pvc") and not _OBJECT.fullmatch(source):
        problem = f"expected {kind}:NAME, got {text!r}"
    elif kind == "claim" and not _QUANTITY.fullmatch(source.partition(":")[0]):
        problem = f"expected claim:SIZE or claim:SIZE:STORAGE-CLASS, got {text!r}"
    elif kind == "empty" and source and not _QUANTITY.fullmatch(source):
        problem = f"expected empty or empty:SIZE, got {text!r}"
    elif kind == "host" and not source.startswith("/"):
        problem = f"expected host:/PATH, got {text!r}"
    if problem is not None:
        raise click.BadParameter(problem, param=option)
    clean = path.rstrip("/")
    return Mount(path=clean, kind=kind, source=source)  # type: ignore[arg-type] # one of _KINDS


def _mounts(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[Mount, ...]:
    pairs = _pairs(context, option, values)
    return tuple(_mount(path, text, option) for path, text in pairs.items())


def _models(_context: click.Context, option: click.Parameter, value: str | None) -> Mount | None:
    from commutator_kubernetes_tools.plan import MODELS

    return None if value is None else _mount(MODELS, value, option)


@kubernetes.command(
    epilog="Example: commutator kubernetes render commutator.yaml --image registry.example/llm:1"
)
@configuration_options
@click.option("--image", required=True, help="The image of all pods, with Commutator.")
@click.option(
    "--engine-image", "images", multiple=True, metavar="ENGINE=IMAGE", callback=_pairs,
    help="Another one for the workers of an engine entry. May be repeated.",
)  # fmt: skip
@click.option(
    "--name", default="commutator", show_default=True, callback=_name,
    help="Of all objects, and the prefix of those of engines.",
)  # fmt: skip
@click.option("--namespace", callback=_namespace, help="By default kubectl's.")
@click.option(
    "--front-doors", type=click.IntRange(1, 100),
    help="Pods of the front door; by default 2, or 1 if it runs the workers.",
)  # fmt: skip
@click.option(
    "--gpus", multiple=True, metavar="ENGINE=NUMBER", callback=_counts,
    help="GPUs of each worker, where `gpus` and parallel sizes in `args` do not tell.",
)  # fmt: skip
@click.option(
    "--gpu-resource", default="nvidia.com/gpu", show_default=True, help="What the nodes offer."
)
@click.option(
    "--resources", multiple=True, metavar="ENGINE=cpu:4,memory:32Gi", callback=_amounts,
    help="Requests of the pods of an engine, or of `frontend`. May be repeated.",
)  # fmt: skip
@click.option(
    "--secret", default="", metavar="NAME",
    help="Secret with the environment variables of the file, by their names; NAME-secrets.",
)  # fmt: skip
@click.option(
    "--models", metavar="pvc:CLAIM|host:/PATH|empty", callback=_models,
    help="Volume at /models, which also caches what comes from the Hub.",
)  # fmt: skip
@click.option(
    "--mount", "mounts", multiple=True, metavar="PATH=VOLUME", callback=_mounts,
    help="VOLUME: secret:NAME, configmap:NAME, pvc:CLAIM, claim:SIZE[:CLASS] for each worker, "
    "empty[:SIZE], host:/PATH, or image if the path is in the image. May be repeated.",
)  # fmt: skip
@click.option(
    "--monitoring", metavar="NAMESPACE", callback=_namespace,
    help="Write a PodMonitor, and let pods of this namespace read metrics.",
)  # fmt: skip
@click.option(
    "--network-policy/--no-network-policy", default=True, show_default=True,
    help="Let only these pods reach workers.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a List as JSON instead of YAML.")
@click.option(
    "--kustomize", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Write a base of Kustomize instead.",
)  # fmt: skip
@click.option(
    "--helm", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Write a chart of Helm instead: images, replicas, node selectors and tolerations are "
    "values.",
)  # fmt: skip
def render(
    sources: Sources,
    images: dict[str, str],
    as_json: bool,
    kustomize: Path | None,
    helm: Path | None,
    **options: Any,
) -> None:
    """Print the Kubernetes objects of the deployment that FILE describes.

    No operator and no cluster is needed, and equal files give equal objects. With a registry that
    hosts share, front doors and each engine have pods of their own; otherwise one pod runs all.
    What cannot be expressed is refused. Secrets are named, never written.
    """
    from commutator import __version__
    from commutator_kubernetes_tools.layouts import helm_chart, kustomize_base
    from commutator_kubernetes_tools.objects import objects_of
    from commutator_kubernetes_tools.output import as_json_list, as_yaml
    from commutator_kubernetes_tools.plan import Options, plan_of

    plan = plan_of(sources.load(), Options(images=images, **options))
    for note in plan.notes:
        click.secho(f"note: {note}", fg="yellow", err=True)
    objects = objects_of(plan)
    if kustomize is not None:
        _write(kustomize, kustomize_base(objects))
    if helm is not None:
        _write(helm, helm_chart(plan, objects, __version__))
    if kustomize is None and helm is None:
        click.echo(as_json_list(objects) if as_json else as_yaml(objects), nl=False)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write ``files``. Refuses a folder that has others: they would be applied, too."""
    from commutator.errors import ConfigError

    others = {str(one.relative_to(folder)) for one in folder.rglob("*.yaml")} - files.keys()
    if others:
        problem = f"it has files that are not of this deployment, such as {min(others)}"
        raise ConfigError([f"{problem}; remove them, or name a new folder"], str(folder))
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    click.echo(f"Wrote {len(files)} files into {folder}.")


@kubernetes.command(epilog="Example: commutator kubernetes fetch /etc/commutator/commutator.yaml")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def fetch(file: Path) -> None:
    """Download the models that FILE names on the Hugging Face Hub, and end.

    The first container of each pod does it, so that no probe waits for a download.
    """
    import logging

    from commutator.config.load import load_config
    from commutator.supervisor.preflight import fetch_models

    logging.basicConfig(level="INFO", format="%(message)s")
    fetch_models(load_config([file], only_routes=True).config)

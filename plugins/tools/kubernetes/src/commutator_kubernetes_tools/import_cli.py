"""``commutator import``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click
import yaml

from commutator.config.load import load_config
from commutator.config.yaml_file import Dumper
from commutator.errors import ConfigError
from commutator_kubernetes_tools.draft import comments
from commutator_kubernetes_tools.readers import READERS
from commutator_kubernetes_tools.source import Source

_WHAT = {
    "dynamo": "a DynamoGraphDeployment of NVIDIA Dynamo",
    "kserve": "an LLMInferenceService of KServe",
    "llm-d": "Helm values of llm-d's modelservice",
    "production-stack": "Helm values of the vLLM production stack",
}


@click.command("import", epilog="Example: commutator import dynamo deploy.yaml > commutator.yaml")
@click.argument("server", type=click.Choice(sorted(READERS)))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(server: str, file: Path) -> None:
    """Write a configuration from what another server was deployed from.

    A comment names each field that has no counterpart, and what takes its place. The result is
    checked as `commutator config check --elsewhere` does; read it before you serve it.
    """
    for text in documents(file, server):
        click.echo(text, nl=False)
        return
    raise ConfigError([f"it has not {_WHAT[server]}"], str(file))


def documents(file: Path, server: str) -> list[str]:
    """The configuration of the first document of ``file`` that is of ``server``."""
    return [converted(source, server) for source in sources(file, server)[:1]]


def sources(file: Path, server: str) -> list[Source]:
    """The documents of ``file`` that ``server`` was deployed from. Raises ConfigError."""
    try:
        found = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"not YAML: {error}"], str(file)) from error
    wanted = {"dynamo": "DynamoGraphDeployment", "kserve": "LLMInferenceService"}.get(server)
    return [
        Source(one, str(file))
        for one in found
        if wanted is None or (isinstance(one, dict) and one.get("kind") == wanted)
    ]


def converted(source: Source, server: str) -> str:
    """The configuration, after its comments. Raises ConfigError when it is none that serves."""
    draft = READERS[server](source)
    if not draft.engines:
        raise ConfigError(["it names no model that is served"], source.name)
    values = yaml.dump(
        draft.configuration(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    head = comments(source, f"{Path(source.name).name}, {_WHAT[server]}")
    text = "\n".join([*head, values])
    with TemporaryDirectory() as folder:
        draft_file = Path(folder) / "commutator.yaml"
        draft_file.write_text(text, encoding="utf-8")
        load_config([draft_file], environ={})
    return text

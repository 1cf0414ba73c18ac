"""What is found out about a server in another environment before it is launched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from commutator.contract.engine import ModelConfig
from commutator_engine_kit import preflight
from commutator_engine_kit.launching import PythonServerConfig, argument_value
from commutator_engine_kit.preflight import (
    ServerNeeds,
    server_problems,
    server_warnings,
)

GB = 10**9


@frozen(kw_only=True)
class Config(PythonServerConfig):
    kind: str = "server"
    name: str | None = "s"
    python: str = sys.executable
    args: tuple[str, ...] = ()
    without_gpu: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.without_gpu


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, with 16 GB of memory."""
    monkeypatch.setattr(preflight, "gpu_memory_bytes", lambda: ())
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: 16 * GB)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (folder / "model.safetensors").write_bytes(b"0")
    return ModelConfig(name="m", source=str(folder))


def needs(**changes: Any) -> ServerNeeds:
    """The package pytest stands in for the server: this environment has it."""
    known: dict[str, Any] = {
        "title": "Server", "package": "pytest",
        "distributions": ("no-such-build", "pytest"), "made_by": "make server",
        "without_gpu": "use a CPU build", "oldest": "1.0", "ours": {"--port": "remove it"},
        "context_argument": "--max-len", "parallel_arguments": (("--tp", "-tp"), ("--pp",)),
        "shrinking_arguments": ("--quantization",),
    }  # fmt: skip
    return ServerNeeds(**known | changes)


def problems(model: ModelConfig, config: Config | None = None, **changes: Any) -> list[str]:
    return list(server_problems(config or Config(), model, needs(**changes)))


def weights(model: ModelConfig, size_bytes: int) -> None:
    """A sparse file of this size."""
    with (Path(model.source) / "model.safetensors").open("wb") as file:
        file.truncate(size_bytes)


def test_what_can_be_launched_has_no_problems(model: ModelConfig) -> None:
    assert problems(model) == []
    assert list(server_warnings(Config(), needs())) == []
    assert problems(evolve(model, max_model_len=4096), Config(args=("--max-len=4096",))) == []


def test_the_environment(model: ModelConfig, tmp_path: Path) -> None:
    (there_is_none,) = problems(model, Config(python="/no/such/python"))
    assert there_is_none.startswith("python: there is no /no/such/python; run `make server`")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    (cannot,) = problems(model, Config(python=str(broken)))
    assert f"python: {broken} cannot be run: it is broken; run `make server`" in cannot
    (lacks,) = problems(model, package="no_such_server")
    assert lacks.startswith(f"python: {sys.executable} has no Server; run `make server`")
    (old,) = server_warnings(Config(), needs(oldest="9999.1"))
    assert "is older than 9999.1, the oldest that is tested" in old
    (ours,) = problems(model, Config(args=("--port=1",)))
    assert ours == "args: --port is set by Commutator; remove it"


def test_the_environment_is_that_with_the_entrys_variables(
    model: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / "site" / "only_there").mkdir(parents=True)
    (tmp_path / "site" / "only_there" / "__init__.py").touch()
    config = Config(env={"PYTHONPATH": str(tmp_path / "site")})
    assert problems(model, config, package="only_there") == []
    assert len(problems(model, package="only_there")) == 1


def test_devices(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpus: Any = {"distributions": ("pytest",)}
    (without,) = problems(model, **of_gpus)
    assert "is for NVIDIA GPUs, and this machine has none; use a CPU build" in without
    assert problems(model, Config(without_gpu=True), **of_gpus) == []
    (no_gpu,) = problems(model, Config(gpus=(0,)))
    assert no_gpu == "gpus: there is no GPU 0; this machine has none"
    monkeypatch.setattr(preflight, "gpu_memory_bytes", lambda: (80 * GB, 80 * GB))
    assert problems(model, Config(gpus=(0, 1)), **of_gpus) == []
    (two,) = problems(model, Config(gpus=(2,)))
    assert two == "gpus: there is no GPU 2; this machine has 0 to 1"
    monkeypatch.setattr(preflight, "gpu_memory_bytes", lambda: None)
    assert problems(model, Config(gpus=(7,)), **of_gpus) == [], "nobody knows"


def test_weights_that_fit_nowhere(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    weights(model, 10 * GB)
    assert problems(model) == []
    (twice,) = problems(model, Config(replicas=2))
    assert twice == (
        "model: its weights of 10GB, 2 times, are more than this machine's 16GB of memory; use "
        "fewer replicas"
    )
    monkeypatch.setattr(preflight, "gpu_memory_bytes", lambda: (8 * GB, 8 * GB))
    (gpu,) = problems(model)
    assert gpu == (
        "model: its weights of 10GB are more than the 8GB of 1 GPU; use more, by --tp in `args`, "
        "or a smaller model"
    )
    for args in (("--tp", "2"), ("-tp=2",), ("--pp=2",), ("--quantization=fp8",)):
        assert problems(model, Config(args=args)) == [], args
    (Path(model.source) / "model.safetensors").unlink()
    (none,) = problems(model)
    assert none == f"model: {model.source} has no weights: no *.safetensors or *.bin file"


def test_a_context_that_the_model_does_not_have(model: ModelConfig) -> None:
    (longer,) = problems(evolve(model, max_model_len=8192))
    assert longer == (
        "model: max_model_len 8192 is more than the 4,096 tokens that the model is made for; "
        "Server would refuse to start"
    )
    (argument,) = problems(evolve(model, max_model_len=8192), Config(args=("--max-len", "9000")))
    assert argument.startswith("args: --max-len 9000 is more than the 4,096")
    file = Path(model.source) / "config.json"
    file.write_text(json.dumps({"max_position_embeddings": 4096, "rope_scaling": {"factor": 4}}))
    assert problems(evolve(model, max_model_len=8192)) == [], "it is scaled"


def test_nixl_where_a_hand_over_needs_it(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = preflight.Environment(packages=frozenset({"pytest"}), versions={"no-such-build": None})
    monkeypatch.setattr(preflight, "_look", lambda *_: bare)
    (missing,) = problems(model, Config(role="prefill"))
    assert missing.startswith(f"role: NIXL is not installed beside {sys.executable}; run `make")
    assert problems(model) == []


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ((), None), (("--a", "1"), "1"), (("--a=2",), "2"), (("--a", "--b"), ""), (("--a",), ""),
        (("--a=1", "--a=3"), "3"), (("--ab=1",), None),
    ],
)  # fmt: skip
def test_the_value_of_an_argument(args: tuple[str, ...], value: str | None) -> None:
    assert argument_value(args, "--a") == value

"""Dynamo's own front door with its KV router, over mocker workers, in the peer's environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.needs import needs
from bench.peers import ROOT
from bench.waiting import answer_of, wait_until
from commutator.launcher.ports import PortPicker
from commutator.tokenizer.gguf import read_gguf_metadata
from commutator.tokenizer.load import load_text_model, locate_model

__all__ = ["DynamoCluster"]

_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


class DynamoCluster:
    """Serves ``source``'s tokenizer and template as model ``name`` while its ``with`` block lasts.

    Raises NotInstalledError when the peer is not installed, TimeoutError when it does not start.
    """

    def __init__(
        self,
        name: str,
        source: str,
        *,
        workers: int,
        timeout_s: float = 60,
        template: str | None = None,
        tool_parser: str | None = None,
        said: Mapping[str, str] | None = None,
    ) -> None:
        """``template`` takes the place of the model's own one.

        ``tool_parser`` is Dynamo's name of the one that its front door uses. ``said`` are answers
        by their names, which requests have in ``nvext.annotations`` as ``output_replay_id:NAME``.
        """
        self._python = needs(ROOT / ".venv-dynamo" / "bin" / "python", "make peers")
        self._name = name
        self._source = source
        self._workers = workers
        self._timeout_s = timeout_s
        self._template = template
        self._tool_parser = tool_parser
        self._said = said or {}
        self._closing = ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-dynamo-")))
            self._closing = stack
            write_model(self._source, folder / "model", self._template)
            answers = folder / "answers.jsonl"
            answers.write_text("".join(self._answer_lines()))
            port = PortPicker().pick("127.0.0.1")
            self.url = f"http://127.0.0.1:{port}"
            mocker = ["-m", "dynamo.mocker"]
            if self._tool_parser is not None:
                mocker = [str(ROOT / "bench" / "peer_dynamo_mocker.py"), self._tool_parser]
            if self._said:
                mocker += ["--response-replay-trace-path", str(answers)]
            self._start(folder, "mocker", [
                *mocker, "--model-path", str(folder / "model"), "--model-name", self._name,
                "--num-workers", str(self._workers), "--speedup-ratio", "1000",
                "--block-size", "16",
            ])  # fmt: skip
            frontend = ["-m", "dynamo.frontend", "--router-mode", "kv"]
            self._start(folder, "frontend", [*frontend, "--http-port", str(port)])
            wait_until(self._has_model, "Dynamo's model", self._timeout_s, logs=folder)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def _answer_lines(self) -> Iterator[str]:
        """As Dynamo reads traces: the tokens of each answer, its end included."""
        text = load_text_model(self._source)
        for name, said in self._said.items():
            ids = [*text.encode(said, add_special_tokens=False), min(text.eos_ids)]
            row = {"request_id": name, "timestamp": 0, "input_length": 16, "hash_ids": [1]}
            yield json.dumps({**row, "output_length": len(ids), "output_token_ids": ids}) + "\n"

    def _start(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        env = {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "HF_HUB_OFFLINE": "1"}
        log = self._closing.enter_context((folder / f"{name}.log").open("wb"))
        argv = [str(self._python), *arguments, *_PLANES]
        process = subprocess.Popen(argv, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        self._closing.callback(_stop, process)

    def _has_model(self) -> bool:
        answer = answer_of(f"{self.url}/v1/models")
        return answer is not None and bool(json.loads(answer)["data"])


def write_model(source: str, folder: Path, template: str | None = None) -> None:
    """What the peer reads of a model directory, made from a .gguf file: no weights.

    ``template`` is None for the model's own one.
    """
    path = locate_model(source)
    text, metadata = load_text_model(source), read_gguf_metadata(path)
    folder.mkdir()
    text.tokenizer.save(str(folder / "tokenizer.json"))
    ends = sorted(text.eos_ids)
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": text.bos_id,
            "eos_token_id": ends[0],
            "max_position_embeddings": text.max_model_len,
            "vocab_size": text.vocab_size,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None if text.bos_id is None else text.token_text(text.bos_id),
            "eos_token": text.token_text(ends[0]),
            "chat_template": template or metadata["tokenizer.chat_template"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

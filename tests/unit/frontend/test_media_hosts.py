"""Engines fetch nothing from inside the deployment's network because a client says so."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.front_door import MODEL, front_door
from tests.unit.frontend.test_pass_through import ForwardingDispatcher

from commutator.errors import RequestError
from commutator_openai.media import check_media
from commutator_openai.protocol import OpenAiConfig

pytestmark = pytest.mark.security

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def asked(url: Any, kind: str = "image_url") -> dict[str, Any]:
    part = {"type": kind, kind: {"url": url}}
    return {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://other.example/a.png",
        "file:///etc/passwd",
        "/etc/passwd.png",
        "//images.example/a.png",
        "ftp://images.example/a.png",
        "http://images.example@10.0.0.1/a.png",
        "http://10.0.0.1\\@images.example/a.png",
        "http://images.example.evil.example/a.png",
        "http://images.example\n.evil.example/",
        "http://[::1/",
        "",
    ],
)
async def test_an_address_that_is_not_allowed_is_refused(url: str) -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher, media_hosts=("images.example",)) as door:
        for kind in ("image_url", "video_url", "audio_url"):
            status, body = await door.post("/v1/chat/completions", asked(url, kind))
            assert status == 400
            assert body["error"]["code"] in {"media_url_not_allowed", "invalid_value"}
    assert not dispatcher.sent


@pytest.mark.parametrize(
    "url", [PICTURE, "https://images.example/a.png?b=c", "HTTP://IMAGES.EXAMPLE:80/a"]
)
def test_what_is_allowed(url: str) -> None:
    check_media(asked(url), {"images.example"})


async def test_by_default_only_data_urls_pass() -> None:
    dispatcher = ForwardingDispatcher()
    async with front_door(dispatcher) as door:
        body = asked("https://images.example/a.png")
        status, refused = await door.post("/v1/chat/completions", body)
        assert (status, refused["error"]["code"]) == (400, "media_url_not_allowed")
        assert "media_hosts" in refused["error"]["message"]
        async with door.session.post(
            f"{door.url}/v1/chat/completions", json=asked(PICTURE)
        ) as answer:
            assert answer.status == 201
    assert len(dispatcher.sent) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]}]},
        {"input": [{"content": [{"type": "input_file", "file_url": "http://10.0.0.1/"}]}]},
        {"tools": [{"type": "mcp", "server_url": "http://10.0.0.1/"}]},
        {"documents": {"content": [{"image_url": {"URL": "http://10.0.0.1/"}}]}},
        {"image_urls": ["http://10.0.0.1/"]},
    ],
)
def test_wherever_the_address_stands(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_media(body, ())


@pytest.mark.parametrize("host", ["https://images.example", "Images.example", "a/b", ""])
def test_hosts_are_written_plainly(host: str) -> None:
    with pytest.raises(ValueError, match="no host name"):
        OpenAiConfig(kind="openai", media_hosts=(host,))

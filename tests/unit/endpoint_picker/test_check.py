"""What a probe of a gateway concludes."""

from __future__ import annotations

from contextlib import suppress

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from commutator_endpoint_picker.check import (
    Answer,
    cached_of,
    judge_asked,
    judge_large,
    judge_obeyed,
    judge_own_header,
    judge_streams,
    overlap_of,
    probe,
)

FINE = Answer(200, "{}", "w-1", cached_share=0.9, overlap_blocks=60)
BROKEN = Answer(503, "overflow")


def test_a_gateway_without_mistakes_has_none() -> None:
    found = [
        judge_asked(FINE),
        judge_obeyed([FINE, FINE]),
        judge_own_header(FINE),
        judge_large(FINE),
        judge_streams([FINE] * 3),
    ]
    assert [one.problem for one in found] == [None] * 5


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(500, ""), "cannot reach the picker"),
        (Answer(404, "no model"), "404: no model"),
        (Answer(0, "ClientError"), "no answer: ClientError"),
        (Answer(200, "{}"), "does not ask the picker"),
    ],
)
def test_a_picker_that_is_not_asked(answer: Answer, said: str) -> None:
    assert said in (judge_asked(answer).problem or "")


def test_picks_that_are_not_obeyed() -> None:
    missed = Answer(200, "{}", "w-1", cached_share=0.1, overlap_blocks=60)
    assert "1 of 2 prompts" in (judge_obeyed([FINE, missed]).problem or "")
    unknown = Answer(200, "{}", "w-1", cached_share=0.1, overlap_blocks=1)
    assert "not known" in judge_obeyed([unknown]).what
    assert "overflow" in (judge_obeyed([FINE, BROKEN]).problem or "")


def test_limits_and_headers() -> None:
    assert "early_header_mutation" in (judge_own_header(BROKEN).problem or "")
    assert "raise" in (judge_large(Answer(413, "")).problem or "")
    assert "2 failed" in (judge_streams([BROKEN, FINE, BROKEN]).problem or "")


@pytest.mark.parametrize(
    ("text", "cached"),
    [
        ('{"usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}}', 0.75),
        ('{"usage": {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 3}}}', None),
        ('{"usage": {"prompt_tokens_details": null}}', None),
        ('{"usage": {"prompt_tokens_details": {"cached_tokens": "x"}}}', None),
        ('{"usage": []}', None),
        ("data: {}", None),
        ("", None),
    ],
)
def test_what_answers_tell(text: str, cached: float | None) -> None:
    assert cached_of(text) == cached
    assert overlap_of(text) is None
    assert overlap_of('{"overlap_blocks": 4}') == 4


async def test_an_answer_without_end_is_not_kept() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(bytes(64 << 10))
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", endless)
    async with TestServer(app) as server:
        found = [one async for one in probe(str(server.make_url("/")), "m", None, 0)]
    [finding] = found
    assert "an answer of over 1048576 bytes" in (finding.problem or "")

"""The metrics of several front doors on one page."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.front_door import FakeDispatcher, front_door

from commutator_http.health import merged_pages

LABELS = st.text(st.characters(codec="utf-8"), max_size=8)
COUNTS = st.lists(st.tuples(LABELS, st.integers(0, 10)), max_size=4)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def page(counts: list[tuple[str, int]], *, histogram: bool) -> str:
    registry = CollectorRegistry()
    counter = Counter("requests", "Some {odd} help.", ["model", "code"], registry=registry)
    Counter("plain", "Without labels.", registry=registry).inc(len(counts))
    for label, count in counts:
        counter.labels(label, "200").inc(count)
    if histogram:
        Histogram("seconds", "Times.", registry=registry).observe(len(counts))
    return generate_latest(registry).decode()


def samples(text: str, **more: str) -> Samples:
    return {
        (sample.name, frozenset((sample.labels | more).items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.lists(st.tuples(COUNTS, st.booleans()), min_size=1, max_size=3))
def test_every_sample_of_each_is_there_once_under_one_header(
    given_pages: list[tuple[list[tuple[str, int]], bool]],
) -> None:
    pages = {
        f"frontend-{number}": page(counts, histogram=histogram)
        for number, (counts, histogram) in enumerate(given_pages)
    }
    whole = merged_pages(pages)
    expected: Samples = {}
    for name, one in pages.items():
        expected |= samples(one, frontend=name)
    assert samples(whole) == expected
    headers = [line for line in whole.split("\n") if line.startswith("#")]
    assert len(headers) == len(set(headers))
    names = [line.split()[2] for line in headers if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


async def test_whichever_is_asked_answers_for_all(tmp_path: Path) -> None:
    async def other(request: web.Request) -> web.Response:
        assert request.query_string == "own=1"
        return web.Response(text="# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", other)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "frontend-1.sock")).start()
    (tmp_path / "frontend-2.sock").touch()  # nothing listens there
    mine = str(tmp_path / "frontend-0.sock")
    async with front_door(FakeDispatcher(), replicas=2, local_socket=mine) as door:
        async with door.session.get(f"{door.url}/metrics") as answer:
            whole = samples(await answer.text())
        async with door.session.get(f"{door.url}/metrics?own=1") as answer:
            own = samples(await answer.text())
    await runner.cleanup()
    assert whole["x_total", frozenset({("frontend", "frontend-1")})] == 3.0
    names = {dict(labels).get("frontend") for _, labels in whole}
    assert names == {"frontend-0", "frontend-1"}
    assert all("frontend" not in dict(labels) for _, labels in own)

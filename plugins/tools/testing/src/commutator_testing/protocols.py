"""The conformance suite for protocols: subclass it, define a fixture, run pytest."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from commutator.contract.answer import (
    AnswerEvent,
    AnswerWriter,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Failure,
    Finish,
    FinishKind,
    ReasoningContent,
    Usage,
)
from commutator.contract.protocol import (
    RPC_METHODS,
    DoorFacts,
    Example,
    MountedProtocol,
    Protocol,
    Route,
)
from commutator.errors import CommutatorError
from commutator.frontend import Call, to_failure
from commutator.frontend.limits import TimeLimit, TimeLimits

USAGE = Usage(prompt_tokens=12, completion_tokens=34, cached_tokens=5)
FAILURE = Failure(503, "the worker was lost; try again", "worker_lost")

Recorded = Sequence[tuple[int, AnswerEvent]]
Said = list[dict[str, object]]
"""For each answer: `content`, `reasoning` (texts), `calls` [(name, JSON of the arguments)] and
`finish`, as far as a protocol says them."""

_INTERNAL = 500

RECORDED: dict[str, Recorded] = {
    "text": [
        (0, Content("The capital")),
        (0, Content(' of France is Paris. 日本 "{}" \n')),
        (0, Finish("stop")),
    ],
    "cut": [(0, Content("The cap")), (0, Finish("length"))],
    "nothing": [(0, Finish("stop"))],
    "reasoning": [
        (0, ReasoningContent("Let me think, ")),
        (0, ReasoningContent("carefully.")),
        (0, Content("Yes.")),
        (0, Finish("stop")),
    ],
    "tools": [
        (0, Content("I ask.")),
        (0, CallStart(0, "call_a", "weather")),
        (0, CallArguments(0, '{"city": "Pa')),
        (0, CallArguments(0, 'ris", "days": 3}')),
        (0, CallEnd(0)),
        (0, CallStart(1, "call_b", "time")),
        (0, CallArguments(1, "{}")),
        (0, CallEnd(1)),
        (0, Finish("tool_calls")),
    ],
    "two answers": [
        (0, Content("One")),
        (1, Content("Two")),
        (1, Content(" and a half")),
        (1, Finish("length")),
        (0, Finish("stop")),
    ],
}
"""Events as front doors make them, by what they show."""


def expected(recorded: Recorded, answers: int) -> Said:
    """What the events of a recording say."""
    said: Said = []
    for number in range(answers):
        mine = [event for owner, event in recorded if owner == number]
        calls: dict[int, list[str]] = {}
        for event in mine:
            if isinstance(event, CallStart):
                calls[event.call] = [event.name, ""]
            elif isinstance(event, CallArguments):
                calls[event.call][1] += event.text
        said.append({
            "content": "".join(one.text for one in mine if isinstance(one, Content)),
            "reasoning": "".join(one.text for one in mine if isinstance(one, ReasoningContent)),
            "calls": [tuple(call) for call in calls.values()],
            "finish": next(one.reason for one in mine if isinstance(one, Finish)),
        })  # fmt: skip
    return said


class ProtocolContract:
    """What every protocol must do. A fixture ``protocol`` returns the registered one."""

    documented_in = (
        "AnswerWriter in docs/reference/contract/answer.md and docs/how-to/write-a-protocol.md"
    )

    answers = 2
    """The most answers that one request of the protocol may have."""

    @abstractmethod
    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        """Makes a writer of each kind of answer that the protocol has, for so many answers."""

    @abstractmethod
    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        """What a client understands of a streamed answer, and whether it is complete."""

    @abstractmethod
    def read_whole(self, sent: bytes) -> Said:
        """What a client understands of a whole answer."""

    def can_say(self, writer: AnswerWriter, said: Said) -> Said:
        """``said`` without what this kind of answer has no place for; by default all of it."""
        del writer
        return said

    def test_its_routes_are_complete(self, mounted: MountedProtocol) -> None:
        routes = mounted.routes()
        assert routes
        assert len({(route.method, route.path) for route in routes}) == len(routes)
        for route in routes:
            assert route.method in {"GET", "POST", "DELETE", "WEBSOCKET", *RPC_METHODS}
            assert route.path.startswith("/")

    def test_errors_have_a_body(self, mounted: MountedProtocol) -> None:
        assert "/" in mounted.failed_type
        assert FAILURE.message.encode() in mounted.failed(FAILURE)

    def test_an_example_leads_to_one_of_its_routes(
        self, protocol: Protocol[Any, Any], mounted: MountedProtocol
    ) -> None:
        example = protocol.example("http://door:1", "m")
        assert example.api_url.startswith("http://door:1")
        assert any(_parts_of(route, example) is not None for route in mounted.routes())

    @pytest.mark.asyncio
    async def test_an_example_is_no_mistake_of_its_client(
        self, protocol: Protocol[Any, Any], mounted: MountedProtocol
    ) -> None:
        """Its route reads it, up to where the deployment is asked for an answer."""
        example = protocol.example("http://door:1", "m")
        call = _ExampleCall(example, mounted)
        route = next(
            route
            for route in mounted.routes()
            if _parts_of(route, example) is not None
            and (route.is_mine is None or route.is_mine(call.headers))
        )
        call.parts_of_path = _parts_of(route, example) or {}
        try:
            await route.handle(call)
        except _AnsweringError:
            return
        except (CommutatorError, Failure) as error:
            failure = to_failure(error, call.request_id)
            assert failure.status >= _INTERNAL, f"the example is refused: {failure.message}"

    def test_recorded_streams_are_said_streamed_and_whole(self) -> None:
        for name, recorded in RECORDED.items():
            count = 1 + max(number for number, _ in recorded)
            if count > self.answers:
                continue
            for make in self.writers(count):
                said = self.can_say(make(), expected(recorded, count))
                assert self._streamed(make(), recorded, 1) == said, name
                assert self._streamed(make(), recorded, len(recorded)) == said, name
                assert self._whole(make(), recorded) == said, name

    def test_a_failure_in_the_middle_ends_a_stream(self) -> None:
        for make in self.writers(1):
            writer = make()
            sent = writer.stream(RECORDED["text"][:1]) + writer.stream_failed(FAILURE)
            _, complete = self.read_stream(sent)
            assert not complete
            assert FAILURE.message.encode() in sent

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_streamed_and_whole_answers_are_equal(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.answers))
        recorded = data.draw(_recordings(count))
        size = data.draw(st.integers(1, 5))
        for make in self.writers(count):
            said = self.can_say(make(), expected(recorded, count))
            assert self._streamed(make(), recorded, size) == said
            assert self._whole(make(), recorded) == said

    def _streamed(self, writer: AnswerWriter, recorded: Recorded, size: int) -> Said:
        batches = [recorded[at : at + size] for at in range(0, len(recorded), size)]
        sent = writer.ping  # as a door sends it that has waited
        for batch in batches:
            sent += writer.stream(batch) + writer.ping
        sent += writer.stream_end(USAGE)
        said, complete = self.read_stream(sent)
        assert complete
        return self.can_say(writer, said)

    def _whole(self, writer: AnswerWriter, recorded: Recorded) -> Said:
        for one in recorded:
            writer.keep([one])
        assert writer.kept_bytes >= 0
        return self.can_say(writer, self.read_whole(b"".join(writer.whole(USAGE))))


_PART = re.compile(r"\{(\w+)(?::([^}]+))?\}")


def _parts_of(route: Route, example: Example) -> dict[str, str] | None:
    """What the example's path has for the names in braces; None: the route is another."""
    pattern = _PART.sub(lambda part: f"(?P<{part[1]}>{part[2] or '[^/]+'})", route.path)
    found = re.fullmatch(pattern, example.path) if route.method == "POST" else None
    return None if found is None else found.groupdict()


class _AnsweringError(Exception):
    """The route answers, or asks the deployment for it: the request was read by then."""


class _NoServices:
    """Stands for the services of a front door."""

    def __getattr__(self, name: str) -> Any:
        raise _AnsweringError(name)


class _ExampleCall(Call):
    """An example as it comes to a route. No answer is needed."""

    peer = None
    forwarded = ()
    begun = False

    def __init__(self, example: Example, protocol: MountedProtocol) -> None:
        headers = CIMultiDict({"Content-Type": example.content_type})
        services: Any = _NoServices()
        super().__init__(services, "r", example.path, "POST", example.path, headers)
        self.protocol = protocol
        self.parts_of_path: dict[str, str] = {}
        self._example = example

    @property
    def parts(self) -> Mapping[str, str]:
        return self.parts_of_path

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        given = self._example.content_type
        expected = types or ("application/json",)
        assert given in expected, f"the example is {given}; its route reads {expected}"
        return nullcontext()

    async def read(self) -> bytes:
        self.body = self._example.text.encode()
        return self.body

    def time_limit(self) -> TimeLimit:
        return TimeLimits().of(60.0)

    async def reply(self, parts: list[bytes], content_type: str = "") -> None:
        raise _AnsweringError

    async def begin(self, content_type: str, status: int = 200, **more: Any) -> None:
        raise _AnsweringError

    async def write(self, data: bytes) -> None:
        raise _AnsweringError

    async def end(self, last: bytes = b"") -> None:
        raise _AnsweringError


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def _recordings(draw: st.DrawFn, count: int) -> Recorded:
    """Interleaved answers of text, reasoning and calls."""
    answers: list[list[AnswerEvent]] = []
    for _ in range(count):
        events: list[AnswerEvent] = []
        events += map(ReasoningContent, draw(st.lists(_TEXT, max_size=2)))
        events += map(Content, draw(st.lists(_TEXT, max_size=3)))
        calls = draw(st.integers(0, 2))
        for call in range(calls):
            events.append(CallStart(call, f"call_{call}", draw(st.sampled_from(["f", "g_2"]))))
            text = draw(st.sampled_from(["{}", '{"a": [1, "}"]}', '{"é": "\\n"}']))
            cut = draw(st.integers(0, len(text)))
            events += [CallArguments(call, part) for part in (text[:cut], text[cut:]) if part]
            events.append(CallEnd(call))
        ends: list[FinishKind] = ["tool_calls"] if calls else ["stop", "length"]
        reason = draw(st.sampled_from(ends))
        answers.append([*events, Finish(reason)])
    order = draw(st.permutations([n for n, events in enumerate(answers) for _ in events]))
    return [(number, answers[number].pop(0)) for number in order]


def mounted_on_a_door(
    protocol: Protocol[Any, Any], config: object, services: object
) -> MountedProtocol:
    """``protocol`` as a door without keys mounts it."""
    facts = DoorFacts(needs_key=False, operations=True)
    mounted: MountedProtocol = protocol.mount(config, services, facts)
    return mounted

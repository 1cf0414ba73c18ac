"""KServe's protocol over gRPC: what is asked of workers, the answers, and the errors."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from tests.support.front_door import MODEL, FakeDispatcher, answer
from tests.support.kserve import infer_request, plain, rpc_door, values_of

from commutator_kserve.messages import message


async def test_a_text_is_answered_as_raw_tensors() -> None:
    async with rpc_door() as door:
        said = await door.infer("Hi", request_id="7", max_tokens=12, temperature=0.5, seed=3)
        assert (said.model_name, said.model_version, said.id) == (MODEL, "1", "7")
        assert values_of(said) == {"text_output": ["Hello there!"], "finish_reason": ["stop"]}
        assert not any(one.HasField("contents") for one in said.outputs)
        assert plain(said.parameters)["completion_tokens"] == 4
        sampling = door.http.dispatcher.requests[-1].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (12, 0.5, 3)
        typed = await door.infer("Hi", raw=False)
        assert values_of(typed)["text_output"] == ["Hello there!"]


async def rest_of(stream: Any) -> list[Any]:
    """What is left of a stream, however it ends."""
    found = []
    with suppress(grpc.aio.AioRpcError):
        while (one := await stream.read()) is not grpc.aio.EOF:
            found.append(one)
    return found


async def failure_of(awaited: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaited
    return caught.value


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (infer_request("Hi", temprature=1), "temprature: unknown parameter; did you mean temper"),
        (infer_request("Hi", foo=""), "foo: unknown parameter"),
        (infer_request("Hi", store=True), "store: unknown parameter, but of a chat"),
        (infer_request("Hi", chat=True, store=True), "store: not supported"),
        (infer_request("Hi", chat=True, logprobs=True), "no tensor"),
        (infer_request("Hi", adapter="a"), "name it as the model"),
        (infer_request("Hi", temperature=9.0), "temperature"),
        (infer_request("Hi", sequence_id=4), "sequence_id: unknown parameter"),
        (infer_request("Hi", tools="{"), "tools: expected JSON"),
        (infer_request("Hi", streaming=True), "one answer"),
        (infer_request("Hi", outputs=["logits"]), "unknown output"),
        (infer_request(["a", "b"]), "expected one string"),
        (infer_request("Hi", timeout="soon"), "microseconds"),
    ],
)
async def test_what_is_wrong_or_unknown_is_refused(sent: Any, words: str) -> None:
    async with rpc_door() as door:
        error = await failure_of(door.call("ModelInfer", sent))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (error.details() or "")
        assert not door.http.dispatcher.requests


def changed(change: Any) -> Any:
    made = infer_request("Hi")
    change(made)
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.raw_input_contents.append(b""),
        lambda made: made.inputs[0].shape.append(3),
        lambda made: made.inputs[0].shape.__setitem__(0, -1),
        lambda made: made.raw_input_contents.__setitem__(0, b"\x09\x00\x00\x00Hi"),
        lambda made: made.raw_input_contents.__setitem__(0, b"\x01\x00\x00\x00\xff"),
        lambda made: setattr(made.inputs[0], "datatype", "FP16"),
        lambda made: setattr(made.inputs[0], "name", "text"),
        lambda made: made.inputs[0].contents.bytes_contents.append(b"Hi"),
        lambda made: (
            made.inputs[0]
            .parameters["shared_memory_region"]
            .CopyFrom(message("InferParameter")(string_param="x"))
        ),
        lambda made: made.parameters["seed"].Clear(),
        lambda made: made.inputs.extend([made.inputs[0]] * 5_000),
    ],
)
async def test_tensors_that_contradict_themselves_are_refused(change: Any) -> None:
    async with rpc_door() as door:
        error = await failure_of(door.call("ModelInfer", changed(change)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not door.http.dispatcher.requests


async def test_what_is_not_served_is_not_found() -> None:
    async with rpc_door() as door:
        for sent in (infer_request("Hi", model="x"), infer_request("Hi")):
            sent.model_version = "2"
            error = await failure_of(door.call("ModelInfer", sent))
            assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_strings_that_are_json_become_what_they_say() -> None:
    async with rpc_door() as door:
        await door.infer("Hi", temperature="0.5", stop='["x", "y"]', max_tokens="7", session="s")
        asked = door.http.dispatcher.requests[-1]
        assert (asked.sampling.temperature, asked.sampling.stop) == (0.5, ("x", "y"))
        assert (asked.sampling.max_tokens, asked.session) == (7, "s")
        await door.infer("Hi", stop="[x", schema='{"type": "object"}')
        asked = door.http.dispatcher.requests[-1]
        assert asked.sampling.stop == ("[x",)
        assert asked.constraint is not None
        assert asked.constraint.kind == "json_schema"


async def test_a_chat_is_rendered_and_a_prompt_is_not() -> None:
    async with rpc_door() as door:
        await door.infer("Hi")
        await door.infer("Hi", chat=True)
        plain_prompt, chat = door.http.dispatcher.requests
        assert len(chat.token_ids) > len(plain_prompt.token_ids)
        made = infer_request('[{"role": "user", "content": "Hi"}]')
        made.inputs[0].name = "messages"
        await door.call("ModelInfer", made)
        assert door.http.dispatcher.requests[-1].token_ids == chat.token_ids


async def test_several_answers_and_the_prompt_before_them() -> None:
    async with rpc_door() as door:
        sent = infer_request("Hi ", n=2)
        sent.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
        sent.raw_input_contents.append(b"\0")
        said = values_of(await door.call("ModelInfer", sent))
        assert said["text_output"] == ["Hi Hello there!"] * 2
        assert said["index"] == [0, 1]
        only = await door.infer("Hi", outputs=["finish_reason"])
        assert values_of(only) == {"finish_reason": ["stop"]}


async def test_a_stream_sends_pieces_and_says_which_is_the_last() -> None:
    async with rpc_door() as door:
        stream = door.stream()
        await stream.write(infer_request("Hi", request_id="a", streaming=True))
        await stream.done_writing()
        said = [one.infer_response async for one in stream]
        assert "".join(values_of(one)["text_output"][0] for one in said) == "Hello there!"
        assert len(said) > 2
        finals = [plain(one.parameters)["triton_final_response"] for one in said]
        assert finals == [False] * (len(said) - 1) + [True]
        assert [values_of(one)["finish_reason"] for one in said][-2:] == [[""], ["stop"]]
        assert {one.id for one in said} == {"a"}


async def test_a_stream_of_whole_answers() -> None:
    async with rpc_door() as door:
        stream = door.stream()
        for number in range(5):
            await stream.write(infer_request("Hi", request_id=str(number)))
        await stream.done_writing()
        said = [one.infer_response async for one in stream]
        assert sorted(one.id for one in said) == list("01234")
        assert all(values_of(one)["text_output"] == ["Hello there!"] for one in said)
        assert all(plain(one.parameters)["triton_final_response"] for one in said)


async def test_requests_of_one_stream_run_at_the_same_time() -> None:
    dispatcher = FakeDispatcher(script=answer("one two three four"), delay_s=0.02)
    async with rpc_door(dispatcher) as door:
        stream = door.stream()
        for name in "ab":
            await stream.write(infer_request("Hi", request_id=name, streaming=True))
        await stream.done_writing()
        order = [one.infer_response.id async for one in stream]
        assert order.index("b") < len(order) - 1 - order[::-1].index("a")


async def test_one_request_of_a_stream_is_cancelled_and_the_others_go_on() -> None:
    dispatcher = FakeDispatcher(script=answer("one two three four"), delay_s=0.05)
    async with rpc_door(dispatcher) as door:
        stream = door.stream()
        for name in "ab":
            await stream.write(infer_request("Hi", request_id=name, streaming=True))
        first = await stream.read()
        assert first.infer_response.id
        sent = message("ModelInferRequest")(id="a", model_name=MODEL)
        sent.parameters["cancel"].bool_param = True
        await stream.write(sent)
        await stream.done_writing()
        said = [first, *await rest_of(stream)]
        failed = [one for one in said if one.error_message]
        assert [one.infer_response.id for one in failed] == ["a"]
        assert plain(failed[0].infer_response.parameters)["error_code"] == "cancelled"
        ended = [one.infer_response for one in said if one.infer_response.id == "b"][-1]
        assert values_of(ended)["finish_reason"] == ["stop"]
        assert dispatcher.open == 0


async def test_a_wrong_message_fails_alone() -> None:
    async with rpc_door() as door:
        stream = door.stream()
        await stream.write(infer_request("Hi", request_id="bad", foo=1))
        await stream.write(b"\xff\xff")
        await stream.write(infer_request("Hi", request_id="good"))
        await stream.done_writing()
        said = [one async for one in stream]
        by_id = {one.infer_response.id: one for one in said}
        assert by_id["bad"].error_message.startswith("[request id: bad] foo: unknown")
        assert "cannot be read" in by_id[""].error_message
        assert not by_id["good"].error_message
        assert await stream.code() is grpc.StatusCode.OK


async def test_when_a_stream_ends_so_do_its_requests() -> None:
    dispatcher = FakeDispatcher(script=answer("one two three four"), delay_s=0.2)
    async with rpc_door(dispatcher) as door:
        stream = door.stream()
        for name in "abc":
            await stream.write(infer_request("Hi", request_id=name, streaming=True))
        await stream.read()
        assert dispatcher.open == 3
        stream.cancel()
        async with asyncio.timeout(2):
            while dispatcher.open:
                await asyncio.sleep(0.01)


async def test_a_call_that_is_cancelled_frees_its_worker() -> None:
    dispatcher = FakeDispatcher(delay_s=0.2)
    async with rpc_door(dispatcher) as door:
        call = door.unary("ModelInfer")(infer_request("Hi"))
        async with asyncio.timeout(2):
            while not dispatcher.open:
                await asyncio.sleep(0.01)
            call.cancel()
            while dispatcher.open:
                await asyncio.sleep(0.01)


async def test_deadlines_are_the_clients_or_the_parameters() -> None:
    async with rpc_door(FakeDispatcher(delay_s=0.3)) as door:
        for awaited in (
            door.infer("Hi", timeout=50_000),
            door.call("ModelInfer", infer_request("Hi"), timeout=0.05),
        ):
            error = await failure_of(awaited)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert values_of(await door.infer("Hi", timeout=60_000_000))["finish_reason"] == ["stop"]


async def test_what_is_said_of_server_and_models() -> None:
    async with rpc_door() as door:
        assert (await door.call("ServerLive")).live
        assert (await door.call("ServerReady")).ready
        assert "binary_tensor_data" in (await door.call("ServerMetadata")).extensions
        named = {"name": MODEL}
        assert (await door.call("ModelReady", message("ModelReadyRequest")(**named))).ready
        said = await door.call("ModelMetadata", message("ModelMetadataRequest")(**named))
        assert [one.name for one in said.outputs] == ["text_output", "finish_reason"]
        said = await door.call("ModelConfig", message("ModelConfigRequest")(**named))
        assert said.config.model_transaction_policy.decoupled
        assert said.config.input[0].data_type == 13
        said = await door.call("RepositoryIndex")
        assert [(one.name, one.state) for one in said.models] == [(MODEL, "READY")]
        error = await failure_of(door.call("ModelReady", message("ModelReadyRequest")(name="x")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        door.http.dispatcher.is_ready = False
        assert not (await door.call("ServerReady")).ready

"""KServe's protocol over HTTP: /v2, Triton's generate, binary tensors; embeddings in both forms."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.front_door import MODEL, FakeDispatcher, engine_info
from tests.support.kserve import RpcDoor, infer_request, plain, rpc_door, values_of
from tests.support.tiny_encoders import write_tokenizer
from tests.unit.frontend.test_pooling_endpoints import answer as pooled
from tests.unit.kserve.test_rpc import failure_of

from commutator.tokenizer import load_text_model

INFER, GENERATE = f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/generate"
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}


async def post(door: RpcDoor, path: str, body: Any) -> tuple[int, Any]:
    async with door.http.session.post(door.http.url + path, json=body) as said:
        return said.status, json.loads(await said.read())


async def get(door: RpcDoor, path: str) -> tuple[int, Any]:
    async with door.http.session.get(door.http.url + path) as said:
        return said.status, json.loads(await said.read())


async def test_infer_as_json() -> None:
    async with rpc_door() as door:
        asked = {"id": "7", "inputs": [TEXT], "parameters": {"temperature": 0, "stop": ["x"]}}
        for path in (INFER, f"/v2/models/{MODEL}/versions/1/infer"):
            status, said = await post(door, path, asked)
            assert status == 200
            assert (said["id"], said["model_name"], said["model_version"]) == ("7", MODEL, "1")
            assert said["outputs"][0] == {
                "name": "text_output",
                "datatype": "BYTES",
                "shape": [1],
                "data": ["Hello there!"],
            }
            assert said["parameters"]["completion_tokens"] == 4
        sampling = door.http.dispatcher.requests[-1].sampling
        assert (sampling.temperature, sampling.stop) == (0.0, ("x",))


async def test_infer_with_binary_tensors() -> None:
    async with rpc_door() as door:
        raw = struct.pack("<I", 2) + b"Hi"
        sent = {
            "inputs": [
                {
                    "name": "text_input",
                    "datatype": "BYTES",
                    "shape": [1],
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "outputs": [
                {"name": "text_output", "parameters": {"binary_data": True}},
                {"name": "finish_reason"},
            ],
        }
        head = json.dumps(sent).encode()
        headers = {
            "Inference-Header-Content-Length": str(len(head)),
            "Content-Type": "application/octet-stream",
        }
        url = door.http.url + INFER
        async with door.http.session.post(url, data=head + raw, headers=headers) as said:
            body = await said.read()
            assert said.status == 200, body
            size = int(said.headers["Inference-Header-Content-Length"])
        outputs = json.loads(body[:size])["outputs"]
        assert outputs[0]["parameters"] == {"binary_data_size": len(body) - size}
        assert body[size + 4 :] == b"Hello there!"
        assert outputs[1]["data"] == ["stop"]
        headers["Inference-Header-Content-Length"] = "9999"
        async with door.http.session.post(url, data=head + raw, headers=headers) as said:
            assert said.status == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": [TEXT], "parameters": {"foo": 1}}, "foo: unknown parameter"),
        ({"inputs": [TEXT], "foo": 1}, "foo: unknown key"),
        ({"inputs": [{**TEXT, "data": [1]}]}, "expected BYTES"),
        ({"inputs": [{**TEXT, "shape": [2]}]}, "2 values"),
        ({"inputs": [{**TEXT, "shape": "x"}]}, "shape"),
        ({"inputs": [TEXT, TEXT]}, "twice"),
        ({"inputs": []}, "expected one of"),
        ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 4}}]}, "binary data"),
        ({"inputs": [TEXT], "outputs": [{"name": "x"}]}, "unknown output"),
        ([], "object"),
    ],
)
async def test_what_is_wrong_is_refused_as_the_protocol_says(body: Any, words: str) -> None:
    async with rpc_door() as door:
        status, said = await post(door, INFER, body)
        assert status == 400
        assert words in said["error"]
        assert not door.http.dispatcher.requests


async def test_generate_whole_and_streamed() -> None:
    async with rpc_door() as door:
        asked = {"text_input": "Hi", "max_tokens": 20, "parameters": {"temperature": 0}, "id": "7"}
        status, said = await post(door, GENERATE, asked)
        assert (status, said["text_output"], said["finish_reason"]) == (200, "Hello there!", "stop")
        assert said["id"] == "7"
        url = f"{door.http.url}{GENERATE}_stream"
        async with door.http.session.post(url, json=asked) as streamed:
            assert streamed.headers["Content-Type"].startswith("text/event-stream")
            blocks = (await streamed.read()).decode().split("\n\n")[:-1]
        events = [json.loads(one.removeprefix("data: ")) for one in blocks]
        assert "".join(one["text_output"] for one in events) == "Hello there!"
        assert [one["finish_reason"] for one in events][-1] == "stop"
        for wrong in (
            {},
            {"text_input": 1},
            {"text_input": "Hi", "foo": 1},
            {**asked, "temperature": 1},
        ):
            assert (await post(door, GENERATE, wrong))[0] == 400
        assert (await post(door, GENERATE, {**asked, "stream": True}))[0] == 400
        chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
        _, said = await post(door, GENERATE, chat)
        assert said["text_output"] == ["Hello there!"] * 2


async def test_what_is_said_of_server_and_models() -> None:
    async with rpc_door() as door:
        assert (await get(door, "/v2"))[1]["name"] == "commutator"
        assert await get(door, "/v2/health/live") == (200, {"live": True})
        assert (await get(door, "/v2/health/ready"))[0] == 200
        assert (await get(door, f"/v2/models/{MODEL}/ready"))[0] == 200
        assert (await get(door, f"/v2/models/{MODEL}/versions/1"))[1]["versions"] == ["1"]
        assert (await get(door, f"/v2/models/{MODEL}/config"))[1]["max_batch_size"] == 0
        assert (await get(door, f"/v2/models/{MODEL}/infer"))[0] == 405
        assert (await get(door, "/v2/models/x"))[0] == 404
        assert (await get(door, f"/v2/models/{MODEL}/versions/2"))[0] == 404
        assert (await post(door, f"/v2/models/{MODEL}/x", {}))[0] == 404
        _, listed = await post(door, "/v2/repository/index", {})
        assert listed[0]["name"] == MODEL
        page = door.http.services.metrics.render().decode()
        assert "/v2/models/{model}/config" in page
        assert MODEL + "/config" not in page
        door.http.dispatcher.is_ready = False
        assert (await get(door, "/v2/health/ready"))[0] == 503


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 12}')
    return load_text_model(folder)


async def test_embeddings_are_one_tensor_in_every_form(words: Any) -> None:
    dispatcher = FakeDispatcher(script=pooled, workers=[engine_info(operations=("embed",))])
    async with rpc_door(dispatcher, {MODEL: words}) as door:
        said = await door.call("ModelInfer", infer_request(["w1 w2", "w3"], dimensions=8))
        assert list(said.outputs[0].shape) == [2, 8]
        vectors = values_of(said)["embedding"]
        assert vectors[1:3] == [1.0, 1.0]
        assert vectors[8 + 3] == 1.0
        assert plain(said.parameters)["prompt_tokens"] > 0
        two = {**TEXT, "shape": [2], "data": ["w1 w2", "w3"]}
        status, over_http = await post(
            door, INFER, {"inputs": [two], "parameters": {"dimensions": 8}}
        )
        assert status == 200
        assert over_http["outputs"][0]["data"] == vectors
        stream = door.stream()
        await stream.write(infer_request("w1", request_id="7"))
        await stream.done_writing()
        (streamed,) = [one.infer_response async for one in stream]
        assert (streamed.id, list(streamed.outputs[0].shape)) == ("7", [1, 55])
        assert plain(streamed.parameters)["triton_final_response"] is True
        ids = infer_request("w1")
        ids.inputs[0].name, ids.inputs[0].datatype = "input_ids", "INT64"
        ids.inputs[0].shape[:] = [1, 2]
        ids.raw_input_contents[0] = struct.pack("<2q", 6, 7)
        assert values_of(await door.call("ModelInfer", ids))["embedding"][1:3] == [1.0, 1.0]
        for wrong in (
            infer_request("w1", max_tokens=3),
            infer_request("w1", streaming=True),
            infer_request("w1", outputs=["text_output"]),
            infer_request(" ".join(["w1"] * 40)),
            infer_request(""),
            infer_request("w1", encoding_format="base64"),
            infer_request("w1", chat=True),
            infer_request("w1", chat=False),
        ):
            assert (
                await failure_of(door.call("ModelInfer", wrong))
            ).code().name == "INVALID_ARGUMENT"
        cut = infer_request(" ".join(["w1"] * 40), truncate_prompt_tokens=-1)
        await door.call("ModelInfer", cut)
        assert (await post(door, GENERATE, {"text_input": "w1"}))[0] == 400
        _, said = await get(door, f"/v2/models/{MODEL}")
        assert said["outputs"][0]["name"] == "embedding"

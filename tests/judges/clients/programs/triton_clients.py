"""Triton's clients at a server of KServe's protocol: each thing is true, or why it is not.

URL is "HOST:PORT" of gRPC, HTTP_URL that of HTTP, if there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as sync
from tritonclient import http
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

URL, HTTP_URL, MODEL = os.environ["URL"], os.environ.get("HTTP_URL"), "m"
client = sync.InferenceServerClient(URL)


def tensors(kind: Any, text: str = "Hi", streaming: bool | None = None) -> list[Any]:
    made = [kind.InferInput("text_input", [1], "BYTES")]
    made[0].set_data_from_numpy(np.array([text.encode()], dtype=object))
    if streaming is not None:
        made.append(kind.InferInput("streaming", [1], "BOOL"))
        made[1].set_data_from_numpy(np.array([streaming]))
    return made


def text_of(result: Any) -> str:
    """Also where the client itself cannot read what the server sent."""
    try:
        return result.as_numpy("text_output")[0].decode()
    except ValueError:
        return result.get_response().outputs[0].contents.bytes_contents[0].decode()


def answers_are_arrays() -> bool:
    result = client.infer(MODEL, tensors(sync))
    return result.as_numpy("text_output").shape == (1,)


def health() -> bool:
    return client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)


def server_metadata() -> bool:
    return bool(client.get_server_metadata().name)


def model_metadata() -> bool:
    return client.get_model_metadata(MODEL).outputs[0].name == "text_output"


def model_config() -> bool:
    return client.get_model_config(MODEL).config.name == MODEL


def repository_index() -> bool:
    return [one.name for one in client.get_model_repository_index().models] == [MODEL]


def infer() -> bool:
    result = client.infer(MODEL, tensors(sync), request_id="7", parameters={"max_tokens": 8})
    return bool(text_of(result)) and result.get_response().id == "7"


def parameters_have_an_effect() -> bool:
    lengths = [
        len(text_of(client.infer(MODEL, tensors(sync), parameters={"max_tokens": count})))
        for count in (2, 6)
    ]
    return lengths[0] < lengths[1]


def unknown_parameters_are_refused() -> bool:
    try:
        client.infer(MODEL, tensors(sync), parameters={"max_tokenz": 3})
    except InferenceServerException as error:
        return error.status() == "StatusCode.INVALID_ARGUMENT"
    return False


def streams_at_the_same_time() -> bool:
    said, order, finals = queue.Queue(), [], set()
    client.start_stream(lambda result, error: said.put((result, error)))
    for number in range(4):
        options = {"request_id": str(number), "parameters": {"max_tokens": 8}}
        client.async_stream_infer(MODEL, tensors(sync, streaming=True), **options)
    while len(finals) < 4:
        result, error = said.get(timeout=10)
        if error is not None:
            raise error
        response = result.get_response()
        order.append(response.id)
        final = response.parameters["triton_final_response"].bool_param
        if final or response.outputs[-1].contents.bytes_contents[-1:] == [b"stop"]:
            finals.add(response.id)
    client.stop_stream()
    return order.index("3") < len(order) - 1 - order[::-1].index("0")


def streams_name_their_last_message() -> bool:
    said = queue.Queue()
    client.start_stream(lambda result, error: said.put(result))
    client.async_stream_infer(
        MODEL, tensors(sync, streaming=True), request_id="7", parameters={"max_tokens": 3}
    )
    while True:
        response = said.get(timeout=3).get_response()
        if response.parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return response.id == "7"


async def infer_aio() -> bool:
    async with aio.InferenceServerClient(URL) as other:
        result = await other.infer(MODEL, tensors(aio), parameters={"max_tokens": 8})
        return bool(text_of(result))


async def stream_aio() -> bool:
    async with aio.InferenceServerClient(URL) as other:

        async def asked() -> Any:
            yield {
                "model_name": MODEL,
                "inputs": tensors(aio, streaming=True),
                "parameters": {"max_tokens": 4},
            }

        text = ""
        async for result, error in other.stream_infer(asked()):
            if error is not None:
                raise error
            text += text_of(result)
        return bool(text)


def infer_http() -> bool:
    other = http.InferenceServerClient(HTTP_URL)
    assert other.is_model_ready(MODEL)
    result = other.infer(MODEL, tensors(http), request_id="7", parameters={"max_tokens": 8})
    return bool(text_of(result)) and result.get_response()["id"] == "7"


def of(what: Any) -> Any:
    try:
        found = what()
        return asyncio.run(found) if asyncio.iscoroutine(found) else found
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


ALL = [
    *(health, server_metadata, model_metadata, model_config, repository_index, infer),
    answers_are_arrays,
    *(parameters_have_an_effect, unknown_parameters_are_refused, infer_aio, stream_aio),
    *(streams_at_the_same_time, streams_name_their_last_message),
]
if HTTP_URL:
    ALL.append(infer_http)
print(json.dumps({one.__name__: of(one) for one in ALL}), flush=True)
os._exit(0)

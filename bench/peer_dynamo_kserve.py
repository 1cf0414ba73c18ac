"""Dynamo's KServe server over an engine in its own process that says one word after another.

Runs in Dynamo's environment: ``python peer_dynamo_kserve.py PORT MODEL WORDS``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import KserveGrpcService, PythonAsyncEngine
from dynamo.runtime import DistributedRuntime


async def main() -> None:
    port, model, words = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    async def answer(_: Any) -> AsyncIterator[dict[str, Any]]:
        for number in range(words):
            choice = {
                "index": 0,
                "text": "Hi",
                "finish_reason": "stop" if number == words - 1 else None,
                "logprobs": None,
            }
            said = {"id": "c", "object": "text_completion", "created": 0, "model": model}
            yield {**said, "choices": [choice]}

    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp")
    service = KserveGrpcService(port=port, host="127.0.0.1")
    service.add_completions_model(model, "1", PythonAsyncEngine(answer, loop))
    print("ready", flush=True)
    await service.run(runtime)


asyncio.run(main())

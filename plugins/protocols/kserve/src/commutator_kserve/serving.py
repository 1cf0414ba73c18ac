"""Serves one inference request, whatever form it came in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from commutator import Operation
from commutator.contract.answer import AnswerWriter
from commutator.errors import RequestError
from commutator.frontend import Call, Plan, TimeLimit, answer
from commutator_kserve.asking import asked_embeddings, asked_generation, operation_of, timeout_s
from commutator_kserve.inference import Inference
from commutator_kserve.writers import Form, embedding_outputs
from commutator_openai.pooling import pool

MakeForm = Callable[[Inference, str], Form]
MakeWriter = Callable[[Plan], AnswerWriter]


async def serve(
    call: Call,
    inference: Inference,
    limit: TimeLimit,
    form: MakeForm | None,
    writer: Callable[[Plan, Inference], AnswerWriter],
    *,
    streams: bool | None,
) -> None:
    """Generate, or embed in the form that ``form`` makes; None: only generate.

    ``streams``: whether the answer comes in pieces; None leaves it to the client. Raises
    RequestError, what dispatching raises.
    """
    name, operation = operation_of(call, inference)
    given_s = timeout_s(inference)
    own = nullcontext() if given_s is None else call.services.time_limits.of(given_s)
    async with own:
        if operation == Operation.EMBED:
            if form is None:
                text = f"model: {name} generates nothing; ask it by infer"
                raise RequestError(text, "model", "unsupported_endpoint")
            await embed(call, inference, limit, form)
            return
        asking = await call.off_loop(len(call.body), lambda: asked_generation(call, inference))
        if asking.is_stream and streams is False:
            raise RequestError(
                "stream: this call has one answer; use ModelStreamInfer, or generate_stream "
                "over REST",
                "stream",
            )
        if streams:
            asking.generate.stream = True
        await answer(call, asking.generate, lambda plan: writer(plan, inference), limit)


async def embed(call: Call, inference: Inference, limit: TimeLimit, form: MakeForm) -> None:
    """Answer with the vectors of the inputs."""
    asked = await call.off_loop(len(call.body), lambda: asked_embeddings(inference))
    found = await pool(call, asked, limit)
    outputs = embedding_outputs(inference, found.rows)
    made = form(inference, found.model)
    said = made.parameters(
        {"prompt_tokens": found.prompt_tokens}, call.answer_headers, final=made.in_stream
    )
    data = await call.off_loop(found.size_bytes, lambda: made.written(outputs, said))
    call.answer_headers |= made.headers
    await call.reply([data], made.content_type)

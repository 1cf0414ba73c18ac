"""The async client."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from commutator_client import requests
from commutator_client.config import ClientConfig
from commutator_client.errors import ApiError
from commutator_client.requests import DEFAULT, Progress
from commutator_client.results import Classification, Conversation, Embeddings, Ranked
from commutator_client.tools import Tool, Turns

if TYPE_CHECKING:
    import httpx2
    import openai


Message = Mapping[str, Any]


class AsyncPieces(AsyncIterator[dict[str, Any]]):
    """A streamed answer: chunks of a chat, or events of a response, as the server sent them.

    Iterate to the end, or close it (``async with``), which ends the generation. Raises
    ClientConnectionError where the answer breaks off: what came until then is not sent again.
    """

    def __init__(
        self, stream: openai.AsyncStream[Any], config: ClientConfig, attempts: int
    ) -> None:
        self._stream = stream
        self._config = config
        self._progress = Progress(attempts)

    async def __anext__(self) -> dict[str, Any]:
        from commutator_client.transport import translated

        try:
            with translated(self._config, begun=True):
                piece: dict[str, Any] = await anext(self._stream)
            self._progress.saw(piece)
        except StopAsyncIteration:
            await self.aclose()
            self._progress.end()
            raise
        except BaseException:
            await self.aclose()
            raise
        return piece

    async def aclose(self) -> None:
        """Close the connection; more than once does no harm."""
        await self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Opened:
    """The connections of a client and its sessions, made by the first request."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._openai: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def openai(self) -> openai.AsyncOpenAI:
        """Connections belong to an event loop: another one gets others."""
        from commutator_client.transport import async_openai

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None  # of another library than asyncio, or no loop yet
        if self._openai is None or self._loop is not loop:
            self._openai, self._loop = async_openai(self._config), loop
        return self._openai

    async def close(self) -> None:
        opened, self._openai = self._openai, None
        if opened is not None:
            await opened.close()


class AsyncClient:
    """A client of a deployment. It may be used with or without ``async with``.

    All requests raise ClientError: see ``commutator_client.errors``. Answers are dictionaries as
    the server sent them, where nothing else is said.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        """None: ``ClientConfig()``."""
        self.config = config or ClientConfig()
        self._opened = _Opened(self.config)
        self._headers: dict[str, str] = {}

    @property
    def openai(self) -> openai.AsyncOpenAI:
        """OpenAI's client of the same deployment, connections, retries and session.

        For everything that has no method here, and for typed answers. It raises OpenAI's errors.
        """
        client = self._opened.openai()
        return client.with_options(default_headers=self._headers) if self._headers else client

    def session(self, session_id: str | None = None) -> AsyncClient:
        """A client whose requests belong to one session, over the same connections.

        Policies such as `session_affinity` send them to one worker, which has their KV blocks.
        None: a new one.
        """
        client = AsyncClient(self.config)
        client._opened = self._opened
        client._headers = {"x-session-id": session_id or uuid.uuid4().hex}
        return client

    async def close(self) -> None:
        """Close the connections, those of sessions as well. Another request opens new ones."""
        await self._opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = DEFAULT,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> dict[str, Any]: ...
    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = DEFAULT,
        max_tokens: int | None = None,
        temperature: float | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncPieces: ...
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = DEFAULT,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> dict[str, Any] | AsyncPieces:
        """POST /v1/chat/completions; ``stream``: its chunks. ``options`` are further fields."""
        body = requests.chat_body(messages, max_tokens, temperature, stream, options)
        return await self._answer("chat/completions", body, model)

    @overload
    async def respond(
        self,
        given: str | Sequence[Message],
        model: str = DEFAULT,
        stream: Literal[False] = False,
        **options: Any,
    ) -> dict[str, Any]: ...
    @overload
    async def respond(
        self,
        given: str | Sequence[Message],
        model: str = DEFAULT,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncPieces: ...
    async def respond(
        self,
        given: str | Sequence[Message],
        model: str = DEFAULT,
        stream: bool = False,
        **options: Any,
    ) -> dict[str, Any] | AsyncPieces:
        """POST /v1/responses; ``stream``: its events. ``options`` are further fields."""
        return await self._answer(
            "responses", requests.response_body(given, stream, options), model
        )

    async def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., Any] | Tool],
        model: str = DEFAULT,
        max_turns: int = 8,
        **options: Any,
    ) -> Conversation:
        """Chat, call the functions that the model wants called, until it calls none.

        Functions may be async. What they raise is raised here. Raises ClientError after
        ``max_turns`` completions with calls.
        """
        turns = Turns(messages, tools)
        definitions = turns.definitions()
        for _ in range(max_turns):
            answer = await self.chat_completion(turns.messages, model, tools=definitions, **options)
            calls = turns.answered(answer)
            if not calls:
                return Conversation(answer, turns.messages)
            for call in calls:
                result = turns.call(call)()
                turns.returned(call, await result if inspect.isawaitable(result) else result)
        raise turns.too_many(max_turns)

    async def embed(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        model: str = DEFAULT,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        """The vectors of texts, or of lists of token ids, however many.

        ``dimensions`` cuts vectors of models that were trained for it; ``truncate`` cuts texts that
        are too long, which are refused otherwise.
        """
        vectors: list[list[float]] = []
        tokens = truncated = 0
        for body in requests.embedding_bodies(texts, dimensions, truncate):
            response = await self._posted("embeddings", body, model)
            answer = response.json()
            vectors += requests.vectors(answer)
            tokens += answer["usage"]["prompt_tokens"]
            truncated += requests.truncated(response.headers)
        return Embeddings(vectors, tokens, truncated)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        model: str = DEFAULT,
        top_n: int | None = None,
    ) -> list[Ranked]:
        """Documents by how well they answer ``query``, best first; needs the protocol `pooling`."""
        body = requests.rerank_body(query, documents, top_n)
        response = await self._posted("rerank", body, model)
        return requests.ranking(response.json(), documents)

    async def score(
        self, text: str | Sequence[str], others: Sequence[str], model: str = DEFAULT
    ) -> list[float]:
        """How well each other text fits ``text``, or the text at its place; needs `pooling`."""
        body = requests.score_body(text, others)
        return requests.scores((await self._posted("score", body, model)).json())

    async def classify(self, texts: Sequence[str], model: str = DEFAULT) -> list[Classification]:
        """The class of each text; needs the protocol `pooling`."""
        response = await self._posted(
            f"{self.config.root_url}/classify", {"input": [*texts]}, model
        )
        return requests.classifications(response.json())

    async def list_models(self) -> list[dict[str, Any]]:
        """GET /v1/models."""
        models: list[dict[str, Any]] = (await self._got("models")).json()["data"]
        return models

    async def health_check(self) -> dict[str, Any]:
        """GET /health, or /ready where the key has no right to it; with a `status` in both cases.

        `ready`, `degraded` (some model has no worker) or `draining`. Asked once, without retries.
        Raises ClientConnectionError where nothing answers.
        """
        root = self.config.root_url
        try:
            found: dict[str, Any] = (await self._got(f"{root}/health")).json()
        except ApiError as error:
            if error.status not in requests.NO_HEALTH:
                raise
        else:
            return found
        try:
            await self._got(f"{root}/ready")
        except ApiError as error:
            return requests.unready(error)
        return {"status": "ready"}

    async def _answer(
        self, path: str, body: Mapping[str, Any], model: str
    ) -> dict[str, Any] | AsyncPieces:
        if not body["stream"]:
            answer: dict[str, Any] = (await self._posted(path, body, model)).json()
            return answer
        import openai

        from commutator_client.transport import attempts_of, translated

        with translated(self.config):
            stream = await self._opened.openai().post(
                path,
                cast_to=object,
                body=requests.with_model(body, model, self.config.model),
                options={"headers": self._headers},
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        return AsyncPieces(stream, self.config, attempts_of(stream.response.request))

    async def _posted(self, path: str, body: Mapping[str, Any], model: str) -> httpx2.Response:
        import httpx2

        from commutator_client.transport import translated, until_whole

        with translated(self.config):
            return await self._opened.openai().post(
                path,
                cast_to=httpx2.Response,
                body=requests.with_model(body, model, self.config.model),
                options={"timeout": until_whole(self.config), "headers": self._headers},
            )

    async def _got(self, path: str) -> httpx2.Response:
        import httpx2

        from commutator_client.transport import translated

        with translated(self.config):
            return await self._opened.openai().get(
                path, cast_to=httpx2.Response, options={"headers": self._headers}
            )

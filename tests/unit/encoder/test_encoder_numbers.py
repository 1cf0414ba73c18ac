"""The encoder's numbers are those of transformers, whatever else is in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiny_encoders import VOCAB_SIZE, write_encoder

from commutator import EngineClient, GenerateRequest, ModelConfig, Pooling, SamplingParams
from commutator.engine import TokenApiClient
from commutator.errors import ConfigError, EngineOverloadedError, RequestError
from commutator_encoder.config import EncoderConfig
from commutator_encoder.engine import EncoderEngine
from commutator_encoder.facts import read_facts
from commutator_encoder.model import load_encoder
from commutator_engine_kit import EngineStart, TokenApiServer

CONFIG = EncoderConfig(kind="encoder", device="cpu", threads=1)
WITHIN = 1e-5

Encoders = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """Gives a tiny model of transformers, and where it is."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(family: str = "bert", **options: Any) -> tuple[Any, Path]:
        key = f"{family}{sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (write_encoder(folder, family, **options), folder)
        return made[key]

    return make


def engine_of(path: Path, config: EncoderConfig = CONFIG) -> EncoderEngine:
    return EncoderEngine.of(config, EngineStart(ModelConfig(name="m", source=str(path)), "w-0"))


@asynccontextmanager
async def client_of(path: Path, config: EncoderConfig = CONFIG) -> AsyncIterator[EngineClient]:
    server = TokenApiServer(engine_of(path, config))
    client = TokenApiClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    await client.start()
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


def request_of(
    inputs: list[list[int]], operation: str = "embed", key: str = "a", **values: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=key,
        token_ids=[token for one in inputs for token in one],
        sampling=SamplingParams(),
        pooling=Pooling(operation=operation, lengths=tuple(map(len, inputs)), **values),
    )


async def rows(client: EngineClient, request: GenerateRequest) -> np.ndarray:
    (delta,) = [delta async for delta in client.generate(request)]
    assert request.pooling is not None
    count = len(request.pooling.lengths)
    if request.pooling.operation == "token_embed":
        count = len(request.token_ids)
    return np.frombuffer(delta.vectors, dtype="<f4").reshape(count, -1)


def states(model: Any, ids: list[int], first: int | None = None) -> torch.Tensor:
    """The last layer, of one input alone."""
    types = [0] * len(ids) if first is None else [0] * first + [1] * (len(ids) - first)
    known = {"token_type_ids": torch.tensor([types])} if model.config.model_type == "bert" else {}
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids]), **known).last_hidden_state[0]
    return found


def pipeline(model: Any, ids: list[int]) -> np.ndarray:
    mean = states(model, ids).mean(0)
    return torch.nn.functional.normalize(mean, dim=0).numpy()


inputs = st.lists(
    st.lists(st.integers(5, VOCAB_SIZE - 1), min_size=1, max_size=60), min_size=1, max_size=12
)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_equal_to_transformers_for_every_batch(encoders: Encoders, family: str) -> None:
    model, path = encoders(family)
    encoder = load_encoder(path, read_facts(path), device=torch.device("cpu"), dtype=torch.float32)

    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
    @given(inputs)
    def equal(batch: list[list[int]]) -> None:
        found = encoder(batch, [len(one) for one in batch])
        expected = torch.cat([states(model, one) for one in batch])
        assert (found - expected).abs().max() < WITHIN * max(1, float(expected.abs().max()))

    equal()


def test_a_short_text_alone_is_computed_by_one_thread(encoders: Encoders) -> None:
    _, path = encoders("bert")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        encoder = load_encoder(
            path, read_facts(path), device=torch.device("cpu"), dtype=torch.float32
        )
        used = []
        for lengths in ([8], [8] * 16, [8]):
            encoder([[1] * length for length in lengths], lengths)
            used.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert used == [1, 3, 1]


@pytest.mark.parametrize("most_tokens", [1, 64, 4096])
async def test_vectors_do_not_depend_on_what_is_computed_beside(
    encoders: Encoders, most_tokens: int
) -> None:
    model, path = encoders()
    texts = [
        [5 + (number * 7 + at) % 50 for at in range(1 + number * 5 % 60)] for number in range(24)
    ]
    config = evolve(CONFIG, max_tokens_per_batch=most_tokens)
    async with client_of(path, config) as client:
        requests = [request_of(texts[at : at + 5], key=str(at)) for at in range(0, 24, 5)]
        found = np.concatenate(await asyncio.gather(*(rows(client, one) for one in requests)))
    for row, ids in zip(found, texts, strict=True):
        assert np.abs(row - pipeline(model, ids)).max() < WITHIN


@pytest.mark.parametrize("pooling", ["cls_token", "max_tokens", "mean_sqrt_len_tokens"])
async def test_other_poolings(encoders: Encoders, pooling: str) -> None:
    model, path = encoders(pooling=pooling, normalized=False)
    texts = [[7, 8, 9, 10], [11, 12]]
    async with client_of(path) as client:
        found = await rows(client, request_of(texts))
    for row, ids in zip(found, texts, strict=True):
        each = states(model, ids)
        expected = {
            "cls_token": each[0],
            "max_tokens": each.max(0).values,
            "mean_sqrt_len_tokens": each.sum(0) / len(ids) ** 0.5,
        }[pooling]
        assert np.abs(row - expected.numpy()).max() < WITHIN


async def test_vectors_of_tokens_and_without_normalization(encoders: Encoders) -> None:
    model, path = encoders()
    texts = [[7, 8, 9, 10], [11, 12]]
    async with client_of(path) as client:
        each = await rows(client, request_of(texts, "token_embed", activation=False))
        raw = await rows(client, request_of(texts, activation=False))
        unit = await rows(client, request_of(texts, "token_embed"))
    expected = torch.cat([states(model, ids) for ids in texts]).numpy()
    assert np.abs(each - expected).max() < WITHIN
    assert np.abs(np.linalg.norm(unit, axis=1) - 1).max() < WITHIN
    assert np.abs(raw[0] - expected[:4].mean(0)).max() < WITHIN


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("labels", [1, 3])
async def test_pairs_and_classes(encoders: Encoders, family: str, labels: int) -> None:
    model, path = encoders(family, labels=labels)
    pairs = [([2, 7, 8, 3], [9, 3]), ([2, 11, 3], [12, 13, 14, 3])]
    operation = "score" if labels == 1 else "classify"
    firsts = tuple(len(a) for a, _ in pairs) if family == "bert" else ()  # it has types
    asked = request_of([a + b for a, b in pairs], operation, firsts=firsts)
    async with client_of(path) as client:
        info = await client.start()
        found = await rows(client, asked)
        assert asked.pooling is not None
        raw = await rows(client, evolve(asked, pooling=evolve(asked.pooling, activation=False)))
    assert len(info.labels) == labels
    for row, logits, (a, b) in zip(found, raw, pairs, strict=True):
        known = {"token_type_ids": torch.tensor([[0] * len(a) + [1] * len(b)])}
        with torch.inference_mode():
            expected = model(torch.tensor([a + b]), **(known if family == "bert" else {})).logits[0]
        assert np.abs(logits - expected.numpy()).max() < WITHIN
        squashed = torch.sigmoid(expected) if labels == 1 else torch.softmax(expected, 0)
        assert np.abs(row - squashed.numpy()).max() < WITHIN


async def test_shorter_vectors_only_of_models_trained_for_it(encoders: Encoders) -> None:
    model, path = encoders()
    async with client_of(path) as client:
        with pytest.raises(RequestError, match="dimensions: vectors of this model have 24"):
            await rows(client, request_of([[5, 6]], dimensions=8))
    async with client_of(path, evolve(CONFIG, matryoshka_dimensions=(8, 16))) as client:
        (short,) = await rows(client, request_of([[5, 6]], dimensions=8))
        with pytest.raises(RequestError, match="have 8 or 16 or 24 numbers, got 9"):
            await rows(client, request_of([[5, 6]], dimensions=9))
    cut = pipeline(model, [5, 6])[:8]
    assert np.abs(short - cut / np.linalg.norm(cut)).max() < WITHIN


async def test_what_cannot_be_computed_is_refused(encoders: Encoders) -> None:
    _, path = encoders()
    async with client_of(path) as client:
        assert (await client.start()).max_model_len == 66
        for wrong, text in [
            (request_of([[5] * 67]), "67 tokens are more than the 66"),
            (request_of([[VOCAB_SIZE]]), "token id 60 is out of vocabulary"),
            (request_of([[5], []]), "at least one token"),
            (request_of([[5]], "score"), "encoder does not score: it can embed, token_embed"),
            (evolve(request_of([[5]]), pooling=None), "encoder does not generate"),
        ]:
            with pytest.raises(RequestError, match=text):
                await rows(client, wrong)
        assert (await rows(client, request_of([[5]]))).shape == (1, 24)


async def test_a_full_worker_says_so_and_aborted_requests_free_it(encoders: Encoders) -> None:
    _, path = encoders()
    engine = engine_of(path, evolve(CONFIG, max_queued_requests=2))
    emitted: list[int] = []
    for key in (1, 2):  # it has not been started, so they wait
        engine.submit(key, request_of([[5, 6]], key=str(key)))
    with pytest.raises(EngineOverloadedError, match="2 requests waiting"):
        engine.submit(3, request_of([[5]], key="3"))
    assert engine.load().waiting == 2
    engine.abort(1)
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def emit(deltas: Any) -> None:
        emitted.extend(key for key, _ in deltas)
        loop.call_soon_threadsafe(done.set)

    engine.start(emit)
    await asyncio.wait_for(done.wait(), 60)
    engine.stop()
    assert emitted == [2]
    assert (engine.load().running, engine.load().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("config.json", {"model_type": "llama"}, "model_type 'llama' is not supported"),
        ("config.json", {"hidden_act": "silu"}, "hidden_act: expected one of"),
        ("config.json", {"is_decoder": True}, "a decoder is no encoder"),
        ("config.json", {"matryoshka_dimensions": [999]}, "999 is more than the 24"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "expected one of mean, cls"),
    ],
)
def test_models_that_would_have_other_vectors_are_refused(
    tmp_path: Path, file: str, change: dict[str, Any], problem: str
) -> None:
    import json

    write_encoder(tmp_path, "bert")
    described = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**described, **change}))
    with pytest.raises(ConfigError, match=problem):
        read_facts(tmp_path)


def test_modules_and_weights_that_are_not_known(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    facts = read_facts(tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "2", "type": "x.models.Dense"}]')
    with pytest.raises(ConfigError, match="a module Dense is not supported"):
        read_facts(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="save the weights as safetensors"):
        load_encoder(tmp_path, facts, device=torch.device("cpu"), dtype=torch.float32)

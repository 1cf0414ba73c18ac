"""LoRA adapters in the reference engine: PEFT's logits, together with others, and never mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.lora_adapters import ADAPTERS, expected_logits, make_adapter, make_base
from tests.support.reference_integrity import check_engine
from tests.support.reference_options import sized

from commutator import AdapterIdentity
from commutator.contract.block import BlockStored, KvEvent
from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import EngineError, EngineOverloadedError, RequestError
from commutator_engine_kit.model_identity import adapter_digest
from commutator_reference.arena import KVArena
from commutator_reference.engine import ReferenceEngine
from commutator_reference.lora import Adapters, LoraAdapter, load_adapter
from commutator_reference.model import LlamaModel, build_batch, load_model
from commutator_reference.scheduler import Chunk

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT

PROMPTS = [[(7 * i * i + 3 * n) % 90 + 5 for i in range(n)] for n in (1, 2, 7, 17, 33)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the model ("base") and of its adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_base(folder / "base")
    adapters = {
        name: make_adapter(base, folder / name, options, seed)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    return {"base": base, **adapters}


@pytest.fixture(scope="module")
def model(made: dict[str, Path]) -> LlamaModel:
    return load_model(made["base"])


def loader(model: LlamaModel, max_rank: int = 64) -> Any:
    return partial(
        load_adapter,
        model=model.config,
        max_rank=max_rank,
        device=model.device,
        dtype=model.dtype,
    )


def identity(name: str, folder: Path) -> AdapterIdentity:
    return AdapterIdentity(name=name, digest=adapter_digest(folder), source=str(folder))


def engine_of(model: LlamaModel, places: int = 4, **more: Any) -> ReferenceEngine:
    options = sized(num_blocks=128, block_size=4, max_tokens_per_step=24)
    return ReferenceEngine(model, *options, adapters=Adapters(loader(model), places), **more)


def request(
    prompt: Sequence[int], adapter: AdapterIdentity | None, max_tokens: int = 8
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling, adapter=adapter)


def finish(engine: ReferenceEngine) -> dict[int, list[TokenDelta]]:
    said: dict[int, list[TokenDelta]] = {}
    for _ in range(1000):
        load = engine.load()
        if not load.running + load.waiting:
            return said
        for key, delta in engine.step():
            said.setdefault(key, []).append(delta)
        check_engine(engine)
    raise AssertionError("the engine does not finish")


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def greedy(made: dict[str, Path], name: str | None, prompt: Sequence[int], count: int) -> list[int]:
    said = list(prompt)
    for _ in range(count):
        folder = None if name is None else made[name]
        said.append(int(expected_logits(made["base"], folder, [said]).argmax()))
    return said[len(prompt) :]


def test_logits_of_a_mixed_batch_are_those_of_peft(
    made: dict[str, Path], model: LlamaModel
) -> None:
    """Every prompt with every adapter and without, in one batch; some are one token long."""
    load = loader(model)
    loaded: dict[str | None, LoraAdapter | None] = {None: None}
    loaded |= {name: load(identity(name, made[name])) for name in ADAPTERS}
    uses = [(name, prompt) for prompt in PROMPTS for name in loaded]
    arena = KVArena(model.config, len(uses), 40, device=model.device, dtype=model.dtype)
    chunks = [
        Chunk(key, tuple(prompt), 0, (key,), samples=True, adapter=loaded[name])
        for key, (name, prompt) in enumerate(uses)
    ]
    batch = build_batch(chunks, arena, model.dtype)
    logits = dict(zip(batch.sample_keys, model.forward(batch, arena), strict=True))
    plain = expected_logits(made["base"], None, PROMPTS)
    for name in loaded:
        folder = None if name is None else made[name]
        expected = expected_logits(made["base"], folder, PROMPTS)
        ours = torch.stack([logits[key] for key, (used, _) in enumerate(uses) if used == name])
        assert (ours - expected).abs().max() < 1e-4
        assert name is None or (expected - plain).abs().max() > 0.5, "it changes something"


def test_answers_beside_others_are_those_of_peft(made: dict[str, Path], model: LlamaModel) -> None:
    """Prefill in pieces, decodes of several adapters in one step, and equal prompts."""
    engine = engine_of(model)
    uses = [(name, prompt) for prompt in PROMPTS[-2:] for name in (None, *ADAPTERS)]
    for key, (name, prompt) in enumerate(uses):
        adapter = None if name is None else identity(name, made[name])
        engine.submit(key, request(prompt, adapter))
    said = finish(engine)
    for key, (name, prompt) in enumerate(uses):
        assert tokens(said[key]) == greedy(made, name, prompt, 8), (name, len(prompt))


def test_adapters_never_share_blocks(made: dict[str, Path], model: LlamaModel) -> None:
    stored: list[BlockStored] = []

    def note(events: Sequence[KvEvent]) -> None:
        stored.extend(event for event in events if isinstance(event, BlockStored))

    engine = engine_of(model, on_kv_events=note)
    prompt = PROMPTS[-1]
    hits: dict[str, list[int | None]] = {}
    for turn in range(2):
        for number, name in enumerate(ADAPTERS):
            engine.submit(10 * turn + number, request(prompt, identity(name, made[name])))
            (deltas,) = finish(engine).values()
            hits.setdefault(name, []).append(deltas[0].cached_tokens)
    assert all(each == [0, 32] for each in hits.values()), hits
    by = {event.adapter: {*event.block_hashes} for event in stored}
    assert set(by) == {adapter_digest(made[name]) for name in ADAPTERS}
    assert len(set.union(*by.values())) == sum(map(len, by.values()))


def test_one_that_is_idle_gives_its_place(made: dict[str, Path], model: LlamaModel) -> None:
    engine = engine_of(model, places=1)
    engine.submit(1, request(PROMPTS[3], identity("all", made["all"])))
    with pytest.raises(EngineOverloadedError, match="adapter_places"):
        engine.submit(2, request(PROMPTS[3], identity("stable", made["stable"])))
    engine.submit(3, request(PROMPTS[2], identity("all", made["all"])))
    first = finish(engine)
    engine.submit(4, request(PROMPTS[3], identity("stable", made["stable"])))
    engine.abort(4)
    engine.submit(5, request(PROMPTS[3], identity("all", made["all"])))
    assert tokens(finish(engine)[5]) == tokens(first[1])


def test_no_other_content_is_ever_served(
    made: dict[str, Path], model: LlamaModel, tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(made["all"], folder)
    asked = identity("changing", folder)
    shutil.copy(made["stable"] / "adapter_config.json", folder)
    shutil.copy(made["stable"] / "adapter_model.safetensors", folder)
    engine = engine_of(model)
    with pytest.raises(EngineError, match="have changed"):
        engine.submit(1, request(PROMPTS[3], asked))
    engine.submit(1, request(PROMPTS[3], identity("changing", folder)))
    assert tokens(finish(engine)[1]) == greedy(made, "stable", PROMPTS[3], 8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 65}, "max_adapter_rank"),
        ({"r": "4"}, "'4'"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    made: dict[str, Path], model: LlamaModel, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    shutil.copytree(made["all"], tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(RequestError, match=why):
        engine_of(model).submit(1, request(PROMPTS[1], identity("a", tmp_path / "a")))


def test_an_adapter_of_another_model_is_refused(
    made: dict[str, Path], model: LlamaModel, tmp_path: Path
) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_layers": 2}, "layers.2"),
        ({"hidden_size": 32}, "another model"),
    ]
    for change, why in changes:
        with pytest.raises(RequestError, match=why):
            load_adapter(
                identity("all", made["all"]),
                evolve(model.config, **change),
                max_rank=64,
                device=model.device,
                dtype=model.dtype,
            )
    shutil.copy(made["all"] / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors"):
        loader(model)(identity("a", tmp_path))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef"))), max_size=30),
    st.integers(1, 4),
)
def test_what_is_used_stays(steps: list[tuple[str, set[str]]], places: int) -> None:
    """One that no request uses leaves, the one that was needed longest ago first."""
    loads: list[str] = []

    def load(asked: AdapterIdentity) -> LoraAdapter:
        loads.append(asked.digest)
        return LoraAdapter(asked.digest, ())

    adapters = Adapters(load, places)
    known: list[str] = []  # the one needed last stands last
    for letter, some in steps:
        used = some & {*known}
        asked = AdapterIdentity(name=letter, digest=letter * 64, source="/nowhere")
        digest = asked.digest
        used_digests = {one * 64 for one in used}
        if letter in known:
            known.remove(letter)
            known.append(letter)
            assert adapters.get(asked, lambda: used_digests).digest == digest  # noqa: B023
            continue
        leaves = next((one for one in known if one not in used), None)
        if len(known) == places and leaves is None:
            with pytest.raises(EngineOverloadedError):
                adapters.get(asked, lambda: used_digests)  # noqa: B023
            continue
        if len(known) == places:
            assert leaves is not None
            known.remove(leaves)
        before = len(loads)
        assert adapters.get(asked, lambda: used_digests).digest == digest  # noqa: B023
        assert loads[before:] == [digest]
        known.append(letter)
    assert [adapters.has(letter * 64) for letter in "abcdef"] == [one in known for one in "abcdef"]

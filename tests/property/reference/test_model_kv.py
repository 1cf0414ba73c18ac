"""What config.json says of a model's KV is what engines allocate; what it does not say is said."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.grouped_models import FAMILIES, VOCABULARY, grouped_model, oracle

from commutator_engine_kit.kv import KvKind
from commutator_engine_kit.model_kv import ModelKv, model_lines, read_model_kv
from commutator_models.families import Family, families
from commutator_reference.families import decoder_config
from commutator_reference.pages import PageArena, plan_pages
from commutator_reference.scheduler import Chunk

EVERY = pytest.mark.parametrize("family", FAMILIES)
KNOWN = list(families())


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Of one of the families that `reference` computes, of any size."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    size = st.integers(1, 40)
    raw = dict(oracle(family).config.to_dict())
    raw["num_hidden_layers"] = draw(st.integers(1, 12))
    raw.pop("layer_types", None)
    raw.pop("no_rope_layers", None)
    raw["num_key_value_heads"] = draw(size)
    raw["head_dim"] = 2 * draw(size)
    for name in ("sliding_window", "attention_chunk_size", "kv_lora_rank", "qk_rope_head_dim"):
        if raw.get(name):
            raw[name] = draw(size)
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"):
        if raw.get(name):
            raw[name] = draw(size)
    if raw.get("linear_value_head_dim"):
        raw["full_attention_interval"] = 4
        raw["linear_value_head_dim"] = draw(size)
        raw["linear_conv_kernel_dim"] = draw(st.integers(2, 5))
    return raw


@settings(max_examples=150, deadline=None)
@given(
    configurations(), st.integers(1, 64), st.sampled_from([(torch.float32, 4), (torch.bfloat16, 2)])
)
def test_sizes_are_those_that_the_engine_allocates(
    raw: dict[str, Any], block_size: int, number: tuple[torch.dtype, int]
) -> None:
    dtype, number_bytes = number
    model = read_model_kv(raw)
    assert not model.unknown
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        layers = decoder_config(Path(folder)).layers
    plan = plan_pages(layers, block_size, number_bytes)
    arena = PageArena(plan, 3, device=torch.device("cpu"), dtype=dtype)
    assert arena.tensor.nbytes == 3 * plan.page_bytes
    used: dict[KvKind, int] = {}
    for at, layer in enumerate(layers):  # the views that the forward pass computes in
        state = layer.kind is KvKind.RECURRENT
        view = arena.layer(
            at,
            layer.numbers if state else (plan.block_size, layer.count),
            torch.float32 if state else dtype,
        )
        used[layer.kind] = used.get(layer.kind, 0) + view[0].numel() * view.element_size()
    told = {
        each.kind: (
            each.state_bytes(4, 4)
            if each.kind is KvKind.RECURRENT
            else (each.token_bytes(number_bytes) or 0) * plan.block_size
        )
        for each in model.layers
    }
    assert told == used
    assert {(each.kind, each.window or 0) for each in model.layers} == {
        (group.kind, group.window) for group in plan.groups
    }
    whole = sum(group.block_bytes for group in plan.groups if group.keeps_prefix)
    prefix = model.prefix_token_bytes(number_bytes)
    assert prefix is not None
    assert prefix * plan.block_size <= whole


@EVERY
def test_sizes_are_those_of_the_memory_that_a_forward_pass_touches(family: str) -> None:
    model = grouped_model(family)
    arena = model.arena(64, 8)
    said = read_model_kv(oracle(family).config.to_dict())
    count = len(arena.groups)
    tables = [(3 * number, 3 * number + 1, 3 * number + 2) for number in range(count)]
    length = arena.block_size
    ids = tuple(5 + at % (VOCABULARY - 5) for at in range(length))
    chunk = Chunk(0, ids, 0, tables[0], samples=True, others=tuple(tables[1:]))
    model.forward(model.batch([chunk], arena), arena)
    touched = (arena.tensor.view(torch.float32) != 0).sum().item() * 4
    tokens = sum((each.token_bytes(4) or 0) for each in said.layers) * length
    states = said.state_bytes(4, 4)
    assert states is not None
    wanted = float(tokens + states)
    # A few numbers of what is kept may be 0, as of a convolution that has seen nothing.
    assert 0.98 * wanted <= touched <= wanted


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4", "qwen3_next", "mixtral"])
def test_sizes_are_those_of_the_cache_that_transformers_fills(family: str) -> None:
    made, length = oracle(family), 8
    with torch.no_grad():
        cache = made(torch.arange(5, 5 + length)[None], use_cache=True).past_key_values
    numbers, states = 0, 0
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            numbers += layer.keys.numel() + layer.values.numel()
        else:
            # It keeps one input of the convolution more than are still read.
            conv = layer.conv_states
            conv = next(iter(conv.values())) if isinstance(conv, dict) else conv
            state = layer.recurrent_states
            state = next(iter(state.values())) if isinstance(state, dict) else state
            states += conv[..., 1:].numel() + state.numel()
    said = read_model_kv(made.config.to_dict())
    assert sum((each.token_bytes(1) or 0) for each in said.layers) * length == numbers
    assert said.state_bytes(1, 1) == states


def sums(model: ModelKv) -> tuple[Any, ...]:
    return (
        model.prefix_token_bytes(2),
        model.window_bytes(2),
        model.state_bytes(2, 4),
        model.request_bytes(100, 2, 4),
    )


def test_the_table_has_forty_families_and_says_of_which_it_knows_all() -> None:
    assert len(KNOWN) >= 40
    unknown = {family.title for family in KNOWN if family.model.unknown}
    assert unknown == {"DeepSeek V4", "GLM 4.5, 4.6", "MiniMax M3"}
    for family in KNOWN:
        model = family.model
        crosses = KvKind.CROSS in model.kinds  # which keeps what depends on the picture
        assert (None in sums(model)[:3]) == bool(model.unknown)
        assert (None in sums(model)) == bool(model.unknown or crosses)
        assert any("not known" in line for line in model_lines(model, 2, 2)) == bool(model.unknown)


@pytest.mark.parametrize("family", KNOWN, ids=lambda family: family.title)
def test_words_that_are_not_known_are_said_and_give_no_size(family: Family) -> None:
    raw = dict(family.config)
    for changed in (
        {"layer_types": ["full_attention", "telepathic_attention"]},
        {**raw, "ring_window_size": 64},
        {**raw, "mamba_of_another_kind": 7},
        {key: value for key, value in raw.items() if not key.endswith(("head_dim", "size", "dim"))},
    ):
        told = read_model_kv({"model_type": "new", **changed})
        if told.model_type == "new" or told != family.model:
            assert told.unknown, changed
            assert sums(told) == (None, None, None, None)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({key for family in KNOWN for key in family.config})),
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_configuration_is_read_or_refused(raw: dict[str, Any]) -> None:
    model = read_model_kv(raw)
    list(model_lines(model, 2, 4))
    if not model.layers:
        assert model.unknown


@pytest.mark.slow
def test_the_table_is_what_transformers_has() -> None:
    import transformers

    from commutator_models.collect import collected

    version = transformers.__version__
    if f"transformers {version}," not in KNOWN[0].source:
        pytest.skip(f"the table is of another version than {version}")
    told = [{"title": one.title, "source": one.source, "config": one.config} for one in KNOWN]
    assert told == collected()

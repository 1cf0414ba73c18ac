"""The cache identity, the worker names, and the settings that are refused at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commutator.contract.block import CacheIdentity
from commutator_sglang.hicache_settings import cache_identity, problems, worker_of

OPTIONS = {
    "backend_name": "commutator",
    "module_path": "commutator_sglang.hicache",
    "class_name": "CommutatorHiCache",
    "interface_v1": 1,
    "tiers": "cluster.yaml",
    "worker": "sglang-0",
}


def storage(**facts: Any) -> SimpleNamespace:
    """SGLang's HiCacheStorageConfig."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0}
    ranks |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    return SimpleNamespace(**{**ranks, "is_mla_model": False, "extra_config": OPTIONS, **facts})


class Parts:
    """A server's arguments, model, ranks and memory, each of which can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_files = self.directory("model", b"weights")
        self.args: dict[str, Any] = {
            "model_path": self.model_files,
            "revision": None,
            "tokenizer_path": self.model_files,
            "load_format": "auto",
            "random_seed": 1,
            "kv_cache_dtype": "auto",
            "quantization_param_path": None,
            "lora_paths": None,
            "speculative_draft_model_path": None,
            "speculative_draft_model_revision": None,
        }
        self.config: dict[str, Any] = {"layers": 2, "_name_or_path": "anything"}
        self.model: dict[str, Any] = {"quantization": None, "dtype": "float32"}
        self.pool: dict[str, Any] = {
            "start_layer": 0,
            "end_layer": 2,
            "layout": "page_first",
            "storage_format_tag": None,
            "dtype": "float32",
            "page_size": 16,
        }
        self.storage = storage()
        self.pieces = [1024, 1024]
        self.version = "0.5.23"

    def directory(self, name: str, weights: bytes) -> str:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(weights)
        return str(path)

    def adapter(self, weights: bytes) -> list[SimpleNamespace]:
        return [SimpleNamespace(lora_id="a", lora_path=self.directory("adapter", weights))]

    @property
    def identity(self) -> CacheIdentity:
        config = dict(self.config)
        return cache_identity(
            SimpleNamespace(**self.args),
            SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config), **self.model),
            self.storage,
            SimpleNamespace(**self.pool),
            pieces=self.pieces,
            version=self.version,
        )


def test_equal_servers_share_their_pages_wherever_the_model_lies(tmp_path: Path) -> None:
    one = Parts(tmp_path)
    digest = one.identity.digest
    assert Parts(tmp_path).identity.digest == digest
    moved = one.directory("moved", b"weights")
    one.args |= {"model_path": moved, "tokenizer_path": moved, "random_seed": 2}
    one.config["_name_or_path"] = moved
    assert one.identity.digest == digest


def test_whatever_changes_a_pages_bytes_changes_its_key(tmp_path: Path) -> None:
    digests = [Parts(tmp_path).identity.digest]

    def changed(what: str, **values: Any) -> None:
        parts = Parts(tmp_path)
        getattr(parts, what).update(values)
        digests.append(parts.identity.digest)

    parts = Parts(tmp_path)
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    changed("args", model_path=parts.directory("other", b"weightS"))
    changed("args", tokenizer_path="elsewhere")
    changed("args", load_format="dummy")
    changed("args", load_format="dummy", random_seed=2)
    changed("args", kv_cache_dtype="fp8_e5m2")
    changed("args", quantization_param_path=str(scales))
    changed("args", lora_paths=parts.adapter(b"adapter"))
    changed("args", lora_paths=parts.adapter(b"trained on"))
    changed("args", speculative_draft_model_path=parts.directory("draft", b"draft"))
    changed("config", layers=3)
    changed("model", quantization="fp8")
    changed("model", dtype="bfloat16")
    changed("pool", layout="page_first_direct")
    changed("pool", start_layer=1, end_layer=3)
    changed("pool", page_size=32)
    changed("pool", storage_format_tag="packed")
    for ranks in ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2}):
        parts = Parts(tmp_path)
        parts.storage = storage(**ranks)
        digests.append(parts.identity.digest)
    parts = Parts(tmp_path)
    parts.pieces = [2048]
    digests.append(parts.identity.digest)
    parts = Parts(tmp_path)
    parts.version = "0.5.24"
    digests.append(parts.identity.digest)
    assert len(set(digests)) == len(digests) == 22


def test_each_process_has_tiers_of_its_own() -> None:
    places = [
        worker_of("w", storage(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, dp_rank=dp), replica)
        for tp in (0, 1)
        for pp in (0, 1)
        for dp in (0, 1)
        for replica in (None, 0, 1)
    ]
    assert len(set(places)) == len(places)
    assert worker_of("w", storage(), None) == "w"
    assert worker_of("w", storage(tp_rank=1, tp_size=2), 3) == "w-dp3-tp1"


def test_what_is_known_and_complete_is_taken() -> None:
    also = {**OPTIONS, "file_storage_path": "elsewhere"}
    assert problems(storage(extra_config=also), "cache") == []
    assert problems(storage(tp_size=4), "cache") == []
    assert problems(storage(is_mla_model=True), "cache") == []


@pytest.mark.parametrize(
    ("facts", "mode", "says"),
    [
        ({"extra_config": {**OPTIONS, "teirs": 1}}, "cache", "unknown option teirs"),
        ({"extra_config": {**OPTIONS, "tiers": None}}, "cache", "tiers is missing"),
        ({"extra_config": {**OPTIONS, "worker": ""}}, "cache", "worker is missing"),
        ({"extra_config": {**OPTIONS, "interface_v1": 0}}, "cache", "interface_v1 must be 1"),
        ({}, "buffer_only", "must be cache"),
        ({"is_mla_model": True, "tp_size": 2}, "cache", "only the first rank stores"),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(
    facts: dict[str, Any], mode: str, says: str
) -> None:
    (problem,) = problems(storage(**facts), mode)
    assert says in problem


def test_all_mistakes_are_reported_at_once() -> None:
    assert len(problems(storage(extra_config=None), "buffer_only")) == 4

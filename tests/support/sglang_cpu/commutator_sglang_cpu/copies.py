"""SGLang's copies of KV between device and host memory, in PyTorch: here both are host memory.

Names and parameters are those by which ``mem_cache/pool_host/mha.py`` calls them. "lf" is a layout
with one tensor a layer, "pf" one with all layers of a token (or page) together.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = [
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_pf_lf",
]


def transfer_kv_direct(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Layer by layer; ``page_size`` makes no difference to tokens copied one by one."""
    del page_size
    for src, dst in zip(src_layers, dst_layers, strict=False):
        dst[dst_indices.long()] = src[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer out of tensors of [page, layer, slot, ...]."""
    page, slot = src_indices.long() // page_size, src_indices.long() % page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=False):
        dst[dst_indices.long()] = src[page, layer_id, slot]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers' K, then all layers' V, into tensors of [page, layer, slot, ...]."""
    page, slot = dst_indices.long() // page_size, dst_indices.long() % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, src in enumerate(src_ptrs):
        dst_ptrs[number // layers][page, number % layers, slot] = src[src_indices.long()]


def transfer_kv_per_layer(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    **_: Any,
) -> None:
    """One layer, both sides with a tensor a layer."""
    del item_size
    transfer_kv_direct([src_k, src_v], [dst_k, dst_v], src_indices, dst_indices, 1)


def transfer_kv_per_layer_pf_lf(
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer out of tensors of [token, layer, ...]."""
    del item_size, src_layout_dim
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices.long()] = src[src_indices.long(), layer_id]


def transfer_kv_all_layer(
    src_k_layers: Any,
    dst_k_layers: Any,
    src_v_layers: Any,
    dst_v_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers; ``*_layers`` are tensors of the layers' addresses."""
    del num_layers
    taken, put = _rows(src_indices), _rows(dst_indices)
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            _memory(target, put, item_size)[put] = _memory(source, taken, item_size)[taken]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, by address, into tensors of [token, layer, ...]."""
    del num_layers
    taken, put = _rows(src_indices), _rows(dst_indices)
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        tokens = _memory(target.data_ptr(), put, dst_layout_dim)
        for layer, source in enumerate(sources.tolist()):
            columns = slice(layer * item_size, (layer + 1) * item_size)
            tokens[put, columns] = _memory(source, taken, item_size)[taken]


def _rows(indices: Any) -> Any:
    return indices.long().cpu().numpy()


def _memory(address: int, rows: Any, row_bytes: int) -> Any:
    """The memory at ``address`` as rows, as far as the last one that is used."""
    count = int(rows.max()) + 1 if rows.size else 0
    raw = (ctypes.c_uint8 * (count * row_bytes)).from_address(address)
    return np.frombuffer(raw, dtype=np.uint8).reshape(count, row_bytes)

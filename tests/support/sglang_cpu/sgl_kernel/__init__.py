"""The kernels that SGLang imports by name on a CPU, in PyTorch; see the README beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

__version__ = "0.0.0+commutator"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Note for each request where its new tokens' KV is."""
    del pool_len
    for request, start, end, new in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[request, start:end] = out_cache_loc[new].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """The reverse: look up where those tokens' KV is."""
    del pool_len
    for request, start, end, new in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[new] = req_to_token[request, start:end].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    seq_lens: Any,
    out_cache_loc: Any,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The same for the tokens that follow each sequence."""
    del pool_len
    ends = seq_lens + topk * num_steps
    for request, start, end, new in _spans(req_pool_indices, seq_lens, ends):
        out_cache_loc[new] = req_to_token[request, start:end].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """Copy rows within each layer's buffer, which is given by its address."""
    import numpy as np

    source, target = src_loc.cpu().numpy(), tgt_loc.cpu().numpy()
    if not source.size:
        return
    count = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (count * stride)).from_address(address)
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(count, stride)
        rows[target] = rows[source]


def _spans(requests: Any, starts: Any, ends: Any) -> Iterator[tuple[int, int, int, slice]]:
    """Each request's tokens, and their place among all new ones."""
    begun = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield request, start, end, slice(begun, begun + end - start)
        begun += end - start


def _of_speculative_decoding(name: str) -> Callable[..., None]:
    def kernel(*_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name}: speculative decoding needs SGLang's own kernels, which this "
            "machine without an accelerator does not have; start the server without it"
        )

    return kernel


build_tree_kernel_efficient_cpu = _of_speculative_decoding("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = _of_speculative_decoding("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _of_speculative_decoding("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _of_speculative_decoding("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _of_speculative_decoding("verify_tree_greedy_cpu")

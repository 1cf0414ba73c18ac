"""A matrix multiplication by fixed weights, as fast as the machine offers it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Linear"]


class Linear:
    """``x @ weight.T`` for one weight [out, in].

    On CPUs float32 weights are kept in oneDNN's blocked order, as PyTorch's own compiler does: for
    the handful of rows that decoding has, it is twice as fast as the plain order.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight  # noqa: SLF001

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self._packed:
            result: Tensor = _packed_linear(x, self._weight, None, "none", [], "")
            return result
        return linear(x, self._weight)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed_linear(*arguments: object) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(*arguments)  # noqa: SLF001
    return result

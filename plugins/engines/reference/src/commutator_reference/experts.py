"""MLPs: dense ones, and mixtures of experts of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import silu

from commutator_reference.weights import Linear

Mlp = Callable[[Tensor], Tensor]
"""[tokens, hidden] to the same shape."""

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The chosen experts of each token and their weights, both [tokens, chosen]."""


@frozen(eq=False)
class Gated:
    """down(activation(gate) * up), gate and up made by one projection."""

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor] = silu

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


@frozen(eq=False, kw_only=True)
class Experts:
    """The sum of chosen experts' outputs by weight, and of an expert for every token."""

    router: Router
    experts: Sequence[Mlp]
    shared: Mlp | None = None
    weighs_input: bool = False
    """Whether weights multiply what experts get, as in Llama 4, rather than what they give."""

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = self.router(x)
        total = torch.zeros_like(x) if self.shared is None else self.shared(x)
        if len(x) == 1:  # to look for rows would take longer than the experts
            for number, own in zip(chosen[0].tolist(), weights[0].to(x.dtype), strict=True):
                expert = self.experts[number]
                total += expert(x * own) if self.weighs_input else expert(x) * own
            return total
        for number in chosen.unique().tolist():
            rows, column = torch.where(chosen == number)
            weight = weights[rows, column, None].to(x.dtype)
            if self.weighs_input:
                part = self.experts[number](x[rows] * weight)
            else:
                part = self.experts[number](x[rows]) * weight
            total.index_add_(0, rows, part)
        return total

"""The gated delta rule: linear attention whose state decays and corrects itself with each token.

A head's state S [key size, value size] follows, for a token with key k, value v, decay a (at most
1) and strength b:  S <- a S;  u = b (v - S'k);  S <- S + k u';  its answer to a query q is S'q.
(Yang et al., Gated Delta Networks, 2024.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 64
"""Tokens that are computed together."""


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of several sequences; returns answers and new states.

    ``query``, ``key`` [sequences, heads, key size], ``value`` [sequences, heads, value size],
    ``log_decay``, ``strength`` [sequences, heads], ``state`` [sequences, heads, key, value size].
    """
    state = state * log_decay.exp()[..., None, None]
    known = torch.einsum("shkv,shk->shv", state, key)
    update = (value - known) * strength[..., None]
    state = state + key[..., None] * update[..., None, :]
    return torch.einsum("shkv,shk->shv", state, query), state


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one sequence, as ``delta_step``, with tokens in place of sequences.

    ``state`` [heads, key size, value size]. In a chunk, with G the sum of log decays up to a token,
    the updates u solve a triangular system:
    u_t = b_t (v_t - exp(G_t) S'k_t - sum over i < t of exp(G_t - G_i) (k_i . k_t) u_i).
    """
    answers = []
    for first in range(0, len(query), _CHUNK):
        some = slice(first, first + _CHUNK)
        q, k, v = (each[some].transpose(0, 1) for each in (query, key, value))
        b = strength[some].T[..., None]
        total = log_decay[some].T.cumsum(-1)
        grown = total.exp()[..., None]
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        system = (b * (k @ k.transpose(1, 2)) * between).tril(-1)
        system = system + torch.eye(system.shape[-1], device=system.device)
        update = torch.linalg.solve_triangular(
            system, b * (v - grown * (k @ state)), upper=False, unitriangular=True
        )
        answer = grown * (q @ state) + ((q @ k.transpose(1, 2)) * between) @ update
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * grown[:, -1:] + (k * left).transpose(1, 2) @ update
        answers.append(answer.transpose(0, 1))
    return torch.cat(answers), state

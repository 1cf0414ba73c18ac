"""The options of an `encoder` engine entry."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from commutator import EngineConfig, NonNegativeInt, PositiveInt, setting


@frozen(kw_only=True)
class EncoderConfig(EngineConfig):
    """Workers that turn texts into vectors, scores or classes."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "Where the model runs; auto: a GPU if there is one, else the CPU.", "auto"
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "Number format of weights and activations. In bfloat16, vectors agree with those of "
        "float32 to two decimal places.",
        "float32",
    )
    threads: PositiveInt | None = setting(
        "CPU threads of one worker; by default the cores shared among the replicas.", None
    )
    max_tokens_per_batch: PositiveInt | None = setting(
        "Tokens computed together, at least one input; by default 2,048 on a CPU, 32,768 on a GPU.",
        None,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait in the worker; one more is answered as overload.", 1024
    )
    matryoshka_dimensions: tuple[PositiveInt, ...] = setting(
        "Lengths that vectors may be cut to, for a model that was trained for it and does not say "
        "so in its config.json.",
        (),
    )

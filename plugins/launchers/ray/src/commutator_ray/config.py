"""The options of the launcher `ray`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from attrs import Attribute, frozen

from commutator import Bounds, NonNegativeInt, setting
from commutator.contract.launcher import AgentLauncherConfig


def _reaches_a_node(_: object, _field: Attribute[Any], value: str) -> None:
    if "://" in value:
        raise ValueError(
            f"address: {value!r} is one of Ray Client, which would be lost with its server; run "
            "`commutator serve` on a node of the Ray cluster, with auto or HOST:PORT"
        )


@frozen(kw_only=True)
class Resources:
    """What one worker reserves on a node; one over several nodes, on each of them."""

    cpus: Annotated[float, Bounds(minimum=0)] = setting("CPUs.", 1.0)
    gpus: NonNegativeInt = setting(
        "GPUs of a node: as many as the engine's tensor-parallel size, divided by its `nodes`. The "
        "worker sees only these (CUDA_VISIBLE_DEVICES).",
        0,
    )
    custom: Mapping[str, float] = setting(
        "Ray's custom resources, such as {ssd: 1}, as nodes offer them by `ray start --resources`.",
        {},
    )

    def bundle(self) -> dict[str, float]:
        """The bundle of a placement group. Never empty, as Ray refuses that."""
        found = {"CPU": self.cpus, "GPU": float(self.gpus), **self.custom}
        return {name: amount for name, amount in found.items() if amount} or {"CPU": 0.001}

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())


@frozen(kw_only=True)
class RayConfig(AgentLauncherConfig):
    """Workers on the nodes of a Ray cluster, each in a detached actor of its own."""

    places_groups: ClassVar[bool] = True

    address: str = setting(
        "The Ray cluster: HOST:PORT of its head, or `auto` for the one that this machine is a node "
        "of.",
        "auto",
        validator=_reaches_a_node,
    )
    lifetime: Literal["detached", "job"] = setting(
        "detached: workers outlive `commutator serve`, and the next one finds them. job: they end "
        "with the `commutator serve` that placed them, as for `ray job submit`.",
        "detached",
    )
    resources: Mapping[str, Resources] = setting(
        "What a worker reserves on each of its nodes, by the name of its `engines` entry; one CPU "
        "by default.",
        {},
    )

"""Registers the operations of kind `rollout`; what carries them out is imported where it runs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from attrs import frozen

from commutator import hookimpl
from commutator.contract.operations import (
    Operations,
    OperationsConfig,
    OperationsContext,
    SupervisedOperations,
    SupervisorContext,
)
from commutator.contract.registration import OperationsRegister
from commutator.contract.service import Service
from commutator.contract.settings import NonNegativeInt, PositiveInt, setting

SERVICE = "rollout"
"""The part beside the supervisor, as front doors call it."""
PATH = "/admin/rollout"
"""Of its routes at doors."""


@frozen(kw_only=True)
class RolloutConfig(OperationsConfig):
    """How a running deployment is changed."""

    surge: NonNegativeInt = setting(
        "Workers of a model above those wanted while some are replaced, where there is room: a new "
        "one is ready before an old one drains.",
        1,
        takes_effect="live",
    )
    unavailable: PositiveInt = setting(
        "Workers of a model that drain at the same time where there is no room for new ones beside "
        "them: every GPU is used, or `surge` is 0.",
        1,
        takes_effect="live",
    )
    may_interrupt: bool = setting(
        "Whether the last ready worker of a model may be one of them; requests wait or fail then.",
        False,
        takes_effect="live",
    )
    max_failed: PositiveInt = setting(
        "Failed starts of a new worker after which a change has failed.", 3, takes_effect="live"
    )
    on_failure: Literal["undo", "pause"] = setting(
        "What follows: the last generation that ran completely is what should run again, or "
        "nothing more is done until somebody decides.",
        "undo",
        takes_effect="live",
    )


def _at_door(_: RolloutConfig, context: OperationsContext) -> Operations:
    made: Operations = import_module("commutator_rollout.door").RolloutAtDoor(context)
    return made


async def _beside(_: RolloutConfig, context: SupervisorContext) -> Service:
    made: Service = await import_module("commutator_rollout.roller").begin(context)
    return made


@hookimpl
def operations_register(register: OperationsRegister) -> None:
    """Kind `rollout`: what should run, changed while it runs."""
    if find_spec("commutator_traffic") is None:
        return  # taken away by hand: the rest serves, and `pip install commutator-rollout` mends it
    factory: Any = SupervisedOperations(_at_door, _beside)
    register("rollout", RolloutConfig, factory, "beta")

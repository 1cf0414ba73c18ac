"""The commands and operations that we ship, held against the suites for every one."""

from __future__ import annotations

from tests.support.front_door import FakeDispatcher, make_services

from commutator.contract.operations import Operations, OperationsContext
from commutator_console.live import Console
from commutator_rollout.door import RolloutAtDoor
from commutator_testing import CommandContract, OperationsContract


class TestReplay(CommandContract):
    module = "commutator_replay.commands"


class TestScaffold(CommandContract):
    module = "commutator_scaffold.commands"


class TestTop(CommandContract):
    module = "commutator_console.commands"


class TestConsole(OperationsContract):
    def make_operations(self) -> Operations:
        services = make_services(FakeDispatcher())
        return Console(OperationsContext(services=services, local_socket=None))


class TestRolloutCommands(CommandContract):
    module = "commutator_rollout.commands"


class TestRollout(OperationsContract):
    def make_operations(self) -> Operations:
        services = make_services(FakeDispatcher())
        return RolloutAtDoor(OperationsContext(services=services, local_socket=None))

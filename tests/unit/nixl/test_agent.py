"""An agent refuses at once, and clearly, what could not work later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.transfer import Buffer, open_file

from commutator.contract.tier import Direction, Memory, Region, Span
from commutator.errors import TransferError
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath

MIB = 1 << 20


def test_without_nixl_it_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "for name in ('nixl', 'nixl_meta_utils', 'nixl_cu12', 'nixl_cu13'):\n"
        "    sys.modules[name] = None\n"
        "from commutator.errors import TransferError\n"
        "from commutator_engine_kit.nixl import TransferAgent\n"
        "try: TransferAgent('a', {'UCX': {}})\n"
        "except TransferError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'nixl[cu12]'" in done.stdout


def test_importing_the_package_brings_in_neither_nixl_nor_numpy() -> None:
    code = (
        "import sys, commutator_engine_kit.nixl; "
        "print('nixl' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("asked", "expected"), [(None, "ERROR"), ("INFO", "INFO")])
def test_nixl_is_quiet_unless_asked_otherwise(asked: str | None, expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    code = (
        "import os, logging\n"
        "from commutator_engine_kit.nixl import TransferAgent\n"
        "TransferAgent('a', {'POSIX': {}}).close()\n"
        "print('level', os.environ['NIXL_LOG_LEVEL'], logging.raiseExceptions)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=env | ({"NIXL_LOG_LEVEL": asked} if asked else {}),
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"level {expected} True"
    assert (len(done.stdout.splitlines()) + len(done.stderr.splitlines()) > 1) == bool(asked)


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(TransferError, match=r"no backend 'NVLINK'.*POSIX.*UCX"):
        TransferAgent("a", {"NVLINK": {}})


def test_a_backend_that_does_not_load_is_refused() -> None:
    with pytest.raises(TransferError, match=r"INFINIA.*NIXL_LOG_LEVEL=INFO"):
        TransferAgent("a", {"INFINIA": {}})


def test_an_unknown_parameter_is_refused_without_telling_its_value() -> None:
    with pytest.raises(TransferError, match=r"no parameter 'secret'.*bucket") as caught:
        TransferAgent("a", {"OBJ": {"secret": "hunter2"}})
    assert "hunter2" not in str(caught.value)


def test_the_backend_that_writes_after_a_failure_is_refused() -> None:
    with pytest.raises(TransferError, match="use_posix_aio is refused"):
        TransferAgent("a", {"POSIX": {"use_posix_aio": "true"}})


def test_the_object_backend_loads_on_this_machine() -> None:
    """The build that `nixl` chooses by itself where there is no CUDA cannot load it."""
    parameters = {"bucket": "kv", "endpoint_override": "http://127.0.0.1:9", "access_key": "a"}
    TransferAgent("a", {"OBJ": parameters | {"secret_key": "b"}}).close()


def test_what_is_not_registered_is_not_moved(agent: TransferAgent, memory: Buffer) -> None:
    stranger = Buffer(MIB)
    with pytest.raises(TransferError, match="READ 1048576 B of DRAM by UCX"):
        agent.start(
            TransferPath(Direction.READ, Memory.DRAM, Memory.DRAM, "UCX"),
            [Span(memory.address, MIB)],
            [stranger.span],
        )


def test_sizes_that_differ_are_refused(agent: TransferAgent, memory: Buffer) -> None:
    with pytest.raises(TransferError):
        agent.start(
            TransferPath(Direction.READ, Memory.DRAM, Memory.DRAM, "UCX"),
            [Span(memory.address, MIB)],
            [Span(memory.address + MIB, 2 * MIB)],
        )


def test_registrations_are_counted(agent: TransferAgent, memory: Buffer, tmp_path: Path) -> None:
    with open_file(tmp_path / "file", MIB) as file:
        region = Region(memory=Memory.FILE, span=file)

        def read() -> None:
            agent.start(
                TransferPath(Direction.READ, Memory.DRAM, Memory.FILE, "POSIX"),
                [Span(memory.address, MIB)],
                [file],
            ).wait(5)

        agent.register([region], "POSIX")
        agent.register([region], "POSIX")
        agent.deregister([region], "POSIX")
        read()
        agent.deregister([region], "POSIX")
        with pytest.raises(TransferError):
            read()
        with pytest.raises(TransferError, match="not registered"):
            agent.deregister([region], "POSIX")


def test_a_failed_registration_leaves_nothing_registered(agent: TransferAgent) -> None:
    good = Buffer(MIB).region
    bad = Region(memory=Memory.FILE, span=Span(0, MIB, 3))  # UCX knows no files
    with pytest.raises(TransferError):
        agent.register([good, bad], "UCX")
    with pytest.raises(TransferError, match="not registered"):
        agent.deregister([good], "UCX")


def test_metadata_that_are_none_are_refused(agent: TransferAgent) -> None:
    with pytest.raises(TransferError, match="metadata"):
        agent.add_peer(b"something else")


def test_an_idle_agent_leaves_the_processor_alone(agent: TransferAgent, memory: Buffer) -> None:
    """NIXL's progress thread by its default spins."""
    before_s, started_s = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    busy = (time.process_time() - before_s) / (time.perf_counter() - started_s)
    assert busy < 0.2

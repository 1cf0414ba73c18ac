"""Ordinary log lines come in groups; what matters comes at once."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest
from tests.support.virtual_time import in_virtual_time

from commutator.frontend.process import GroupedLog

DELAY_S = 0.02


class Pipe(io.StringIO):
    """Counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def log(pipe: Pipe) -> logging.Logger:
    logger = logging.Logger("test", logging.INFO)  # noqa: LOG001 - of this test alone
    logger.addHandler(GroupedLog(pipe, delay_s=DELAY_S))
    return logger


@in_virtual_time
async def test_many_lines_are_one_write(pipe: Pipe, log: logging.Logger) -> None:
    for number in range(3):
        log.info("line %d", number)
    assert pipe.getvalue() == ""
    await asyncio.sleep(DELAY_S * 3)
    assert pipe.getvalue() == "line 0\nline 1\nline 2\n"
    assert pipe.writes == 1
    log.info("later")
    await asyncio.sleep(DELAY_S * 3)
    assert pipe.getvalue().endswith("later\n")


async def test_a_warning_comes_at_once_and_in_order(pipe: Pipe, log: logging.Logger) -> None:
    log.info("before")
    log.warning("now")
    assert pipe.getvalue() == "before\nnow\n"


async def test_the_end_loses_nothing(pipe: Pipe, log: logging.Logger) -> None:
    log.info("last words")
    log.handlers[0].flush()
    assert pipe.getvalue() == "last words\n"


def test_without_a_loop_nothing_waits(pipe: Pipe, log: logging.Logger) -> None:
    log.info("starting")
    assert pipe.getvalue() == "starting\n"


def test_a_reader_that_went_away_stops_no_process(pipe: Pipe, log: logging.Logger) -> None:
    pipe.close()
    log.warning("lost")

"""The printer never blocks the process that prints."""

from __future__ import annotations

import io
import json
import logging
import threading

from commutator.launcher.output import Printer, PrinterHandler


def test_text_names_the_process() -> None:
    log, out = io.StringIO(), io.StringIO()
    printer = Printer("text", log=log, out=out)
    printer.line("worker-0", "stderr", "hello")
    printer.announce("a box\n", "ready")
    printer.close()
    assert log.getvalue()[8:] == " [worker-0] hello\n"
    assert out.getvalue() == "a box\n"


def test_colour_is_the_same_for_the_same_process() -> None:
    log = io.StringIO()
    printer = Printer("text", log=log, colour=True)
    printer.line("worker-0", "stdout", "one")
    printer.line("worker-0", "stdout", "two")
    printer.close()
    first, second = log.getvalue().splitlines()
    assert "\x1b[" in first
    assert first.split("[worker-0]")[0][-5:] == second.split("[worker-0]")[0][-5:]


def test_json_is_one_object_a_line() -> None:
    log, out = io.StringIO(), io.StringIO()
    printer = Printer("json", log=log, out=out)
    printer.line("worker-0", "stderr", 'quote " and ü')
    printer.announce("a box\n", "ready: url")
    printer.close()
    line = json.loads(log.getvalue())
    assert line["timestamp"].startswith("20")
    named = {name: line[name] for name in ("process", "stream", "body")}
    assert named == {"process": "worker-0", "stream": "stderr", "body": 'quote " and ü'}
    assert json.loads(out.getvalue())["body"] == "ready: url"


def test_the_supervisors_log_goes_the_same_way() -> None:
    log = io.StringIO()
    printer = Printer("text", log=log)
    logger = logging.getLogger("commutator.test.output")
    handler = PrinterHandler(printer)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.warning("two\nlines")
    finally:
        logger.removeHandler(handler)
    printer.close()
    lines = [line[8:] for line in log.getvalue().splitlines()]
    assert lines == [" [supervisor] WARNING two", " [supervisor] lines"]


class Stuck(io.StringIO):
    """A terminal whose user has paused it."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = threading.Event()
        self.flushed = threading.Event()
        """The printer had nothing more to write."""

    def write(self, text: str) -> int:
        self.moving.wait(60)
        return super().write(text)

    def flush(self) -> None:
        self.flushed.set()


def test_a_stuck_terminal_costs_lines_but_no_time() -> None:
    log = Stuck()
    printer = Printer("text", log=log)
    for number in range(15_000):
        printer.line("worker-0", "stdout", str(number))
    assert not log.getvalue(), "every line was taken while the terminal took none"
    log.moving.set()
    assert log.flushed.wait(30)
    printer.line("worker-0", "stdout", "at last")
    printer.close()
    text = log.getvalue()
    assert "lines were dropped" in text
    assert text.endswith("at last\n")


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_left_stops_nothing() -> None:
    log, out = Broken(), io.StringIO()
    printer = Printer("text", log=log, out=out)
    printer.line("worker-0", "stdout", "lost")
    printer.announce("heard\n", "heard")
    printer.close()
    assert out.getvalue() == "heard\n"

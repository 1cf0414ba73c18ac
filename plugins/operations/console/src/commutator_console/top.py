"""``commutator top``: the live view of a run in a terminal, over the API of the page at /ui."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from commutator_console.door import live
from commutator_console.front_door import FrontDoor, LostError, front_door_options
from commutator_console.view import History, view

_RETRY_S = 1.0
_WIDTH_IN_FILES = 120
"""Characters; rich takes 80 for what is no terminal."""


@click.command(epilog="Example: commutator top")
@front_door_options
@click.option("--once", is_flag=True, help="Print the state once, and end.")
def top(door: FrontDoor, once: bool) -> None:
    """Show workers, rates, routing decisions and KV flow as they change. End with q or Ctrl-C.

    In a deployment with keys, it takes the key of a principal with the permission `admin`.
    """
    history, console = History(), Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    if once:
        snapshots = live(door)
        history.add(next(snapshots))
        snapshot = next(snapshots)  # the first has no rates yet
        history.add(snapshot)
        console.print(view(snapshot, history, console.height, console.width))
        return
    with (
        suppress(KeyboardInterrupt),
        _keys() as quits,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        for found, lost in followed(lambda: live(door)):
            if lost is None:
                history.add(found)
            screen.update(view(found, history, console.height, console.width, lost), refresh=True)
            if quits():
                return


def followed(
    live: Callable[[], Iterator[dict[str, Any]]], sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Snapshots, each with None, or the last one with why there is no newer one.

    Raises CommutatorError when there has never been one, and when the front door refuses.
    """
    last: dict[str, Any] | None = None
    while True:
        lost = "the front door ended the stream"
        try:
            for found in live():
                last = found
                yield found, None
        except LostError as error:
            if last is None:
                raise
            lost = str(error).partition("\n")[0]
        if last is not None:
            yield last, lost
        sleep(_RETRY_S)


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Whether q was pressed, without a line end; never, where nobody types."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda: bool(select.select([sys.stdin], [], [], 0)[0]) and sys.stdin.read(1) == "q"
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

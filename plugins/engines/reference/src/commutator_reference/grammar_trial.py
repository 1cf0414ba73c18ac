"""Compiles grammars on trial, in a process that may be lost.

Some small grammars take llguidance minutes or gigabytes, and nothing can stop it: intersections of
patterns, multiples of a large number. So a process with little time and memory tries each first.
"""

from __future__ import annotations

import json
import math
import resource
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from signal import SIGXCPU

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(max_items_in_row=20_000, step_max_items=100_000, verbose_errors=False)
"""Of one token's work. Rows of the default length do not hold an object of 1,000 keys."""

_CPU_S = 2
"""That one grammar may take, with the first tokens of an answer."""
_MEMORY_MIB = 96
"""That it may take in addition to the vocabulary's tables."""
_IDLE_S = 60
"""After which the process ends, to give its memory back."""
_STEPS = 8


class GrammarTrial:
    """The process that tries, which is started when it is needed. Any thread may call it."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, end: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = (vocab_size, end)
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None
        """Ends it; so does the end of this process, or of this object."""
        self._lock = threading.Lock()

    def problem(self, grammar: str) -> str | None:
        """Why ``grammar`` cannot be used; None: it can."""
        with self._lock:
            while True:
                process = self._process = self._process or self._start()
                answer = _ask(process, grammar)
                if answer:
                    told: str | None = json.loads(answer)
                    return told
                status = process.wait()
                self._close()
                if status == -SIGXCPU:
                    return f"it takes more than {_CPU_S} s to compile; simplify it"
                if status:
                    return f"it takes more than {_MEMORY_MIB} MiB to compile; simplify it"
                # It was idle, and ended.

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._end()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(  # noqa: S603 - this module
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._end = weakref.finalize(self, _end, process)
        started = json.dumps([self._tokenizer(), *self._vocabulary])
        if not _ask(process, started):
            raise OSError(f"the process that tries grammars ended with status {process.wait()}")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], what: str) -> str:
    """The line that it answers; empty when it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""


def _main() -> None:
    tokenizer, vocab_size, end = json.loads(json.loads(sys.stdin.readline()))
    tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=end)
    del tokenizer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (_MEMORY_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _tell(True)
    while select.select([sys.stdin], [], [], _IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        until_s = math.ceil(used.ru_utime + used.ru_stime + _CPU_S)
        resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.RLIM_INFINITY))
        _tell(_problem(tokens, json.loads(line), end))


def _tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _problem(tokens: LLTokenizer, grammar: str, end: int) -> str | None:
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return f"cannot be compiled: {matcher.get_error()}"
    if warnings := matcher.get_grammar_warnings():  # a keyword that would be ignored
        return f"cannot be enforced: {'; '.join(warnings)}"
    for _ in range(_STEPS):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        allowed = allowed[allowed != end]
        if matcher.is_error():
            return f"cannot be followed: {matcher.get_error()}"
        if matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(allowed[0]))
    return None


if __name__ == "__main__":
    _main()

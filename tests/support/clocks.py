"""Clocks of hosts that someone sets: the time of day jumps, lengths of time stay right."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["Clocks"]

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
  int fd = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
  offset = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  real = dlsym(RTLD_NEXT, "clock_gettime");
}
int clock_gettime(clockid_t id, struct timespec *ts) {
  if (!real) begin();
  int result = real(id, ts);
  if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) ts->tv_sec += *offset;
  return result;
}
int gettimeofday(struct timeval *tv, void *zone) {
  struct timespec ts;
  int result = clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return result;
}
time_t time(time_t *t) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (t) *t = ts.tv_sec;
  return ts.tv_sec;
}
"""
"""A library that shifts the time of day of processes by the seconds that a file has, at any time.

The monotonic clock goes on, as it does when someone sets a real clock.
"""
_CLOSE_S = 60.0


class Clocks:
    """The clocks of hosts, in a folder. Raises CalledProcessError without a C compiler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "clock.so"
        source = folder / "clock.c"
        source.write_text(_SOURCE)
        build = ["cc", "-shared", "-fPIC", "-o", str(self._library), str(source), "-ldl"]
        subprocess.run(build, check=True)

    def env_of(self, host: str) -> dict[str, str]:
        """With this environment processes have the clock of a host, which is right at first."""
        if not self._offset(host).exists():
            self._offset(host).write_bytes(struct.pack("l", 0))
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(self._offset(host))}

    def jump(self, host: str, offset_s: int) -> None:
        """Set a clock to that long after, or with a minus before, the right time."""
        with self._offset(host).open("r+b") as file:
            file.write(struct.pack("l", offset_s))
        asked = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env=os.environ | self.env_of(host), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert abs(float(asked.stdout) - time.time() - offset_s) < _CLOSE_S, "nothing was shifted"

    def _offset(self, host: str) -> Path:
        return self._folder / f"{host}.offset"

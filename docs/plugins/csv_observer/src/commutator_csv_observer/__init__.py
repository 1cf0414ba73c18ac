"""An observer that appends one line to a CSV file for each request that ended."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TextIO

from attrs import frozen

from commutator import (
    Observer,
    ObserverConfig,
    ObserverRegister,
    RequestOutcome,
    RequestSummary,
    hookimpl,
    setting,
)


@frozen(kw_only=True)
class CsvConfig(ObserverConfig):
    path: str = setting("The file; {pid} in it is the process, as each front door writes its own.")


class CsvObserver(Observer):
    def __init__(self, config: CsvConfig) -> None:
        self.path = Path(config.path.replace("{pid}", str(os.getpid())))

    async def start(self) -> None:
        self.file: TextIO = self.path.open("a", newline="")
        self.writer = csv.writer(self.file)

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        tokens, took_s = outcome.generated_tokens, f"{outcome.duration_s:.3f}"
        self.writer.writerow([request.request_id, outcome.worker_id, "ok", tokens, took_s])

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        self.writer.writerow([request.request_id, worker_id, type(error).__name__, "", ""])

    async def stop(self) -> None:
        self.file.close()


@hookimpl
def observer_register(register: ObserverRegister) -> None:
    register("csv", CsvConfig, CsvObserver)

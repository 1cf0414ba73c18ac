"""The shipped suite, and the file that this observer writes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from commutator import Observer
from commutator_csv_observer import CsvConfig, CsvObserver
from commutator_testing import ObserverContract


class TestCsvObserver(ObserverContract):
    @pytest.fixture
    def observer(self, tmp_path: Path) -> Observer:
        return CsvObserver(CsvConfig(kind="csv", path=str(tmp_path / "requests.csv")))

    def test_each_request_that_ended_is_one_line(self, observer: Observer, tmp_path: Path) -> None:
        self.observe_everything(observer)
        with (tmp_path / "requests.csv").open(newline="") as file:
            finished, failed = csv.reader(file)
        assert finished[:4] == ["served", "w-0", "ok", "8"]
        assert failed[:3] == ["lost", "w-0", "EngineUnavailableError"]

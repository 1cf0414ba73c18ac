"""The limiters that we ship, held against the suite for every one."""

from __future__ import annotations

import pytest

from commutator.auth.unlimited import UnlimitedLimiter
from commutator.contract.limiter import Limiter
from commutator_limits.plugin import LedgerLimiter
from commutator_testing import LimiterContract


class TestLedger(LimiterContract):
    @pytest.fixture
    def limiter(self) -> Limiter:
        return LedgerLimiter()


class TestUnlimited(LimiterContract):
    counted = ()

    @pytest.fixture
    def limiter(self) -> Limiter:
        return UnlimitedLimiter()

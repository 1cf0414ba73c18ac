"""What wraps the I/O of any tier: retries, a circuit breaker, a bandwidth limit."""

from commutator.kv.guards.bandwidth import Bandwidth, BandwidthLimit
from commutator.kv.guards.breaker import Breaker, BreakerIo, BreakerState
from commutator.kv.guards.last_resort import LastResort
from commutator.kv.guards.retry import RetryBudget, RetryIo

__all__ = [
    "Bandwidth",
    "BandwidthLimit",
    "Breaker",
    "BreakerIo",
    "BreakerState",
    "LastResort",
    "RetryBudget",
    "RetryIo",
]

"""What wraps the I/O of any tier: retries, a circuit breaker, a bandwidth limit."""

from commutator.kv.guards.bandwidth import BandwidthLimit
from commutator.kv.guards.breaker import Breaker, BreakerIo, BreakerState
from commutator.kv.guards.retry import RetryBudget, RetryIo

__all__ = ["BandwidthLimit", "Breaker", "BreakerIo", "BreakerState", "RetryBudget", "RetryIo"]

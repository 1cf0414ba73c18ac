"""A command as a process of the deployment that it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from commutator.config.model import Config
from commutator.supervisor.hosts import network_of, run_secret
from commutator.trust import adopt, use_network


@contextmanager
def as_member(config: Config) -> Iterator[None]:
    """This process as one of the deployment's, and of its host's network. Raises ConfigError."""
    with adopt(run_secret(config)), use_network(network_of(config)):
        yield

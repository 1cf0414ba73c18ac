"""Every error that Commutator raises on purpose.

    CommutatorError
    ├── ConfigError            the configuration is wrong; carries every problem found
    ├── PluginError            a plugin broke the contract; names its distribution
    ├── AuthenticationError    the client's credentials are not valid, or not any more
    ├── RateLimitError         a principal's limit stands against its request; says which
    ├── PermissionDeniedError  the client may not do what it asks for
    ├── RequestError           the client's request cannot be served as it is
    ├── RoutingError           no worker can take the request
    │   └── OverloadedError    not now: a queue or a limit is full
    ├── EngineError            a worker failed a request
    │   ├── EngineUnavailableError   connection refused, lost or silent
    │   ├── EngineOverloadedError    the engine is healthy but full
    │   ├── EngineIncompleteError    the stream ended before the answer did
    │   ├── EngineHandoverError      the prefill worker's KV did not arrive
    │   ├── EngineNeedsPrefillError  it needs a prefill worker for the prompt
    │   └── EngineWithoutTiersError  a question about storage tiers, without tiers
    ├── TransferError          NIXL could not move some bytes
    │   └── TransferTimeoutError     not in time; NIXL may still access the memory
    │       └── TransferCancelledError   cancelled; NIXL may still access the memory
    ├── TierError              a storage tier cannot be used
    ├── RegistryError          the registry of workers cannot be reached
    │   └── NameTakenError     another live worker has the worker id
    ├── LauncherError          the cluster on whose hosts workers are launched cannot be reached
    └── DeadlineError          the request's time limit passed

Messages say what happened, where, and what to do next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

__all__ = [
    "AuthenticationError",
    "CommutatorError",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "EngineHandoverError",
    "EngineIncompleteError",
    "EngineNeedsPrefillError",
    "EngineOverloadedError",
    "EngineUnavailableError",
    "EngineWithoutTiersError",
    "LauncherError",
    "NameTakenError",
    "OverloadedError",
    "PermissionDeniedError",
    "PluginError",
    "RateLimitError",
    "RegistryError",
    "RequestError",
    "RoutingError",
    "TierError",
    "TransferCancelledError",
    "TransferError",
    "TransferTimeoutError",
]


class CommutatorError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(CommutatorError):
    """The configuration is wrong; ``problems`` holds one line for each mistake."""

    def __init__(self, problems: list[str], where: str = "configuration") -> None:
        self.problems = problems
        self.where = where
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{where}: {count}\n{lines}")


class PluginError(CommutatorError):
    """A plugin broke the contract. ``distribution`` is the package to blame."""

    def __init__(self, distribution: str, message: str) -> None:
        self.distribution = distribution
        self.message = message
        super().__init__(f"plugin {distribution}: {message}")


class AuthenticationError(CommutatorError):
    """The client's credentials are not valid, or not any more; the message says why."""


class RateLimitError(CommutatorError):
    """A request is beyond a limit of its principal. ``limit`` is its name in ``Limits``.

    ``retry_after_s`` is when it may fit; None: it never does, being too large. ``standing``, a
    ``commutator.contract.limiter.Standing``, is how far the principal is from its limits.
    """

    def __init__(
        self, message: str, limit: str, retry_after_s: float | None, standing: object = None
    ) -> None:
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.standing = standing
        super().__init__(message)


class _FieldError(CommutatorError):
    """About a field of a request. ``param`` names it, in the client's spelling."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)

    def rename(self, names: Mapping[str, str]) -> None:
        """Say what the client calls the field, where ``names`` has it by ``param``."""
        if self.param is not None and (own := names.get(self.param)) is not None:
            self.args = (str(self).replace(f"{self.param}:", f"{own}:", 1),)
            self.param = own


class PermissionDeniedError(_FieldError):
    """The principal lacks a permission."""


class RequestError(_FieldError):
    """The request is wrong."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.code = code
        super().__init__(message, param)


class RoutingError(CommutatorError):
    """No worker can take the request."""


class OverloadedError(RoutingError):
    """A queue or a limit is full; try again after ``retry_after_s`` seconds.

    ``reason`` is one word for clients and metrics.
    """

    def __init__(
        self, message: str, retry_after_s: float = 1.0, reason: str = "queue_full"
    ) -> None:
        self.retry_after_s = retry_after_s
        self.reason = reason
        super().__init__(message)


class EngineError(CommutatorError):
    """A worker failed this request."""


class EngineUnavailableError(EngineError):
    """The worker cannot be reached, or its connection was lost."""


class EngineOverloadedError(EngineError):
    """The worker is healthy but full. Not a failure: it must not open a breaker."""


class EngineIncompleteError(EngineError):
    """The worker stopped sending before the answer was complete, without a reason."""


class EngineHandoverError(EngineError):
    """A decode worker did not get the KV from the prefill worker. It can serve it another way."""


class EngineNeedsPrefillError(EngineError):
    """A worker that computes no prompts, or only prompts, was sent a whole request."""


class EngineWithoutTiersError(EngineError):
    """A worker was asked about its storage tiers, and has none. Nothing failed."""

    def __init__(self, message: str = "this worker has no storage tiers") -> None:
        super().__init__(message)


class TransferError(CommutatorError):
    """NIXL could not move some bytes. The destination may be partly overwritten."""


class TransferTimeoutError(TransferError):
    """A transfer did not end in time. NIXL may still access its memory.

    ``token`` identifies the transfer: its memory is pinned until the agent's ``reap`` returns it.
    None when the transfer never began.
    """

    def __init__(self, message: str, token: int | None = None) -> None:
        self.token = token
        super().__init__(message)


class TransferCancelledError(TransferTimeoutError):
    """A transfer was cancelled, not by a fault of the tier or peer."""


class TierError(CommutatorError):
    """A storage tier cannot be used, or not now; the message says what to do."""


class RegistryError(CommutatorError):
    """The registry of workers cannot be reached."""


class NameTakenError(RegistryError):
    """Another live instance has the worker id.

    ``holder`` says which: "host h1, at 127.0.0.1:4100".
    """

    def __init__(self, worker_id: str, holder: str) -> None:
        super().__init__(
            f"worker id {worker_id} belongs to another live worker ({holder}); give each "
            "deployment that shares a registry a cluster.host.name of its own"
        )
        self.worker_id = worker_id
        self.holder = holder


class LauncherError(CommutatorError):
    """The cluster on whose hosts workers are launched cannot be reached, or did not answer."""


class DeadlineError(CommutatorError):
    """The request's time limit passed before it was finished."""


@cache
def packages(what: Literal["kinds", "commands"]) -> dict[str, str]:
    """Our distribution that brings a kind, such as "engine vllm", or a command, to be installed."""
    text = files(__package__).joinpath("packages.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)[what]
    return found

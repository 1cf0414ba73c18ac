"""What a client raises.

ClientError
├── ClientConnectionError     no answer, or one that broke off
│   └── ClientTimeoutError    silence for longer than the timeouts of ``ClientConfig``
└── ApiError                  the deployment refused or failed the request
    ├── OverloadedError       429: full, or beyond a limit of the key
    └── UnavailableError      503: no worker, or one that was lost
"""

from __future__ import annotations


class ClientError(Exception):
    """A request failed. ``attempts`` is how often it was sent, or tried to be."""

    def __init__(self, message: str, attempts: int = 1) -> None:
        self.attempts = attempts
        super().__init__(message)


class ClientConnectionError(ClientError):
    """The deployment cannot be reached, or the connection was lost before the answer's end."""


class ClientTimeoutError(ClientConnectionError):
    """The deployment was silent for too long. A request that it had got is not sent again."""


class ApiError(ClientError):
    """The deployment answered with an error."""

    def __init__(
        self,
        status: int,
        body: str,
        message: str = "",
        *,
        attempts: int = 1,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        """The HTTP status; 200 for an error in the middle of a stream."""
        self.body = body
        """The answer as it came."""
        self.code = code
        """The kind of error in one word, such as `queue_full`, as far as the answer names one."""
        self.param = param
        """The field that is wrong, in the client's spelling."""
        self.request_id = request_id
        """By which the deployment's log names the request."""
        self.retry_after_s = retry_after_s
        """When the deployment wants to be asked again, in seconds from its answer."""
        super().__init__(f"{status}: {message or body}", attempts)


class OverloadedError(ApiError):
    """The deployment is full, or the key is beyond one of its limits."""


class UnavailableError(ApiError):
    """The deployment cannot serve the request now: it has no worker for it, or lost it."""

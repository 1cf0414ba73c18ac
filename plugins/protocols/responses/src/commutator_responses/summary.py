"""The content of a compaction item: a summary that a model wrote of what was said before.

The API calls it ``encrypted_content``, which clients hand back unread. Here it is no secret, as it
says no more than what its client sent: the text itself in base64 after a mark, so that any front
door reads what another one wrote.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from commutator_openai.values import shown, wrong

_MARK = "commutator.summary.1."
"""Content of other servers begins otherwise: nobody here can read that."""


def sealed(summary: str) -> str:
    """``encrypted_content`` for ``summary``."""
    return _MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def unsealed(content: Any, path: str) -> str:
    """The summary again. Raises RequestError for what ``sealed`` did not make."""
    if isinstance(content, str) and content.startswith(_MARK):
        data = content.removeprefix(_MARK).encode()
        try:
            return base64.b64decode(data, altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    raise wrong(
        path,
        f"expected what /v1/responses/compact of this server returned, got {shown(content)}; "
        "nobody here can read what other servers made",
    )

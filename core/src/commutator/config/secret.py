"""Secrets are named by reference; their values never reach a file, a log or a repr of ours."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from commutator.errors import ConfigError
from commutator.schema import setting

__all__ = ["Secret"]


@frozen(kw_only=True)
class Secret:
    """A secret's reference: exactly one of an environment variable or a file."""

    env: str | None = setting("The environment variable that holds the value.", None)
    file: str | None = setting("The file that holds the value; a trailing newline is cut.", None)

    def __attrs_post_init__(self) -> None:
        if (self.env is None) == (self.file is None):
            raise ValueError('expected {"env": NAME} or {"file": PATH}, one of them')

    def reveal(self) -> str:
        """The value. Raises ConfigError when the variable or file is missing, empty or no text."""
        if self.env is not None:
            value, place = os.environ.get(self.env, ""), f"environment variable {self.env}"
        else:
            place = f"file {self.file}"
            try:
                data = Path(str(self.file)).expanduser().read_bytes()
            except (OSError, RuntimeError) as error:  # the latter for a ~user that is not known
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError([f"{place}: {reason}"], "secret") from error
            value = data.decode(errors="surrogateescape").rstrip("\r\n")
        if not value:
            raise ConfigError([f"{place} is not set or empty"], "secret")
        if not _is_utf8(value):
            raise ConfigError([f"{place} is not UTF-8 text; write the value in UTF-8"], "secret")
        return value

    def __str__(self) -> str:
        return f"<secret from {'env ' + self.env if self.env else 'file ' + str(self.file)}>"


def _is_utf8(value: str) -> bool:
    """Bytes of files and of variables that are no UTF-8 stand in ``value`` as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

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
        """The value. Raises ConfigError when the variable or file is missing or empty."""
        if self.env is not None:
            value, place = os.environ.get(self.env, ""), f"environment variable {self.env}"
        else:
            place = f"file {self.file}"
            try:
                value = Path(str(self.file)).expanduser().read_text().rstrip("\r\n")
            except OSError as error:
                raise ConfigError([f"{place}: {error.strerror}"], "secret") from error
        if not value:
            raise ConfigError([f"{place} is not set or empty"], "secret")
        return value

    def __str__(self) -> str:
        return f"<secret from {'env ' + self.env if self.env else 'file ' + str(self.file)}>"

"""Fields of configuration and request classes: descriptions, limits, sizes and secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import attrs
from attrs import NOTHING, frozen

from commutator.errors import ConfigError

__all__ = [
    "Bounds",
    "ByteSize",
    "Count",
    "Fraction",
    "NonNegativeInt",
    "Port",
    "PositiveInt",
    "PositiveSeconds",
    "Seconds",
    "Secret",
    "SettingNote",
    "Size",
    "Tunable",
    "setting",
]


@frozen(kw_only=True)
class Bounds:
    """Limits of a number, inclusive unless ``above``; used inside ``Annotated[int, Bounds(1)]``."""

    minimum: float | None = None
    """Inclusive lower limit; None: none."""
    maximum: float | None = None
    """Inclusive upper limit; None: none."""
    above: float | None = None
    """Exclusive lower limit."""

    def describe(self) -> str:
        """Text that follows the name of the type: "an integer" + " of at least 1"."""
        low, high, above = map(_number, (self.minimum, self.maximum, self.above))
        if self.above is not None:
            return f" above {above}" + (f" and at most {high}" if high else "")
        if self.minimum is not None and self.maximum is not None:
            return f" from {low} to {high}"
        if self.minimum is not None:
            return f" of at least {low}"
        return f" of at most {high}" if high else ""


@frozen(kw_only=True)
class Tunable:
    """The range of an option of which `planner.tuning` may try other values."""

    minimum: float
    """The smallest value that is tried; above 0 on the scale log."""
    maximum: float
    """The largest value that is tried."""
    scale: Literal["log", "linear"] = "log"
    """Whether values are tried at equal ratios or at equal distances."""

    def __attrs_post_init__(self) -> None:
        if not self.minimum < self.maximum or (self.scale == "log" and self.minimum <= 0):
            raise ValueError(
                f"expected minimum < maximum, and above 0 on the scale log; got {self.minimum:g} "
                f"and {self.maximum:g}, scale {self.scale}"
            )

    def allows(self, value: float) -> bool:
        """Whether ``value`` is within the range."""
        return self.minimum <= value <= self.maximum


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:g}"


Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


PositiveInt = Annotated[int, Bounds(minimum=1)]
"""An integer of at least 1."""


NonNegativeInt = Annotated[int, Bounds(minimum=0)]
"""An integer of at least 0."""


Count = NonNegativeInt
"""A number of things, 0 or more."""


Port = Annotated[int, Bounds(minimum=0, maximum=65535)]
"""A TCP port; 0 lets the system choose."""


Seconds = Annotated[float, Bounds(minimum=0)]
"""A duration in seconds, 0 or more."""


PositiveSeconds = Annotated[float, Bounds(above=0)]
"""A duration in seconds, above 0."""


Fraction = Annotated[float, Bounds(minimum=0, maximum=1)]
"""A part of a whole, 0 to 1."""


class SettingNote(str):  # noqa: SLOT000 - cattrs' own notes have none either
    """A note on the error of a field's validator: the name of the field."""

    name: str
    """The field's name."""

    def __new__(cls, name: str) -> Self:
        note = super().__new__(cls, f"in {name}")
        note.name = name
        return note


TakesEffect = Literal["live", "new requests", "workers", "doors", "never"]
"""When a change of an option applies: at once; to requests that begin later; as its workers, or the
front doors, are replaced one after another; or not before `commutator serve` is started again."""


def setting(
    doc: str,
    default: Any = NOTHING,
    *,
    factory: Callable[[], Any] | None = None,
    validator: Validator | None = None,
    secret: bool = False,
    of_host: bool = False,
    tunable: tuple[float, float] | None = None,
    tunable_scale: Literal["log", "linear"] = "log",
    takes_effect: TakesEffect | None = None,
) -> Any:
    """An attrs field with a description, shown in the JSON Schema and in the reference.

    Without ``default`` and ``factory`` the field is required. ``secret`` keeps it out of reprs.
    ``of_host``: hosts of one cluster have different values, which make no other generation.
    ``tunable``: `planner.tuning` may try other values, from the first to the second number, at
    equal ratios, or with ``tunable_scale="linear"`` at equal distances. It tunes options of routing
    and disaggregation policies and of stages, and nothing that is not declared. Declare none that
    protects, such as the cap of a queue, a time-out or a budget.
    ``takes_effect``: when a change of it applies to a running deployment; None: as what it is in.
    ``validator`` raises ValueError, which is reported with the field's path; its message may begin
    with the field's name and a colon.
    """
    declared = None
    if tunable is not None:
        declared = Tunable(minimum=tunable[0], maximum=tunable[1], scale=tunable_scale)
    return attrs.field(
        default=attrs.Factory(factory) if factory is not None else default,
        validator=None if validator is None else _located(validator),
        repr=not secret,
        metadata={
            "doc": doc,
            "of_host": of_host,
            "tunable": declared,
            "takes_effect": takes_effect,
        },
    )


def _located(validator: Validator) -> Validator:
    """``validator``, whose errors name their field in a note."""

    def check(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        try:
            validator(instance, field, value)
        except ValueError as error:
            error.add_note(SettingNote(field.name))
            raise

    return check


_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}


_TEXT = rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})"


@frozen
class ByteSize:
    """Accepts bytes as an integer or with a unit; used inside ``Annotated[int, ...]``."""

    minimum: int = 1
    """Smallest size in bytes."""

    pattern = f"^{_TEXT}$"
    """Regular expression of a size with a unit, also for JSON Schema."""

    def parse(self, value: Any) -> int | None:
        """The size in bytes, rounded down; None when ``value`` is no size, or too small."""
        if isinstance(value, str):
            match = re.fullmatch(_TEXT, value)
            if match is None:
                return None
            value = int(Decimal(match[1]) * _UNITS[match[2]])
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and value >= self.minimum else None

    def describe(self) -> str:
        """The legal values, for error messages."""
        least = "" if self.minimum <= 1 else f" of at least {self.minimum} bytes"
        return f'a size{least} such as 4294967296, "4GiB" or "500MB"'


Size = Annotated[int, ByteSize()]
"""A size in bytes, at least 1, such as 4294967296, "4GiB" or "500MB"."""


@frozen(kw_only=True)
class Secret:
    """A reference to a secret: either an environment variable or a file."""

    WRITTEN_AS: ClassVar[str] = "{env: NAME} or {file: PATH}"
    """Its form in a file; messages about another form do not repeat it."""
    env: str | None = setting(
        "The environment variable that holds the value; a trailing newline is cut.", None
    )
    file: str | None = setting("The file that holds the value; a trailing newline is cut.", None)

    def __attrs_post_init__(self) -> None:
        if (self.env is None) == (self.file is None):
            raise ValueError('expected {"env": NAME} or {"file": PATH}, one of them')

    def reveal(self) -> str:
        """The value. Raises ConfigError when the variable or file is missing, empty or no text."""
        if self.env is not None:
            value, place = os.environ.get(self.env, ""), f"environment variable {self.env}"
            value = value.rstrip("\r\n")
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
    """Whether ``value`` has no lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

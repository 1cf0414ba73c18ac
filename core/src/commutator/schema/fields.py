"""How a field of a configuration or request class says what it accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import attrs
from attrs import NOTHING, frozen
from cattrs.errors import AttributeValidationNote

__all__ = [
    "Bounds",
    "Count",
    "Fraction",
    "NonNegativeInt",
    "Port",
    "PositiveInt",
    "PositiveSeconds",
    "Seconds",
    "setting",
]


@frozen
class Bounds:
    """Limits of a number, inclusive unless ``above``; used inside ``Annotated[int, Bounds(1)]``."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower limit."""

    def allows(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )

    def describe(self) -> str:
        """Words that follow the type's name: "an integer" + " of at least 1"."""
        low, high, above = map(_number, (self.minimum, self.maximum, self.above))
        if self.above is not None:
            return f" above {above}" + (f" and at most {high}" if high else "")
        if self.minimum is not None and self.maximum is not None:
            return f" from {low} to {high}"
        if self.minimum is not None:
            return f" of at least {low}"
        return f" of at most {high}" if high else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:g}"


Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

PositiveInt = Annotated[int, Bounds(minimum=1)]
NonNegativeInt = Annotated[int, Bounds(minimum=0)]
Count = NonNegativeInt
Port = Annotated[int, Bounds(minimum=0, maximum=65535)]
Seconds = Annotated[float, Bounds(minimum=0)]
PositiveSeconds = Annotated[float, Bounds(above=0)]
Fraction = Annotated[float, Bounds(minimum=0, maximum=1)]


def setting(
    doc: str,
    default: Any = NOTHING,
    *,
    factory: Callable[[], Any] | None = None,
    validator: Validator | None = None,
    secret: bool = False,
) -> Any:
    """An attrs field with a description that ends up in the JSON Schema and in the reference.

    Without ``default`` and ``factory`` the field is required. ``secret`` keeps it out of reprs.
    What ``validator`` raises, a ValueError, is told with the field's path; it may begin with the
    field's name and a colon.
    """
    return attrs.field(
        default=attrs.Factory(factory) if factory is not None else default,
        validator=None if validator is None else _located(validator),
        repr=not secret,
        metadata={"doc": doc},
    )


def _located(validator: Validator) -> Validator:
    """``validator``, whose errors know their field, as those of cattrs do."""

    def check(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        try:
            validator(instance, field, value)
        except ValueError as error:
            error.add_note(AttributeValidationNote(f"in {field.name}", field.name, field.type))
            raise

    return check

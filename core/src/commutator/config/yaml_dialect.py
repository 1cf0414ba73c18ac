"""The YAML that is read and written here: PyYAML's 1.1, with the numbers of YAML 1.2.

For PyYAML alone ``1e-5`` is text, as it wants a point and a sign: ``1.0e-5``.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

__all__ = ["Dumper", "Loader", "to_yaml"]

_FLOAT = "tag:yaml.org,2002:float"
_WITH_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class Loader(yaml.SafeLoader):
    """Makes plain data only."""


class Dumper(yaml.SafeDumper):
    """Writes what ``Loader`` reads to exactly the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        """One value in two places is written twice: people read this, too."""
        del data
        return True


for _class in (Loader, Dumper):  # the dumper puts text in quotes that would be read as a number
    _class.add_implicit_resolver(_FLOAT, _WITH_EXPONENT, list("-+0123456789."))


def to_yaml(values: Any) -> str:
    """Plain data as text in ASCII that ``read_file`` turns into equal data again."""
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, width=float("inf"))
    return text

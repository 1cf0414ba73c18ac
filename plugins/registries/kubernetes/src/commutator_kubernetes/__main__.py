"""Prints manifests: ``python -m commutator_kubernetes crds`` or ``... role NAME``."""

from __future__ import annotations

import sys

import yaml

from commutator_kubernetes.custom_resources import custom_resources, roles


def main(arguments: list[str]) -> int:
    match arguments:
        case ["crds"]:
            objects = custom_resources()
        case ["role", name]:
            objects = roles(name)
        case _:
            sys.stderr.write("python -m commutator_kubernetes crds | role NAME\n")
            return 2
    sys.stdout.write(yaml.safe_dump_all(objects, sort_keys=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

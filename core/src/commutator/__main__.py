"""``python -m commutator`` is the ``commutator`` command."""

from commutator.cli.main import main

if __name__ == "__main__":
    main()

"""Values that are kept outside of the run: who does not know its secret can write none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator.registry import seal, unseal
from commutator.trust import RunSecret, adopt


@given(st.binary(), st.binary())
def test_a_sealed_value_is_believed_under_its_own_key_only(key: bytes, value: bytes) -> None:
    with adopt(RunSecret.new()):
        sealed = seal(key, value)
        assert unseal(key, sealed) == value
        assert unseal(key + b"x", sealed) is None
        assert unseal(key, sealed + b"x") is None
        assert unseal(key, value) is None
    with adopt(RunSecret.new()):
        assert unseal(key, sealed) is None, "another run's"
    assert unseal(key, sealed) is None, "of no run"


@given(st.binary(), st.integers(0, 300), st.integers(1, 255))
def test_no_changed_byte_passes(value: bytes, at: int, flip: int) -> None:
    with adopt(RunSecret.new()):
        sealed = bytearray(seal(b"key", value))
        sealed[at % len(sealed)] ^= flip
        assert unseal(b"key", bytes(sealed)) is None


def test_a_process_of_no_run_asks_for_no_proof() -> None:
    assert unseal(b"key", seal(b"key", b"value")) == b"value"

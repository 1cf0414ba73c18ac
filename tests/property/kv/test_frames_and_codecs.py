"""What a tier hands back is the block that was stored, or nothing: headers, codecs, tampering."""

from __future__ import annotations

import attrs
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kv_rig import setups

from commutator.errors import TierError
from commutator_engine_kit.kv.arena import checksum
from commutator_engine_kit.kv.tiers.codecs import (
    HEADER_BYTES,
    AesGcm,
    Codec,
    FrameError,
    FrameHeader,
    Lz4,
    Zstd,
    chain_name,
    decode,
    encode,
)
from commutator_engine_kit.kv.tiers.keys import CodecError

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
SECRET = bytes(range(32))
CHAINS: tuple[tuple[Codec, ...], ...] = (
    (),
    (Zstd(),),
    (Lz4(),),
    (AesGcm(SECRET),),
    (Zstd(), AesGcm(SECRET)),
    (Lz4(), AesGcm(SECRET)),
)
(PLAIN,) = setups({"kind": "dram", "capacity": "1MB"})
chains = st.sampled_from(CHAINS)
encoded_chains = st.sampled_from(CHAINS[1:])
authenticated = st.sampled_from(CHAINS[3:])
# Blocks that shrink, and blocks that do not.
blocks = st.one_of(
    st.binary(min_size=1, max_size=700),
    st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(1, 5000)),
)


def frame(payload: bytes, codec: str = "", block_bytes: int | None = None) -> bytes:
    header = FrameHeader(
        tag=KEY,
        block_bytes=len(payload) if block_bytes is None else block_bytes,
        payload_bytes=len(payload),
        checksum=checksum(payload),
        codec=codec,
    )
    return header.pack() + payload


def read(data: bytes, key: bytes = KEY) -> bytes:
    header = FrameHeader.parse(memoryview(data), key)
    return bytes(header.payload(memoryview(data)))


@given(blocks, st.binary(max_size=9))
def test_a_frame_gives_its_payload_back_whatever_lies_behind_it(block: bytes, rest: bytes) -> None:
    assert read(frame(block) + rest) == block


@given(blocks, st.data())
def test_any_changed_byte_of_a_frame_is_noticed(block: bytes, data: st.DataObject) -> None:
    whole = bytearray(frame(block, "zstd+aes-gcm"))
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        read(bytes(whole))


def test_every_byte_of_a_header_counts() -> None:
    whole = frame(b"block")
    for where in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[where] ^= 1 << bit
            with pytest.raises(FrameError):
                read(bytes(changed))


@given(blocks, st.data())
def test_a_frame_that_ends_too_early_is_no_block(block: bytes, data: st.DataObject) -> None:
    whole = frame(block)
    with pytest.raises(FrameError):
        read(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_another_blocks_frame_is_no_block() -> None:
    with pytest.raises(FrameError, match="another block"):
        read(frame(b"block"), OTHER_KEY)


def test_a_codec_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 48"):
        frame(b"block", "x" * 49)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(FrameError):
        read(data)


@given(chains, blocks)
def test_codecs_give_the_block_back(codecs: tuple[Codec, ...], block: bytes) -> None:
    stored = bytes(encode(codecs, memoryview(block), KEY))
    assert bytes(decode(codecs, memoryview(stored), KEY, len(block))) == block


@given(chains, blocks)
def test_an_encoded_block_fits_into_its_slot(codecs: tuple[Codec, ...], block: bytes) -> None:
    setup = attrs.evolve(PLAIN, codecs=codecs)
    stored = encode(codecs, memoryview(block), KEY)
    header = HEADER_BYTES if codecs else 0
    assert header + len(stored) <= setup.slot_bytes(len(block))


@given(encoded_chains, blocks, st.data())
def test_codecs_meet_damage_with_an_error_or_other_bytes_but_never_more(
    codecs: tuple[Codec, ...], block: bytes, data: st.DataObject
) -> None:
    stored = bytearray(encode(codecs, memoryview(block), KEY))
    where = data.draw(st.integers(0, len(stored) - 1))
    stored[where] ^= data.draw(st.integers(1, 255))
    try:
        plain = decode(codecs, memoryview(bytes(stored)), KEY, len(block))
    except CodecError:
        return
    assert len(plain) == len(block)  # the checksum in front of it finds the rest


@given(authenticated, blocks, st.data())
def test_tampering_with_an_encrypted_block_is_noticed(
    codecs: tuple[Codec, ...], block: bytes, data: st.DataObject
) -> None:
    stored = bytearray(encode(codecs, memoryview(block), KEY))
    where = data.draw(st.integers(0, len(stored) - 1))
    stored[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError, match="sealed"):
        decode(codecs, memoryview(bytes(stored)), KEY, len(block))


@given(authenticated, blocks)
def test_an_encrypted_block_can_be_read_only_as_itself(
    codecs: tuple[Codec, ...], block: bytes
) -> None:
    stored = bytes(encode(codecs, memoryview(block), KEY))
    if len(block) > 8:
        assert block not in stored
    with pytest.raises(CodecError):
        decode(codecs, memoryview(stored), OTHER_KEY, len(block))
    stranger = (*codecs[:-1], AesGcm(bytes(32)))
    with pytest.raises(CodecError):
        decode(stranger, memoryview(stored), KEY, len(block))


@settings(max_examples=50)
@given(encoded_chains, st.binary(max_size=100))
def test_bytes_that_no_codec_made_raise_a_codec_error(
    codecs: tuple[Codec, ...], junk: bytes
) -> None:
    with pytest.raises(CodecError):
        decode(codecs, memoryview(junk), KEY, 5000)


def test_two_encryptions_of_a_block_differ() -> None:
    cipher = (AesGcm(SECRET),)
    block = memoryview(b"the same block")
    assert bytes(encode(cipher, block, KEY)) != bytes(encode(cipher, block, KEY))


def test_a_bomb_is_not_unpacked() -> None:
    big = bytes(64 << 20)
    with pytest.raises(CodecError, match="decompressed size of 67108864 bytes"):
        decode((Zstd(),), memoryview(zstandard.compress(big)), KEY, 1000)
    with pytest.raises(CodecError, match="more than"):
        decode((Lz4(),), encode((Lz4(),), memoryview(big), KEY), KEY, 1000)


def test_a_block_of_another_size_is_no_block() -> None:
    for codecs in CHAINS:
        stored = bytes(encode(codecs, memoryview(b"x" * 100), KEY))
        with pytest.raises(CodecError, match="100 bytes, not 99"):
            decode(codecs, memoryview(stored), KEY, 99)


def test_the_order_of_codecs_is_in_their_name() -> None:
    assert chain_name(CHAINS[4]) == "zstd+aes-gcm"
    assert not chain_name(())


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(TierError, match="17 bytes"):
        AesGcm(bytes(17))

"""The handshake of a run, for every way in which bytes may arrive and strangers may answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.trust.handshake import (
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    ClientHandshake,
    HandshakeError,
    ServerHandshake,
)
from commutator.trust.secret import RunSecret

OURS, THEIRS = RunSecret.from_text("ours"), RunSecret.from_text("theirs")
HERE = "127.0.0.1:40001"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    yield from (data[a:b] for a, b in itertools.pairwise(edges) if a < b)


def fed(side: ClientHandshake | ServerHandshake, data: bytes, cuts: Sequence[int] = ()) -> bytes:
    """What ``side`` answers; checks that nothing is passed on before the proof is complete."""
    answer = b""
    for piece in pieces(data, cuts):
        sent, rest = side.feed(piece)
        assert side.proven or not rest
        answer += sent
    return answer


@given(st.lists(st.integers(min_value=0), max_size=6), st.lists(st.integers(min_value=0)))
def test_both_ends_of_one_run_prove_themselves_however_the_bytes_arrive(
    at_server: list[int], at_client: list[int]
) -> None:
    client, server = ClientHandshake(OURS, "s", HERE), ServerHandshake(OURS, "s", HERE)
    challenge = fed(server, client.begin(), at_server)
    proof = fed(client, challenge, at_client)
    assert client.proven
    assert not server.proven
    assert fed(server, proof, at_server) == b""
    assert server.proven


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_what_follows_the_proof_is_the_first_message(to_server: bytes, to_client: bytes) -> None:
    client, server = ClientHandshake(OURS, "s", HERE), ServerHandshake(OURS, "s", HERE)
    challenge, _ = server.feed(client.begin())
    proof, rest = client.feed(challenge + to_client)
    assert rest == to_client
    assert server.feed(proof + to_server) == (b"", to_server)


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(min_value=0), max_size=4))
@pytest.mark.security
def test_no_bytes_of_a_stranger_prove_anything(data: bytes, cuts: list[int]) -> None:
    for side in (ServerHandshake(OURS, "s", HERE), ClientHandshake(OURS, "s", HERE)):
        side.begin()
        for sent in (data, MAGIC + data):
            try:
                fed(side, sent, cuts)
            except HandshakeError:
                break
        assert not side.proven


@pytest.mark.security
@pytest.mark.parametrize(
    ("secret", "service", "address"),
    [(THEIRS, "s", HERE), (OURS, "other", HERE), (OURS, "s", "127.0.0.1:40002")],
    ids=["another run", "another service", "another address: the messages were passed on"],
)
def test_the_client_sends_no_proof_to_any_other_server(
    secret: RunSecret, service: str, address: str
) -> None:
    client, server = ClientHandshake(OURS, "s", HERE), ServerHandshake(secret, service, address)
    challenge, _ = server.feed(client.begin())
    with pytest.raises(HandshakeError, match="secret"):
        client.feed(challenge)
    assert not client.proven


@pytest.mark.security
def test_the_server_refuses_its_own_proof_and_an_old_one() -> None:
    server = ServerHandshake(OURS, "s", HERE)
    challenge, _ = server.feed(ClientHandshake(OURS, "s", HERE).begin())
    with pytest.raises(HandshakeError):
        server.feed(challenge[-MAC_BYTES:])  # reflected

    client = ClientHandshake(OURS, "s", HERE)
    first = ServerHandshake(OURS, "s", HERE)
    challenge, _ = first.feed(client.begin())
    proof, _ = client.feed(challenge)
    replayed = ServerHandshake(OURS, "s", HERE)
    replayed.feed(MAGIC + client.begin()[len(MAGIC) :])
    with pytest.raises(HandshakeError):
        replayed.feed(proof)


def test_a_peer_that_speaks_another_protocol_is_refused_at_its_first_byte() -> None:
    with pytest.raises(HandshakeError, match="handshake"):
        ServerHandshake(OURS, "s", HERE).feed(b"G")
    with pytest.raises(HandshakeError, match="handshake"):
        ClientHandshake(OURS, "s", HERE).feed(b"\x00\x00\x00\x05")


def test_a_server_keeps_no_more_than_one_message_of_a_stranger() -> None:
    server = ServerHandshake(OURS, "s", HERE)
    server.feed(MAGIC[:4])
    assert server.feed(b"") == (b"", b"")
    with pytest.raises(HandshakeError):
        server.feed(MAGIC[4:] + bytes(HELLO_BYTES + (1 << 20)))

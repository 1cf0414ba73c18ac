"""Documents of the registry in memory: restarts, files, registries that have none, and who may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator import WorkerRecord
from commutator.contract.registry import Change, Document, Registry
from commutator.contract.worker import Role
from commutator.errors import RegistryError
from commutator.registry.client import RegistryClient
from commutator.registry.documents import Documents, load_documents, save_documents
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator_testing.registries import make_worker

NAMES = st.sampled_from("abc")
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("write"), NAMES, st.binary(max_size=4), st.booleans()),
        st.tuples(st.just("delete"), NAMES, st.just(b""), st.booleans()),
        st.tuples(st.just("restart"), NAMES, st.just(b""), st.just(True)),
    ),
    max_size=30,
)


@given(CHANGES)
def test_documents_are_a_dictionary_of_versions_that_never_come_again(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str, bytes, bool]]
) -> None:
    path = tmp_path_factory.mktemp("documents") / "d"
    documents, model, used = Documents(), dict[str, tuple[int, bytes]](), set[int]()
    for what, name, value, right in changes:
        version, _ = model.get(name, (0, b""))
        expected = version if right else version + 1
        if what == "write":
            changed = documents.written(name, value, expected)
            assert (changed is not None) == right
            if changed is not None:
                model[name] = (changed.version(name), value)
                assert model[name][0] > max(used, default=0)
                used.add(model[name][0])
        elif what == "delete":
            changed = documents.deleted(name, expected)
            assert (changed is not None) == (right and version > 0)
            if changed is not None:
                del model[name]
        else:
            save_documents(path, documents)
            changed = load_documents(path)
            assert changed == documents
        documents = documents if changed is None else changed
        found = {one.name: (one.version, one.value) for one in documents.by_name.values()}
        assert found == model


async def test_documents_outlive_a_registry_with_a_state_file(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    first = MemoryRegistry(state_file=file)
    version = await first.write_document("plan", b"\xff\x00", expected=0)
    gone = await first.write_document("gone", b"", expected=0)
    assert version is not None
    assert gone is not None
    await first.delete_document("gone", expected=gone)
    await first.register(make_worker("w"), 60.0)
    await first.set_draining("w", True)
    await first.close()
    second = MemoryRegistry(state_file=file)
    assert await second.read_document("plan") == Document(
        name="plan", version=version, value=b"\xff\x00"
    )
    again = await second.write_document("gone", b"", expected=0)
    assert again not in (version, gone)
    assert await second.write_document("plan", b"", expected=version) is not None
    assert b"w" in file.read_bytes(), "what operators want of workers is in its own file"
    await second.close()


async def test_without_a_file_a_version_of_before_is_none_of_now() -> None:
    versions = set()
    for _ in range(3):
        registry = MemoryRegistry()
        versions.add(await registry.write_document("d", b"", expected=0))
    assert len(versions) == 3


async def test_what_cannot_be_kept_has_not_happened(tmp_path: Path) -> None:
    registry = MemoryRegistry(state_file=tmp_path / "state.json")
    version = await registry.write_document("d", b"1", expected=0)
    assert version is not None
    (tmp_path / "state.json.documents.draft").mkdir()
    with pytest.raises(RegistryError, match="documents: Is a directory"):
        await registry.write_document("d", b"2", expected=version)
    document = await registry.read_document("d")
    assert document is not None
    assert (document.value, document.version) == (b"1", version)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json.documents").write_bytes(b"\xc1")
    with pytest.raises(RegistryError, match=r"state\.json\.documents: .*remove it to forget"):
        MemoryRegistry(state_file=tmp_path / "state.json")


class OfYesterday(Registry):
    """A registry of a plugin that knows no documents."""

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        return 1

    async def keep_alive(self, lease_id: int) -> bool:
        return True

    async def deregister(self, lease_id: int, reason: str) -> None:
        pass

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return False

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return False

    async def watch(self) -> AsyncIterator[Sequence[Change]]:
        yield []

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("remote", [False, True])
async def test_a_registry_without_documents_says_so(remote: bool) -> None:
    registry: Registry = OfYesterday()
    server = RegistryServer(registry)
    if remote:
        registry = RegistryClient(await server.start())
    refusal = "document plan: OfYesterday keeps no documents"
    with pytest.raises(RegistryError, match=refusal):
        await registry.read_document("plan")
    with pytest.raises(RegistryError, match=refusal):
        await registry.write_document("plan", b"", expected=0)
    with pytest.raises(RegistryError, match=refusal):
        await registry.delete_document("plan", expected=1)
    if not remote:
        with pytest.raises(RegistryError, match=refusal):
            registry.watch_document("plan")
    await registry.close()
    await server.stop()


async def test_a_watcher_goes_on_after_its_server_came_back() -> None:
    memory = MemoryRegistry()
    server = RegistryServer(memory)
    address = await server.start()
    client = RegistryClient(address)
    async with aclosing(client.watch_document("d")) as states:  # type: ignore[type-var]
        assert await anext(states) is None
        await server.stop()
        version = await memory.write_document("d", b"meanwhile", expected=0)
        host, port = address.split(":")
        server = RegistryServer(memory)
        await server.start(host, int(port))
        async with asyncio.timeout(10):
            state = await anext(states)
        assert state is not None
        assert (state.version, state.value) == (version, b"meanwhile")
    await client.close()
    await server.stop()

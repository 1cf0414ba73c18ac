"""Documents in etcd: their version is the revision at which etcd stored them."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator

from commutator.contract.registry import Document, Registry, check_document
from commutator.errors import RegistryError
from commutator.registry import seal, unseal
from commutator_etcd.client import EtcdClient, Stored, delete, put, unchanged
from commutator_etcd.view import Keys

log = logging.getLogger(__name__)

_MARK_BYTES = 16
"""Before each value: random, so that a writer knows its own again, whose answer was lost."""
_READ_AGAIN_S = 5.0
"""Without a change a watched document is read again after this time, in case the watch is deaf."""
_PAUSE_S = (0.1, 0.5)
"""After a failure; by chance, so that not all come back at once."""


class EtcdDocuments(Registry):
    """The documents of one cluster. Used from one event loop."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def read_document(self, name: str) -> Document | None:
        check_document(name)
        stored = await self._client.get(self._keys.document(name))
        if stored is None:
            return None
        value = unseal(self._keys.document(name), stored.value)
        if value is None:
            raise RegistryError(
                f"document {name}: no process with this deployment's runtime.secret wrote it; "
                "deployments of one cluster need the same secret"
            )
        return Document(name=name, version=stored.mod_revision, value=value[_MARK_BYTES:])

    async def write_document(self, name: str, value: bytes, *, expected: int) -> int | None:
        check_document(name, value)
        key, marked = self._keys.document(name), secrets.token_bytes(_MARK_BYTES) + value
        sealed = seal(key, marked)
        revision = await self._client.change([_is_at(key, expected)], [put(key, sealed)])
        if revision:
            return revision
        # The client asks a second time when an answer was lost: what was first then is our own.
        stored = await self._client.get(key)
        return stored.mod_revision if stored is not None and stored.value == sealed else None

    async def delete_document(self, name: str, *, expected: int) -> bool:
        check_document(name)
        key = self._keys.document(name)
        if not expected:
            return False
        return bool(await self._client.change([_is_at(key, expected)], [delete(key)]))

    async def watch_document(self, name: str) -> AsyncGenerator[Document | None, None]:
        check_document(name)
        key, known = self._keys.document(name), -1
        while True:
            try:
                # The revision from which on to watch is from before the document is read.
                revision = (await self._client.list(key)).revision
                document = await self.read_document(name)
                version = 0 if document is None else document.version
                if version != known:
                    known = version
                    yield document
                await self._changed(key, revision + 1)
            except RegistryError as error:
                log.warning("document %s: %s", name, error)
                await asyncio.sleep(random.uniform(*_PAUSE_S))  # noqa: S311

    async def _changed(self, key: bytes, revision: int) -> None:
        """Wait until the key may have changed. Raises RegistryError."""
        async with self._client.watch(key, revision) as watch:
            try:
                async with asyncio.timeout(_READ_AGAIN_S):
                    while key not in (await watch.read()).delta:
                        pass
            except TimeoutError:
                return


def _is_at(key: bytes, version: int) -> object:
    """A comparison: the document is of that version; 0: there is none."""
    return unchanged(key, Stored(b"", version, 0) if version else None)

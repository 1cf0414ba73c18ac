"""Documents in the API server: an object each, whose own version is stored beside the value."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
from collections.abc import AsyncGenerator

from attrs import frozen

from commutator.contract.registry import Document, Registry, check_document
from commutator.errors import RegistryError
from commutator_kubernetes.client import ApiClient, ApiError, Json
from commutator_kubernetes.view import GROUP, VERSION, Places

log = logging.getLogger(__name__)

_READ_AGAIN_S = 2.0
"""How often a watched document is read: documents change by the minute."""
_PAUSE_S = (0.1, 0.5)
"""After a failure; by chance, so that not all come back at once."""


@frozen(kw_only=True)
class _Stored:
    """What the object of a document says."""

    name: str
    version: int
    value: str
    """In base64."""


class KubernetesDocuments(Registry):
    """The documents of one cluster. Used from one event loop."""

    def __init__(self, client: ApiClient, places: Places) -> None:
        self._client = client
        self._places = places
        self._changed = asyncio.Condition()
        """This process has written a document."""

    async def read_document(self, name: str) -> Document | None:
        check_document(name)
        return (await self._read(name))[1]

    async def write_document(self, name: str, value: bytes, *, expected: int) -> int | None:
        check_document(name, value)
        stored, document = await self._read(name)
        if expected != (0 if document is None else document.version):
            return None
        # Also after it was deleted, no version comes again: the time goes on.
        version = max(expected + 1, time.time_ns() // 1000)
        body = self._body(name, version, value)
        place = self._places.documents
        try:
            if stored is None:
                await self._client.create(place, body)
            else:
                body["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
                await self._client.replace(place, body)
        except ApiError as error:
            if not (error.is_conflict or (stored is not None and error.is_missing)):
                raise
            return None
        await self._tell()
        return version

    async def delete_document(self, name: str, *, expected: int) -> bool:
        check_document(name)
        stored, document = await self._read(name)
        if stored is None or document is None or document.version != expected:
            return False
        metadata = stored["metadata"]
        try:
            deleted = await self._client.delete(
                self._places.documents,
                metadata["name"],
                uid=metadata["uid"],
                version=metadata["resourceVersion"],
            )
        except ApiError as error:
            if error.is_conflict:
                return False
            raise
        await self._tell()
        return deleted

    async def watch_document(self, name: str) -> AsyncGenerator[Document | None, None]:
        check_document(name)
        known = -1
        while True:
            try:
                document = await self.read_document(name)
                version = 0 if document is None else document.version
                if version != known:
                    known = version
                    yield document
                else:
                    await self._until_changed()
            except RegistryError as error:
                log.warning("document %s: %s", name, error)
                await asyncio.sleep(random.uniform(*_PAUSE_S))  # noqa: S311

    async def _until_changed(self) -> None:
        """Wait until this process writes one, or until it is time to read again."""
        try:
            async with asyncio.timeout(_READ_AGAIN_S), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _read(self, name: str) -> tuple[Json | None, Document | None]:
        """The object, and the document that it holds. Raises RegistryError."""
        place, key = self._places.documents, self._places.name("document", name)
        stored = await self._client.get(place, key)
        if stored is None:
            return None, None
        held = self._places.decoded(stored, _Stored)
        if held is None or held.name != name:
            raise RegistryError(
                f"document {name}: no process with this deployment's runtime.secret wrote it; "
                "deployments of one cluster need the same secret"
            )
        value = base64.b64decode(held.value)
        return stored, Document(name=name, version=held.version, value=value)

    def _body(self, name: str, version: int, value: bytes) -> Json:
        key = self._places.name("document", name)
        held = _Stored(name=name, version=version, value=base64.b64encode(value).decode())
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "CommutatorDocument",
            "metadata": {"name": key, "labels": self._places.labels},
            "spec": {"document": name, "sealed": self._places.encoded(key, held)},
        }

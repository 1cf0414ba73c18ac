"""A small API server for tests: what Kubernetes does with objects, watches and faults, in memory.

It keeps objects of any kind, with versions, unique ids, preconditions, pages, label selectors,
watches with bookmarks, compaction, merge patches and server-side apply (of whole fields), and
deletes what a deleted owner had. Pods that are deleted and have a node stay, with a
`deletionTimestamp`, until ``FakeKubernetes.remove`` is called for them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web
from attrs import define, field

__all__ = ["FakeKubernetes"]

Json = dict[str, Any]

_HISTORY = 1000


@define(eq=False)
class _Watch:
    """One open watch."""

    path: str
    selector: str
    queue: asyncio.Queue[Json | None] = field(factory=asyncio.Queue)


class FakeKubernetes:
    """Listens on a loopback port. A context manager, of one event loop."""

    def __init__(self, bookmark_s: float = 60.0, kinds: set[str] | None = None) -> None:
        """``kinds``: the plurals that it knows; None: all."""
        self.objects: dict[str, Json] = {}
        """By path."""
        self.version = 100
        self.requests: list[tuple[str, str]] = []
        """Method and path of everything that was asked."""
        self.fault: Callable[[web.Request], web.Response | None] = lambda _: None
        """What is answered instead; None: nothing else."""
        self.frozen = False
        """Watches stay open, and say nothing more."""
        self.token: str | None = None
        """What clients have to show."""
        self.on_change: Callable[[str, str, Json], None] = lambda *_: None
        """Called with the event, the path, and the object."""
        self._kinds = kinds
        self._bookmark_s = bookmark_s
        self._history: list[tuple[int, str, str, Json]] = []
        self._compacted = 0
        self._watches: set[_Watch] = set()
        self._uids = itertools.count(1)
        self._gate = asyncio.Event()
        self._gate.set()
        self._pages: dict[str, tuple[list[Json], int]] = {}

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._gate.set()
        await self._runner.cleanup()

    # ------------------------------------------------------------- what tests do

    def kubeconfig(self, folder: Path) -> str:
        """Write a kubeconfig that leads here; returns its path."""
        path = folder / "kubeconfig"
        data = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": self.token} if self.token else {}}],
        }
        path.write_text(yaml.safe_dump(data))
        return str(path)

    def stop(self) -> None:
        """From now on nothing is answered, and connections stay, as with SIGSTOP."""
        self._gate.clear()

    def go_on(self) -> None:
        self._gate.set()

    def cut(self) -> None:
        """End all watches."""
        for watch in self._watches:
            watch.queue.put_nowait(None)

    def compact(self) -> None:
        """Forget the past: who watches from before now gets a 410."""
        self._compacted = self.version
        self._history.clear()

    def quietly_delete(self, path: str) -> None:
        """Without telling any watch."""
        del self.objects[path]
        self.version += 1

    def remove(self, path: str) -> None:
        """Have an object, such as a pod that has ended, go for good."""
        if (item := self.objects.pop(path, None)) is None:
            return
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", path, item)
        for other, one in list(self.objects.items()):
            owners = one["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                self.remove(other)

    def put(self, path: str, item: Json) -> Json:
        """Store an object as it is."""
        known = self.objects.get(path)
        if known is not None and {**known, "metadata": _plain(known)} == {
            **item,
            "metadata": _plain(item),
        }:
            return known
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        item["metadata"].setdefault("uid", f"uid-{next(self._uids)}")
        self.objects[path] = item
        self._tell("ADDED" if known is None else "MODIFIED", path, item)
        return item

    # ------------------------------------------------------------- the server

    def _tell(self, kind: str, path: str, item: Json) -> None:
        self._history.append((self.version, kind, path, copy.deepcopy(item)))
        del self._history[:-_HISTORY]
        for watch in self._watches:
            if _parent(path) == watch.path and _chosen(item, watch.selector):
                watch.queue.put_nowait({"type": kind, "object": copy.deepcopy(item)})
        self.on_change(kind, path, item)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        await self._gate.wait()
        if (
            self.token is not None
            and request.headers.get("Authorization") != f"Bearer {self.token}"
        ):
            return _status(401, "Unauthorized")
        if (instead := self.fault(request)) is not None:
            return instead
        parts = request.path.strip("/").split("/")
        plural = parts[parts.index("namespaces") + 2] if "namespaces" in parts else parts[-1]
        if self._kinds is not None and plural not in self._kinds:
            return web.Response(status=404, text="404 page not found")
        is_collection = request.path.rstrip("/").endswith("/" + plural)
        if is_collection and request.method == "GET":
            if request.query.get("watch"):
                return await self._watch(request)
            return self._list(request)
        body = json.loads(await request.read() or b"{}")
        if is_collection:
            return self._create(request, body)
        name = parts[parts.index(plural) + 1]
        path = request.path if request.path.endswith(name) else _parent(request.path)
        return self._change(request, path, name, plural, body)

    def _list(self, request: web.Request) -> web.Response:
        limit = int(request.query.get("limit", "500"))
        token = request.query.get("continue")
        if token:
            rest, version = self._pages.pop(token)
        else:
            rest, version = (
                [
                    item
                    for path, item in sorted(self.objects.items())
                    if _parent(path) == request.path
                    and _chosen(item, request.query.get("labelSelector", ""))
                ],
                self.version,
            )
        page, rest = rest[:limit], rest[limit:]
        metadata = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"page-{next(self._uids)}"
            self._pages[metadata["continue"]] = (rest, version)
        return web.json_response({"metadata": metadata, "items": page})

    def _create(self, request: web.Request, body: Json) -> web.Response:
        name = body["metadata"]["name"]
        path = f"{request.path}/{name}"
        if path in self.objects:
            return _status(409, "AlreadyExists", name)
        body["metadata"].pop("resourceVersion", None)
        namespace = request.path.split("/namespaces/")[1].partition("/")[0]
        body["metadata"] |= {"namespace": namespace, "uid": f"uid-{next(self._uids)}"}
        return web.json_response(self.put(path, body), status=201)

    def _change(
        self, request: web.Request, path: str, name: str, plural: str, body: Json
    ) -> web.Response:
        stored = self.objects.get(path)
        applies = request.headers.get("Content-Type") == "application/apply-patch+yaml"
        if stored is None and not applies:
            return _status(404, "NotFound", name)
        if request.method == "GET":
            return web.json_response(stored)
        if request.method == "DELETE":
            assert stored is not None
            for what, value in (body.get("preconditions") or {}).items():
                if stored["metadata"][what] != value:
                    return _status(409, "Conflict", name)
            return self._delete(path, stored, plural, body)
        if request.method == "PUT":
            assert stored is not None
            given = body["metadata"].get("resourceVersion")
            if given is not None and given != stored["metadata"]["resourceVersion"]:
                return _status(409, "Conflict", name)
            body["metadata"]["uid"] = stored["metadata"]["uid"]
            body["metadata"]["namespace"] = stored["metadata"]["namespace"]
            return web.json_response(self.put(path, body))
        if stored is None:
            namespace = path.split("/namespaces/")[1].partition("/")[0]
            body["metadata"]["namespace"] = namespace
            return web.json_response(self.put(path, body), status=201)
        return web.json_response(self.put(path, _merged(copy.deepcopy(stored), body)))

    def _delete(self, path: str, stored: Json, plural: str, body: Json) -> web.Response:
        grace_s = body.get("gracePeriodSeconds")
        if plural == "pods" and grace_s != 0 and (stored.get("spec") or {}).get("nodeName"):
            item = copy.deepcopy(stored)
            item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            default = item["spec"].get("terminationGracePeriodSeconds", 30)
            item["metadata"]["deletionGracePeriodSeconds"] = default if grace_s is None else grace_s
            return web.json_response(self.put(path, item))
        self.remove(path)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        selector = request.query.get("labelSelector", "")
        answer = web.StreamResponse()
        await answer.prepare(request)

        async def say(event: Json) -> None:
            await answer.write(json.dumps(event).encode() + b"\n")

        if since < self._compacted:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await say({"type": "ERROR", "object": gone})
            return answer
        watch = _Watch(request.path, selector)
        for version, kind, path, item in self._history:
            if version > since and _parent(path) == request.path and _chosen(item, selector):
                watch.queue.put_nowait({"type": kind, "object": item})
        self._watches.add(watch)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    event = await self._event(watch)
                    while self.frozen:
                        await asyncio.sleep(0.01)
                    if event is None:
                        break
                    await say(event)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.discard(watch)
        return answer

    async def _event(self, watch: _Watch) -> Json | None:
        try:
            async with asyncio.timeout(self._bookmark_s):
                return await watch.queue.get()
        except TimeoutError:
            metadata = {"resourceVersion": str(self.version)}
            return {"type": "BOOKMARK", "object": {"metadata": metadata}}


def _plain(item: Json) -> Json:
    return {k: v for k, v in item["metadata"].items() if k != "resourceVersion"}


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _chosen(item: Json, selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [one.split("=", 1) for one in selector.split(",") if one]
    return all(labels.get(name) == value for name, value in wanted)


def _merged(stored: Json, change: Json) -> Json:
    for name, value in change.items():
        if value is None:
            stored.pop(name, None)
        elif isinstance(value, dict) and isinstance(stored.get(name), dict):
            _merged(stored[name], value)
        else:
            stored[name] = value
    return stored


def _status(code: int, reason: str, name: str = "") -> web.Response:
    details = {"name": name} if name else {}
    said = {"kind": "Status", "code": code, "reason": reason, "message": reason, "details": details}
    return web.json_response(said, status=code)

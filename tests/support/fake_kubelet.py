"""A small kubelet for tests: runs the containers of a ``FakeKubernetes``'s pods as processes here.

It does what a launcher of pods relies on: mounts ConfigMaps, fills environment variables from the
pod, starts containers again as `restartPolicy` says, tells how they ended, and asks them to end by
SIGTERM, then kills them after the grace.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.support.fake_kubernetes import FakeKubernetes

__all__ = ["FakeKubelet"]

Json = dict[str, Any]


class FakeKubelet:
    """A node of one server. A context manager, of the server's event loop."""

    def __init__(self, api: FakeKubernetes, address: str = "127.0.0.1") -> None:
        self.has_room = True
        """Whether new pods are scheduled."""
        self._api = api
        self._address = address
        self._pods: dict[str, asyncio.Task[None]] = {}
        """By unique id."""
        self._deleted: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="fake-kubelet-"))
        self._api.on_change = self._changed
        return self

    async def __aexit__(self, *_: object) -> None:
        self._api.on_change = lambda *_: None
        for task in self._pods.values():
            task.cancel()
        await asyncio.gather(*self._pods.values(), return_exceptions=True)
        shutil.rmtree(self._folder)

    def _changed(self, kind: str, path: str, item: Json) -> None:
        if "/pods/" not in path:
            return
        uid = item["metadata"]["uid"]
        if kind == "DELETED" or item["metadata"].get("deletionTimestamp"):
            if uid in self._deleted:
                self._deleted[uid].set()
        elif uid not in self._pods:
            self._deleted[uid] = asyncio.Event()
            self._pods[uid] = asyncio.create_task(self._run(path, uid))

    def _set(self, path: str, uid: str, **status: Any) -> None:
        stored = self._api.objects.get(path)
        if stored is not None and stored["metadata"]["uid"] == uid:
            item = copy.deepcopy(stored)
            item["status"] = {**item.get("status", {}), **status}
            self._api.put(path, item)

    async def _run(self, path: str, uid: str) -> None:
        pod, deleted = self._api.objects[path], self._deleted[uid]
        if not self.has_room:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            message = "0/1 nodes are available: 1 Insufficient cpu."
            self._set(path, uid, phase="Pending", conditions=[{**said, "message": message}])
            return
        item = copy.deepcopy(pod)
        item["spec"]["nodeName"] = "fake"
        item["status"] = {"phase": "Pending", "podIP": self._address}
        self._api.put(path, item)
        folder = self._folder / uid
        folder.mkdir()
        last: Json = {}
        while not deleted.is_set():
            ended = await self._live(path, uid, pod, folder, last)
            last = {"terminated": ended}
            if deleted.is_set():
                break
            if ended["exitCode"] == 0:
                container = {"name": "agent", "state": last}
                self._set(path, uid, phase="Succeeded", containerStatuses=[container])
                await deleted.wait()
                break
            await asyncio.sleep(0.1)
        self._api.remove(path)

    async def _live(self, path: str, uid: str, pod: Json, folder: Path, last: Json) -> Json:
        """Run the container once; returns how it ended."""
        (container,) = pod["spec"]["containers"]
        places = self._mounted(path, pod, container, folder)
        message = folder / "message"
        message.write_text("")
        places[container["terminationMessagePath"]] = str(message)
        argv = [sys.executable if one == "python" else places.get(one, one)
                for one in container["command"]]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *argv, env={**os.environ, **self._env(pod, uid, container)}, start_new_session=True
        )
        running = {"name": "agent", "state": {"running": {}}, "lastState": last}
        self._set(path, uid, phase="Running", containerStatuses=[running])
        ended = asyncio.create_task(process.wait())
        deleted = asyncio.create_task(self._deleted[uid].wait())
        try:
            await asyncio.wait({ended, deleted}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                process.send_signal(signal.SIGTERM)
                stored = self._api.objects.get(path, pod)
                grace_s = stored["metadata"].get("deletionGracePeriodSeconds", 0)
                await asyncio.wait({ended}, timeout=grace_s)
        finally:
            deleted.cancel()
            if not ended.done():
                process.kill()
            status = await ended
        reason = "Completed" if status == 0 else "Error"
        code = 128 - status if status < 0 else status
        return {"exitCode": code, "reason": reason, "message": message.read_text()}

    def _mounted(self, path: str, pod: Json, container: Json, folder: Path) -> dict[str, str]:
        """Write the volumes; returns where they are, by where they would be mounted."""
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        places = {}
        for mount in container["volumeMounts"]:
            place = folder / mount["name"]
            place.mkdir(exist_ok=True)
            places[mount["mountPath"]] = str(place)
            if (source := volumes[mount["name"]].get("configMap")) is not None:
                base = path.rpartition("/pods/")[0]
                data = self._api.objects[f"{base}/configmaps/{source['name']}"]["data"]
                for name, text in data.items():
                    (place / name).write_text(text)
        return places

    def _env(self, pod: Json, uid: str, container: Json) -> dict[str, str]:
        known = {
            "status.podIP": self._address,
            "metadata.name": pod["metadata"]["name"],
            "metadata.uid": uid,
        }
        return {
            one["name"]: one.get("value") or known[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }

"""A real node for ``RealKubernetes``: containerd and a kubelet, as root.

Containers see this machine's `/usr`, Python and checkout, read-only, so no image has to be built.
They use this machine's network.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.support.guarded import ServerGuard, end_at_once
from tests.support.real_kubernetes import RealKubernetes, build_folder

__all__ = ["IMAGE", "RealNode", "here_in_a_pod"]

IMAGE = "docker.io/library/commutator:test"
_PAUSE = "docker.io/library/pause:test"
_LINKS = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
_CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{build}/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{build}/bin/runc"
"""
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "commutator-test",
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.213.0.0/24"}]]},
        }
    ],
}


def here_in_a_pod(*writable: Path) -> dict[str, Any]:
    """A template for pods that run this Python, and share processes and files with the test."""
    read = [Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), Path.cwd()]
    places = {f"h{n}": place for n, place in enumerate(dict.fromkeys([*read, *writable]))}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {
        "spec": {
            "hostNetwork": True,
            "hostPID": True,
            # Files of this checkout belong to root, and may be hidden from others.
            "securityContext": {
                "runAsNonRoot": False,
                "runAsUser": 0,
                "runAsGroup": 0,
                "fsGroup": 0,
            },
            "volumes": [
                {"name": name, "hostPath": {"path": str(place)}} for name, place in places.items()
            ],
            "containers": [
                {
                    "name": "agent",
                    "env": [{"name": "PATH", "value": path}],
                    "volumeMounts": [
                        {"name": name, "mountPath": str(place), "readOnly": place not in writable}
                        for name, place in places.items()
                    ],
                }
            ],
        }
    }


class RealNode:
    """One node. A context manager."""

    def __init__(self, cluster: RealKubernetes, folder: Path, name: str = "node-0") -> None:
        self.name = name
        self.address = _own_address()
        self._cluster = cluster
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        build = build_folder()
        self._env = {
            "PATH": f"{build / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{build / 'root/usr/lib/x86_64-linux-gnu'}",
        }

    def __enter__(self) -> Self:
        (self._folder / "cni").mkdir(parents=True)
        (self._folder / "cni" / "10-pods.conflist").write_text(json.dumps(_NETWORK))
        config = _CONTAINERD.format(folder=self._folder, build=build_folder(), pause=_PAUSE)
        (self._folder / "containerd.toml").write_text(config)
        self._guard = ServerGuard(self._folder / "of-the-guard")
        try:
            self._run("containerd", "--config", str(self._folder / "containerd.toml"))
            self._until((self._folder / "containerd.sock").exists, "containerd")
            self._import(
                _PAUSE, {"pause": (build_folder() / "bin" / "pause").read_bytes()}, ["/pause"]
            )
            self._import(IMAGE, {}, ["/bin/true"])
            self._run(
                "kubelet",
                f"--kubeconfig={self._cluster.kubeconfig(self._folder)}",
                "--container-runtime=remote",
                f"--container-runtime-endpoint=unix://{self._folder}/containerd.sock",
                f"--root-dir={self._folder / 'kubelet'}",
                f"--cert-dir={self._folder / 'pki'}",
                f"--hostname-override={self.name}",
                f"--node-ip={self.address}",
                "--fail-swap-on=false",
                "--cgroups-per-qos=false",
                "--enforce-node-allocatable=",
                "--cgroup-driver=cgroupfs",
                "--address=127.0.0.1",
                "--authorization-mode=AlwaysAllow",
                "--read-only-port=0",
                "--healthz-port=0",
                "--eviction-hard=nodefs.available<1%,imagefs.available<1%",
            )
            self._until(self._is_ready, "kubelet")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._processes) > 1:
            end_at_once(self._processes.pop())
        for what in ("tasks", "containers"):
            with suppress(subprocess.CalledProcessError):
                for one in self._ctr(what, "ls", "-q").split():
                    with suppress(subprocess.CalledProcessError):
                        if what == "tasks":
                            self._ctr("tasks", "kill", "-a", "-s", "SIGKILL", one)
                            time.sleep(0.2)
                        self._ctr(what, "rm", one)
        while self._processes:
            end_at_once(self._processes.pop())
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted(
            (one for one in mounts if one.startswith(f"{self._folder}/")), reverse=True
        ):
            subprocess.run(["umount", "-l", mount], check=False)
        self._guard.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        with suppress(OSError):
            node = self._cluster.ask("GET", f"/api/v1/nodes/{self.name}")
            conditions = (node.get("status") or {}).get("conditions") or []
            return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return False

    def _run(self, program: str, *arguments: str) -> None:
        argv = [str(build_folder() / "bin" / program), *arguments]
        log = self._folder / f"{program}.log"
        self._processes.append(self._guard.start(argv, log, self._env))

    def _until(self, look: Any, program: str) -> None:
        deadline_s = time.monotonic() + 120.0
        while not look():
            if time.monotonic() > deadline_s or self._processes[-1].poll() is not None:
                raise TimeoutError((self._folder / f"{program}.log").read_text()[-4000:])
            time.sleep(0.2)

    def _ctr(self, *arguments: str) -> str:
        argv = ["ctr", "-a", f"{self._folder}/containerd.sock", "-n", "k8s.io", *arguments]
        env = {**os.environ, **self._env}
        done = subprocess.run(
            [str(build_folder() / "bin" / "ctr"), *argv[1:]],
            env=env, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout

    def _import(self, name: str, files: dict[str, bytes], command: list[str]) -> None:
        """An image of one layer."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            for folder in ("usr", "tmp", "etc", "proc", "sys", "dev"):
                _add(tar, folder, kind=tarfile.DIRTYPE, mode=0o755)
            for link, target in _LINKS.items():
                _add(tar, link, kind=tarfile.SYMTYPE, target=target)
            for file, content in files.items():
                _add(tar, file, content=content, mode=0o755)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": command},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"],
            },
        }
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        path = self._folder / "image.tar"
        with tarfile.open(path, "w") as tar:
            _add(tar, "config.json", content=json.dumps(config).encode())
            _add(tar, "layer.tar", content=layer.getvalue())
            _add(tar, "manifest.json", content=json.dumps(manifest).encode())
        self._ctr("images", "import", str(path))


def _add(
    tar: tarfile.TarFile,
    name: str,
    *,
    content: bytes = b"",
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.size = kind, mode, target, len(content)
    tar.addfile(info, io.BytesIO(content))


def _own_address() -> str:
    """An address of this machine that is not the loopback interface's."""
    done = subprocess.run(["hostname", "-I"], check=True, capture_output=True, text=True)
    return done.stdout.split()[0]

"""A real control plane of Kubernetes for tests: etcd, API server, controllers, scheduler; no node.

`make kube` builds it once, into a cache; it needs Debian 12 and root then, and nothing but loopback
afterwards. ``python -m tests.support.real_kubernetes`` runs one until Ctrl-C.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.guarded import ServerGuard, end_at_once

from commutator.launcher.ports import PortPicker

__all__ = ["RealKubernetes", "build_folder", "real_kubernetes"]

Json = dict[str, Any]
_HOST = "127.0.0.1"


def build_folder() -> Path:
    """Where `make kube` builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KUBERNETES_BUILD") or Path(cache) / "commutator" / "kubernetes")


class RealKubernetes:
    """A control plane with its data in a folder. ``start`` waits until it answers."""

    def __init__(self, folder: Path) -> None:
        picker = PortPicker()
        self.port = picker.pick(_HOST)
        self.token = secrets.token_hex(16)
        self._etcd, self._peer = (f"http://{_HOST}:{picker.pick(_HOST)}" for _ in range(2))
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: ServerGuard | None = None
        self._trust = ssl.create_default_context()
        self._trust.check_hostname = False
        self._trust.verify_mode = ssl.CERT_NONE

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        self._guard = ServerGuard(self._folder)
        try:
            self._prepare()
            self._start_etcd()
            self.start()
            self._start_others()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            end_at_once(self._processes.pop(name))
        assert self._guard is not None
        self._guard.close()

    # ------------------------------------------------------------- what tests do

    def kubeconfig(self, folder: Path, *, port: int | None = None, token: str | None = None) -> str:
        """Write a kubeconfig; returns its path. ``port``: that of a proxy."""
        path = folder / f"kubeconfig-{port or self.port}-{(token or '')[-6:]}"
        path.write_text(yaml.safe_dump(self._config(port or self.port, token or self.token)))
        path.chmod(0o600)
        return str(path)

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """An answer to the administrator. Raises urllib.error.HTTPError."""
        request = urllib.request.Request(
            f"https://{_HOST}:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as answer:
            said: Json = json.loads(answer.read())
            return said

    def is_ready(self) -> bool:
        """Whether the API server says so."""
        request = urllib.request.Request(
            f"https://{_HOST}:{self.port}/readyz",
            headers={"Authorization": f"Bearer {self.token}"},
        )
        with (
            suppress(OSError),
            urllib.request.urlopen(request, timeout=2, context=self._trust) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def start(self, timeout_s: float = 180.0) -> None:
        """Start the API server."""
        if "kube-apiserver" not in self._processes:
            self._run(
                "kube-apiserver",
                f"--etcd-servers={self._etcd}",
                f"--secure-port={self.port}",
                f"--bind-address={_HOST}",
                f"--advertise-address={_HOST}",
                f"--cert-dir={self._folder / 'certs'}",
                f"--service-account-key-file={self._folder / 'sa.key'}",
                f"--service-account-signing-key-file={self._folder / 'sa.key'}",
                "--service-account-issuer=https://kubernetes.default",
                f"--token-auth-file={self._folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/24",
                f"--audit-policy-file={self._folder / 'audit.yaml'}",
                f"--audit-log-path={self._folder / 'audit.log'}",
            )
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            self._check("kube-apiserver", deadline_s)
            time.sleep(0.2)

    def kill(self) -> None:
        """End the API server as a power cut would."""
        end_at_once(self._processes.pop("kube-apiserver"))

    def pause(self) -> None:
        """Its connections stay, and nothing answers."""
        self._processes["kube-apiserver"].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._processes["kube-apiserver"].send_signal(signal.SIGCONT)

    def compact(self, revision: int) -> None:
        """Have etcd forget what was before a revision."""
        request = urllib.request.Request(
            f"{self._etcd}/v3/kv/compaction",
            data=json.dumps({"revision": revision, "physical": True}).encode(),
        )
        with urllib.request.urlopen(request, timeout=30):
            pass

    def audited(self, user: str) -> set[tuple[str, str]]:
        """What a user has asked for and got: resource and verb."""
        found = set()
        for line in (self._folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            granted = (event.get("responseStatus") or {}).get("code", 0) != 403
            if event["user"]["username"] == user and granted and "objectRef" in event:
                found.add((event["objectRef"]["resource"], event["verb"]))
        return found

    # ------------------------------------------------------------- its parts

    def _prepare(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        files = {
            "sa.key": private.decode(),
            "tokens.csv": f"{self.token},admin,admin,system:masters\n",
            "audit.yaml": yaml.safe_dump(
                {
                    "apiVersion": "audit.k8s.io/v1",
                    "kind": "Policy",
                    "omitStages": ["RequestReceived"],
                    "rules": [{"level": "Metadata"}],
                }
            ),
            "kubeconfig": yaml.safe_dump(self._config(self.port, self.token)),
        }
        for name, text in files.items():
            (self._folder / name).touch(mode=0o600)
            (self._folder / name).write_text(text)

    def _start_etcd(self) -> None:
        self._run(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={self._peer}",
            f"--initial-advertise-peer-urls={self._peer}",
            f"--initial-cluster=default={self._peer}",
            "--unsafe-no-fsync",
        )

    def _start_others(self) -> None:
        config = f"--kubeconfig={self._folder / 'kubeconfig'}"
        if (build_folder() / "bin" / "kube-controller-manager").exists():
            self._run(
                "kube-controller-manager",
                config,
                f"--service-account-private-key-file={self._folder / 'sa.key'}",
                "--use-service-account-credentials",
                "--leader-elect=false",
                "--secure-port=0",
                "--port=0",
                "--controllers=*,-attachdetach,-persistentvolume-binder",
            )
        if (build_folder() / "bin" / "kube-scheduler").exists():
            self._run(
                "kube-scheduler", config, "--leader-elect=false", "--secure-port=0", "--port=0"
            )

    def _run(self, program: str, *arguments: str) -> None:
        argv = [str(build_folder() / "bin" / program), *arguments]
        assert self._guard is not None
        self._processes[program] = self._guard.start(argv, self._folder / f"{program}.log")

    def _check(self, program: str, deadline_s: float) -> None:
        if time.monotonic() > deadline_s or self._processes[program].poll() is not None:
            raise TimeoutError((self._folder / f"{program}.log").read_text()[-4000:])

    def _config(self, port: int, token: str) -> Json:
        cluster = {"server": f"https://{_HOST}:{port}", "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "admin"}}],
            "current-context": "local",
        }


@pytest.fixture(scope="session")
def real_kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKubernetes]:
    """One control plane for all tests, where it was built."""
    if not (build_folder() / "bin" / "kube-apiserver").exists():
        pytest.skip("Kubernetes was not built: make kube")
    with RealKubernetes(tmp_path_factory.mktemp("kubernetes") / "run") as cluster:
        yield cluster


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="commutator-kubernetes-") as folder:
        place = Path(folder)
        with RealKubernetes(place / "run") as cluster:
            print(f"export KUBECONFIG={cluster.kubeconfig(place)}   # Ctrl-C ends it")
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A real S3 server for tests: SeaweedFS as one process on free ports, with its data in one folder.

It may be killed and started again on the same data and ports, as a server that crashed would be.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.guarded import ServerGuard, end_at_once, program_of

from commutator.launcher.ports import PortPicker

__all__ = ["ACCESS_KEY", "READER_KEY", "SECRET_KEY", "SeaweedServer", "s3_client", "seaweed"]

ACCESS_KEY = "test-admin"
READER_KEY = "test-reader"
"""Another identity with the same secret, which may list and read but not write."""
SECRET_KEY = "test-secret"

_HOST = "127.0.0.1"
_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port")
_MORE_PORTS = ("volume.port.grpc", "filer.port", "filer.port.grpc")
# Each bucket takes several volumes, hence 400; a volume takes no room before it is written.
# The other flags leave out what S3 does not need, some of which would listen on a fixed port.
_FLAGS = (
    f"-ip={_HOST}",
    f"-ip.bind={_HOST}",
    "-s3",
    "-s3.iam=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-volume.max=400",
    "-volume.preStopSeconds=0",
    "-master.volumeSizeLimitMB=64",
    "-master.electionTimeout=500ms",
    "-master.heartbeatInterval=50ms",
    "-master.telemetry=false",
)


def s3_client(endpoint: str, access_key: str = ACCESS_KEY, **options: Any) -> Any:
    """A boto3 client that addresses buckets by path and does not retry."""
    # Not at the top: every test run loads this module, few need boto3.
    import boto3
    from botocore.config import Config

    settings: dict[str, Any] = {
        "s3": {"addressing_style": "path"},
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": 2,
        "read_timeout": 10,
    }
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(**(settings | options)),
    )


class SeaweedServer:
    """One server. ``start`` waits until a bucket can be created: three to four seconds."""

    def __init__(self, folder: Path) -> None:
        picker = PortPicker()
        self._ports = {name: picker.pick(_HOST) for name in (*_PORTS, *_MORE_PORTS)}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: ServerGuard | None = None

    @property
    def port(self) -> int:
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def client(self) -> Any:
        return s3_client(self.endpoint)

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def start(self, timeout_s: float = 60.0) -> None:
        """Raises RuntimeError, with the end of the server's log, when it does not come up."""
        program = program_of("weed")
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps(_identities()))
        self._guard = ServerGuard(data)
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        argv = [program, "server", f"-dir={data}", f"-s3.config={identities}", *_FLAGS, *ports]
        self._process = self._guard.start(argv, self._log, {"GOGC": "50"})
        self._wait_until_ready(timeout_s)

    def kill(self) -> None:
        """End it at once; what it had acknowledged is still in its folder."""
        process, self._process = self._process, None
        end_at_once(process)
        watcher, self._guard = self._guard, None
        if watcher is not None:
            watcher.close()

    def pause(self) -> None:
        """Connections stay, and new ones are accepted, but nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove what it left outside its folder."""
        self.kill()
        for port in self._ports.values():
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        return self._folder / "weed.log"

    def _wait_until_ready(self, timeout_s: float) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client, deadline = self.client, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"weed exited with {code}: {self._log.read_text()[-2000:]}")
            with suppress(BotoCoreError, ClientError):
                # A bucket can be created before there is a volume to write to.
                with suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket="readiness")
                client.put_object(Bucket="readiness", Key="probe", Body=b"x")
                client.get_object(Bucket="readiness", Key="probe")["Body"].read()
                return
            time.sleep(0.1)
        raise RuntimeError(f"weed was not ready in {timeout_s} s: {self._log.read_text()[-2000:]}")


def _identities() -> dict[str, Any]:
    def identity(key: str, actions: list[str]) -> dict[str, Any]:
        credentials = [{"accessKey": key, "secretKey": SECRET_KEY}]
        return {"name": key, "credentials": credentials, "actions": actions}

    return {
        "identities": [
            identity(ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            identity(READER_KEY, ["Read", "List"]),
        ]
    }


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """The server that all tests share; each takes a bucket of its own."""
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.close()

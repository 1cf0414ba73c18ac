"""A disk whose driver is a process: stop it, and whoever uses the disk waits in the kernel.

``python -m tests.support.user_disk FOLDER MOUNT`` shows ``FOLDER`` at ``MOUNT`` by Linux's FUSE
until it is killed. Needs root, and ``/dev/fuse``. The messages are those of ``linux/fuse.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = 1
_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_KEPT_S = struct.Struct("<QQII")
"""How long names and attributes may be kept: not at all, so that everything asks the process."""
_MESSAGE_BYTES = 1 << 20
_WRITE_BYTES = 128 << 10
_MS_NOSUID_NODEV = 2 | 4


@contextmanager
def user_disk(folder: Path, mount: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that serves ``folder`` at ``mount``; it runs again before this ends."""
    folder.mkdir()
    mount.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "tests.support.user_disk", folder, mount])
    try:
        while not os.path.ismount(mount):
            assert process.poll() is None, "it cannot mount"
            time.sleep(0.01)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "--lazy", mount], check=False)
        process.kill()
        process.wait()


class Disk:
    """Answers the kernel's messages with what the folder has."""

    def __init__(self, folder: Path) -> None:
        self._paths = {ROOT: folder}
        self._nodes = {folder: ROOT}

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | None:
        """None: this message has no answer. Raises OSError."""
        if opcode in {2, 42, 36}:  # FORGET, BATCH_FORGET, INTERRUPT
            return None
        handler = getattr(self, f"_{_NAMES.get(opcode, 'unknown')}", None)
        if handler is None:
            raise OSError(errno.ENOSYS, "not served")
        done: bytes = handler(node, body)
        return done

    def _init(self, _: int, body: bytes) -> bytes:
        major, minor, ahead, _flags = struct.unpack_from("<IIII", body)
        kernel = struct.pack("<IIII", major, min(minor, 31), ahead, 1 << 5)  # FUSE_BIG_WRITES
        return kernel + struct.pack("<HHIIHH8I", 12, 9, _WRITE_BYTES, 1, *[0] * 10)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def _getattr(self, node: int, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size_bytes = struct.unpack_from("<IIQQ", body)
        (mode,) = struct.unpack_from("<I", body, 68)
        if valid & 1:
            self._paths[node].chmod(stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(self._paths[node], size_bytes)
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body[8:])
        path.mkdir(struct.unpack_from("<I", body)[0])
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        path.unlink()
        self._nodes.pop(path, None)
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        path.rmdir()
        self._nodes.pop(path, None)
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._renamed(node, struct.unpack_from("<Q", body)[0], body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        return self._renamed(node, struct.unpack_from("<Q", body)[0], body[16:])

    def _renamed(self, node: int, target: int, names: bytes) -> bytes:
        old, new = names.split(b"\0")[:2]
        before, after = self._child(node, old), self._child(target, new)
        before.rename(after)
        self._nodes.pop(after, None)
        if (moved := self._nodes.pop(before, None)) is not None:
            self._nodes[after], self._paths[moved] = moved, after
        return b""

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        descriptor = os.open(self._paths[node], flags & ~(os.O_DIRECT | os.O_NOFOLLOW))
        return struct.pack("<QII", descriptor, 1, 0)  # FOPEN_DIRECT_IO: no page cache

    def _opendir(self, _: int, _body: bytes) -> bytes:
        return bytes(16)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        path = self._child(node, body[16:])
        descriptor = os.open(path, flags & ~(os.O_DIRECT | os.O_NOFOLLOW) | os.O_CREAT, mode)
        return self._entry(path) + struct.pack("<QII", descriptor, 1, 0)

    def _read(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size_bytes = struct.unpack_from("<QQI", body)
        return os.pread(descriptor, size_bytes, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size_bytes = struct.unpack_from("<QQI", body)
        written = os.pwrite(descriptor, body[40 : 40 + size_bytes], offset)
        return struct.pack("<II", written, 0)

    def _statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self._paths[node])
        return struct.pack(
            "<QQQQQIIII24x", found.f_blocks, found.f_bfree, found.f_bavail, found.f_files,
            found.f_ffree, found.f_bsize, found.f_namemax, found.f_frsize, 0,
        )  # fmt: skip

    def _release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _done(self, _: int, _body: bytes) -> bytes:
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size_bytes = struct.unpack_from("<QQI", body)
        names = sorted(path.name for path in self._paths[node].iterdir())
        entries = b""
        for number, name in enumerate(names[offset:], offset + 1):
            raw = name.encode()
            entry = struct.pack("<QQII", number, number, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > size_bytes:
                break
            entries += entry
        return entries

    def _fallocate(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size_bytes, _ = struct.unpack_from("<QQQI", body)
        os.posix_fallocate(descriptor, offset, size_bytes)
        return b""

    def _child(self, node: int, name: bytes) -> Path:
        return self._paths[node] / name.rstrip(b"\0").decode()

    def _entry(self, path: Path) -> bytes:
        path.lstat()
        node = self._nodes.setdefault(path, len(self._paths) + 1)
        self._paths[node] = path
        return struct.pack("<QQ", node, 0) + _KEPT_S.pack(0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        found = self._paths[node].lstat()
        return _ATTR.pack(
            node, found.st_size, found.st_blocks, int(found.st_atime), int(found.st_mtime),
            int(found.st_ctime), 0, 0, 0, found.st_mode, found.st_nlink, found.st_uid,
            found.st_gid, 0, found.st_blksize, 0,
        )  # fmt: skip


_NAMES = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename",
    14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "done",
    26: "init", 27: "opendir", 28: "readdir", 29: "done", 30: "done", 38: "done", 43: "fallocate",
    35: "create", 45: "rename2",
}  # fmt: skip


def main(folder: str, mount: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40700,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"user_disk", mount.encode(), b"fuse", _MS_NOSUID_NODEV, options):
        raise OSError(ctypes.get_errno(), "mount")
    disk = Disk(Path(folder))
    while True:
        try:
            message = os.read(device, _MESSAGE_BYTES + 4096)
        except OSError:  # unmounted
            return
        _, opcode, unique, node, *_ = _IN.unpack_from(message)
        code, answer = 0, None
        try:
            answer = disk.answer(opcode, node, message[_IN.size :])
            if answer is None:
                continue
        except OSError as error:
            code = -(error.errno or errno.EIO)
        answer = answer or b""
        with suppress(FileNotFoundError):  # interrupted: nobody waits any more
            os.write(device, _OUT.pack(_OUT.size + len(answer), code, unique) + answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

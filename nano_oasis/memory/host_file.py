"""The file behind a file-backed host tier: locked, preallocated, mapped, and never trusted again.

Owns: the file's header, lock, disk space, mapping and removal.
Must not know: what the bytes after the header mean.

The tier is a cache. Nothing in the file survives a start: whatever an earlier run left is cut to nothing
before the first byte is mapped, so KV of a killed process can never be read. The header only says whose
file it is, so that nobody else's file is ever overwritten, and what was found, for the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import stat

from nano_oasis.config import format_bytes
from nano_oasis.memory.formats import HostTierError

log = logging.getLogger(__name__)

HEADER_BYTES = mmap.PAGESIZE
FILE_NAME = "nano_oasis.kv"  # when a folder is given
_MAGIC = b"nano_oasis host KV tier\n"
_VERSION = 1


class HostFile:
    """An open, locked file of `size` bytes, mapped as `mapping`. Removed by close()."""

    def __init__(self, path: str, size: int, geometry: dict[str, object]) -> None:
        """Raises HostTierError: foreign file, file in use, disk too small, or the system's reason."""
        self.path, self.size = os.path.realpath(path), size
        if os.path.isdir(self.path):
            self.path = os.path.join(self.path, FILE_NAME)
        try:
            self._fd = _open_locked(self.path)
        except OSError as error:
            raise HostTierError(f"{self.path}: cannot open the host KV file: {error.strerror}") from error
        try:
            self.discarded = _what_was_left(self._fd, self.path, geometry)
        except BaseException:
            os.close(self._fd)  # not ours: leave it as it is
            raise
        if self.discarded:
            log.warning("%s: %s; starting empty", self.path, self.discarded)
        try:
            self.mapping = self._fill(geometry)
        except BaseException as error:
            self.close()  # no partial file stays behind
            if isinstance(error, OSError):
                raise HostTierError(f"{self.path}: {error.strerror} ({size} bytes wanted)") from error
            raise

    def _fill(self, geometry: dict[str, object]) -> mmap.mmap:
        os.ftruncate(self._fd, 0)
        disk = os.statvfs(os.path.dirname(self.path))
        free = disk.f_bavail * disk.f_frsize
        if self.size > free:
            raise HostTierError(
                f"{self.path}: the host KV file needs {self.size} bytes ({format_bytes(self.size)}), the "
                f"disk has {free} ({format_bytes(free)}) free; lower --host-kv-memory or choose another "
                "--host-kv-path"
            )
        # A write to a hole of a mapped file on a full disk is a SIGBUS: it kills the process and no
        # `except` sees it. With every byte allocated here, a full disk is an OSError now and nothing later.
        os.posix_fallocate(self._fd, 0, self.size)
        about = {"version": _VERSION, "session": os.urandom(16).hex(), "geometry": geometry}
        os.pwrite(self._fd, _MAGIC + json.dumps(about).encode().ljust(HEADER_BYTES - len(_MAGIC)), 0)
        return mmap.mmap(self._fd, self.size)

    def check(self) -> None:
        """Raises HostTierError if someone cut the file short: touching the lost pages would be a SIGBUS."""
        size = os.fstat(self._fd).st_size
        if size != self.size:
            raise HostTierError(
                f"{self.path}: the host KV file has {size} bytes instead of {self.size}; it was changed "
                "while in use. Restart the engine"
            )

    def close(self) -> None:
        """Removes the file and gives up the lock. Its space is free once nothing maps it any more."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # removed already, or a folder that became read-only
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def _open_locked(path: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)  # KV is users' text: private
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise HostTierError(f"{path}: not a plain file; give --host-kv-path a file or a folder")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            os.close(fd)  # its last owner removed it between our open and our lock: take the new one
        except BlockingIOError as error:
            os.close(fd)
            raise HostTierError(
                f"{path}: in use by another engine; give each its own --host-kv-path"
            ) from error
        except BaseException:
            os.close(fd)
            raise


def _what_was_left(fd: int, path: str, geometry: dict[str, object]) -> str | None:
    """Why there is something in the file, in words; None for a new file. Raises if it is not ours."""
    head = os.pread(fd, HEADER_BYTES, 0)
    if not head:
        return None
    if not head.startswith(_MAGIC):
        raise HostTierError(f"{path}: exists and is not a host KV file; move it or choose another path")
    try:
        about = json.loads(head[len(_MAGIC) :])
        if about["version"] == _VERSION and about["geometry"] == geometry:
            return f"not cleanly closed by session {about['session']}"
        return f"left by session {about['session']} with another version or geometry: {about['geometry']}"
    except (ValueError, KeyError, TypeError):
        return "left with a damaged header"

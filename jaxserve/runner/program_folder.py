"""Compiled programs in a folder, for the persistent compilation cache of jax.

jax's own cache keeps a damaged entry for ever: it neither writes an entry atomically nor replaces
one that exists. Here every entry names its program and has a checksum, so a damaged one is found
when it is read, removed, and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".program"
AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
"""The folder in which XLA keeps the fastest variants of operations on a GPU. jax puts it into that
of the compiled programs; see ``jax_persistent_cache_enable_xla_caches``."""

TEMPORARY = ".tmp"

MAGIC = b"jaxserve program 1\n"
"""The first bytes of an entry; the number is the version of the format."""

DIGEST_BYTES = 32

LEFTOVER_S = 3600.0
"""A temporary file of this age belongs to a process that ended while it wrote."""


class ProgramFolder:
    """A cache of compiled programs. Has the interface of jax's ``CacheInterface``.

    An entry is `MAGIC`, a digest of the key and the program, and the program. Several processes may
    use a folder at once. Errors of the file system and damaged entries cost only time: the first of
    each kind is logged, and the programs are compiled.

    Args:
      path: an existing folder. If it cannot be written to, programs are only read.
      max_bytes: the size of all entries together, and of the files in `AUTOTUNED`. The least
        recently used ones are removed.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path  # jax logs it under this name
        self._max_bytes = max_bytes
        self._used: set[str] = set()
        self._logged: set[str] = set()
        self._remove_leftovers()

    def get(self, key: str) -> bytes | None:
        """Returns a program, or None if the folder does not have it. Removes a damaged entry."""
        path = self._entry(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_once("read", f"cannot read compiled programs in {self._path}", error)
            return None
        start = len(MAGIC) + DIGEST_BYTES
        program = data[start:]
        if data[:start] != MAGIC + _digest(key, program):
            self._log_once("damaged", f"compiled again, since its file is damaged: {path}")
            with contextlib.suppress(OSError):  # `put` replaces it anyway
                path.unlink()
            return None
        self._used.add(key)
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return program

    def put(self, key: str, value: bytes) -> None:
        """Adds or replaces a program, and removes others if there is no room for it."""
        data = b"".join([MAGIC, _digest(key, value), value])
        if len(data) > self._max_bytes or not self._make_room(len(data), key):
            self._log_once(
                "size",
                f"{self._path} has no room for all programs of this model: raise "
                "--compilation-cache-mib",
            )
            return
        temporary = self._path / f"{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(self._entry(key))
            self._used.add(key)
        except OSError as error:
            self._log_once("write", f"cannot keep compiled programs in {self._path}", error)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _entry(self, key: str) -> Path:
        return self._path / f"{key}{SUFFIX}"

    def _make_room(self, num_bytes: int, key: str) -> bool:
        """Removes the least recently used files until ``num_bytes`` more fit for ``key``.

        Returns:
          Whether they fit without the removal of a program that this process uses.
        """
        files = self._files(besides=self._entry(key))
        total = sum(size for _, size, _ in files) + num_bytes
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            if path.parent == self._path and path.name.removesuffix(SUFFIX) in self._used:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._log_once("remove", f"cannot remove old programs in {self._path}", error)
                continue
            total -= size
        return total <= self._max_bytes

    def _files(self, *, besides: Path) -> list[tuple[int, int, Path]]:
        """Returns (time of the last use in ns, size in bytes, path) of each file that counts."""
        files: list[tuple[int, int, Path]] = []
        try:
            found = [p for p in self._path.glob(f"*{SUFFIX}") if p != besides]
            found += (self._path / AUTOTUNED).glob("*.*")
            for path in found:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        except OSError as error:
            self._log_once("list", f"cannot list compiled programs in {self._path}", error)
        return files

    def _remove_leftovers(self) -> None:
        """Removes temporary files of processes that ended while they wrote."""
        with contextlib.suppress(OSError):
            for path in self._path.glob(f"*{TEMPORARY}"):
                if path.stat().st_mtime < time.time() - LEFTOVER_S:
                    path.unlink()

    def _log_once(self, kind: str, what: str, error: OSError | None = None) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s", what if error is None else f"{what}: {error.strerror}")


def _digest(key: str, program: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES)
    digest.update(b"\n")
    digest.update(program)
    return digest.digest()

"""The output of a batch run if it is a file: never damaged, and written by one run at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.offline.batch_file import OK, BatchResult
from jaxserve.openai.json_lines import encode_line

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 80
"""Characters of a line in an error message."""

LINE_START = b'{"id":"batch-'
"""The first bytes of every result that this program writes."""


class ResultFile:
    """A file of results that this process has locked.

    Opening changes nothing in the file; `begin` does, once the run can start. Each result goes to
    the operating system as soon as it is written, so that a crash of the program loses none.

    Attributes:
      answered: IDs of the requests that an earlier run has answered.
    """

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        """Opens and locks the file, or creates it.

        Args:
          path: the file. Without ``resume`` and ``overwrite`` it must be empty or missing.
          resume: keep the answers of an earlier run. Its errors are dropped, so that their requests
            run again. So is an incomplete last line: the program ended while it was written.
          overwrite: replace the results of an earlier run.

        Raises:
          ConfigError: another run has locked the file, or it has content that must be kept.
          OSError: the file cannot be opened.
        """
        self._shown = path
        # What a link points to is replaced, not the link.
        self._path = path.resolve()
        self._overwrite = overwrite
        self._drops_lines = False
        self._torn_at: int | None = None
        self._has_begun = False
        self.answered: frozenset[str] = frozenset()
        self._fd, self._is_new = _open_locked(self._path, path)
        try:
            self._check(resume=resume)
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self) -> None:
        """Removes old results that are replaced or run again. Call it before the first `write`."""
        self._has_begun = True
        if self._overwrite:
            os.ftruncate(self._fd, 0)
        elif self._drops_lines:
            self._remove_dropped_lines()
        elif self._torn_at is not None:
            os.ftruncate(self._fd, self._torn_at)

    def write(self, result: BatchResult) -> None:
        """Appends a result."""
        assert self._has_begun
        write_all(self._fd, encode_line(result) + b"\n")

    async def flush(self) -> None:
        """Does nothing: `write` has written the results."""

    def close(self) -> None:
        """Writes the whole file to the disk, and closes it. Removes it if the run did not begin.

        Raises:
          JaxserveError: somebody has removed the file during the run.
        """
        try:
            if self._has_begun:
                os.fsync(self._fd)
                if os.fstat(self._fd).st_nlink == 0:
                    raise JaxserveError(
                        f"{self._shown} was removed during the run, and the results with it"
                    )
            elif self._is_new:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._fd)

    def _check(self, *, resume: bool) -> None:
        """Reads the old content as far as necessary.

        Raises:
          ConfigError: it must be kept.
        """
        lines = _read_lines(self._fd, self._shown)
        if resume:
            answered: set[str] = set()
            offset = 0
            for line in lines:
                if line.answers is not None and line.answers not in answered:
                    answered.add(line.answers)
                elif line.data.endswith(b"\n"):
                    self._drops_lines = True
                else:
                    self._torn_at = offset
                offset += len(line.data)
            self.answered = frozenset(answered)
        elif self._overwrite:
            # A file of something else is refused by its first line.
            next((line for line in lines if line.data.strip()), None)
        elif os.fstat(self._fd).st_size:
            raise ConfigError(
                f"{self._shown} already exists: --resume keeps its answers and continues, "
                "--overwrite replaces it"
            )

    def _remove_dropped_lines(self) -> None:
        """Replaces the file with a copy that has only its answers, each once."""
        copy, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            _lock(copy, self._shown)
            answered: set[str] = set()
            for line in _read_lines(self._fd, self._shown):
                if line.answers is not None and line.answers not in answered:
                    answered.add(line.answers)
                    write_all(copy, line.data)
            os.fchmod(copy, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.fsync(copy)
            os.replace(name, self._path)
        except BaseException:
            os.close(copy)
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        os.close(self._fd)
        self._fd = copy


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of an old output; ``answers`` is the ID of its request if it has the answer to it."""

    data: bytes
    answers: str | None


class _OldResponse(msgspec.Struct):
    status_code: int


class _OldResult(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _OldResponse | None


def _read_lines(fd: int, shown: Path) -> Iterator[_Line]:
    """Yields the lines of a file of results.

    Raises:
      ConfigError: a line is not a result, so the file is something else.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        yield from _recognised(file, shown)


def _recognised(file: IO[bytes], shown: Path) -> Iterator[_Line]:
    for number, data in enumerate(file, 1):
        if not data.strip():
            yield _Line(data, None)
            continue
        if not data.endswith(b"\n"):
            if not data.startswith(LINE_START) and not LINE_START.startswith(data):
                raise _not_results(shown, number, data)
            yield _Line(data, None)
            continue
        try:
            old = msgspec.json.decode(data, type=_OldResult)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _not_results(shown, number, data) from None
        is_answer = old.response is not None and old.response.status_code == OK
        yield _Line(data, old.custom_id if is_answer else None)


def _not_results(shown: Path, number: int, data: bytes) -> ConfigError:
    text = data.decode(errors="replace").rstrip("\n")
    more = "..." if len(text) > MAX_SHOWN_CHARS else ""
    return ConfigError(
        f"{shown} is not a file of results: its line {number} is "
        f"{text[:MAX_SHOWN_CHARS]!r}{more}. Nothing was changed; give another --output, or remove "
        "the lines that are not results"
    )


def _open_locked(path: Path, shown: Path) -> tuple[int, bool]:
    """Opens a file for appending, or creates it, and locks it until it is closed.

    Returns:
      The descriptor, and whether the file is new.
    """
    while True:
        try:
            fd, is_new = os.open(path, os.O_RDWR | os.O_APPEND), False
        except FileNotFoundError:
            try:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
                fd, is_new = os.open(path, flags, 0o666), True
            except FileExistsError:
                continue
        try:
            _lock(fd, shown)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd, is_new
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        # Between opening and locking, another run replaced or removed the file.
        os.close(fd)


def _lock(fd: int, shown: Path) -> None:
    """Locks a file until all its descriptors are closed, which the end of the process does, too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another run is writing to {shown}: wait until it ends, or give another --output"
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): make sure that no other run writes to it",
            shown,
            error.strerror,
        )


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes to a descriptor; blocks."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]

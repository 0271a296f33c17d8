"""Opens the input and the output of a batch run, and refuses what would destroy a file."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from jaxserve.errors import ConfigError
from jaxserve.offline.batch_file import BatchResult
from jaxserve.offline.result_file import ResultFile
from jaxserve.offline.streams import ResultStream, read_lines

STDIN, STDOUT = 0, 1
STDIN_NAMES = (Path("-"), Path("/dev/stdin"), Path("/dev/fd/0"))
STDOUT_NAMES = (Path("-"), Path("/dev/stdout"), Path("/dev/fd/1"))


class Requests(Protocol):
    """The lines of the input, until `stop`."""

    def lines(self) -> AsyncGenerator[bytes, None]:
        """Yields the lines, each when it is needed. Raises OSError."""
        ...

    def count(self) -> int | None:
        """Returns the number of lines that are not empty; None if it is unknown. Blocks."""
        ...

    def stop(self) -> None:
        """Ends `lines`, even while it waits for the next one."""
        ...


class Results(Protocol):
    """The output. Nothing that exists is changed before `begin`.

    Attributes:
      answered: IDs of the requests that an earlier run has answered.
    """

    answered: frozenset[str]

    def begin(self) -> None:
        """Prepares the output for the first result. Raises OSError."""
        ...

    def write(self, result: BatchResult) -> None:
        """Takes a result, which is then written even if the run is cancelled. Raises OSError."""
        ...

    async def flush(self) -> None:
        """Waits until the results that it took are written. Raises OSError."""
        ...

    def close(self) -> None:
        """Closes the output."""
        ...


class RequestFile:
    """An input that can be read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_stopped = False

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """See `Requests.lines`."""
        with self._path.open("rb") as file:
            for line in file:
                if self._is_stopped:
                    return
                yield line

    def count(self) -> int | None:
        """See `Requests.count`."""
        with self._path.open("rb") as file:
            return sum(1 for line in file if line.strip())

    def stop(self) -> None:
        """See `Requests.stop`."""
        self._is_stopped = True


class RequestStream:
    """An input that can be read only once, such as a pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = asyncio.Event()

    def lines(self) -> AsyncGenerator[bytes, None]:
        """See `Requests.lines`."""
        return read_lines(self._open, self._stopped)

    def count(self) -> None:
        """See `Requests.count`."""

    def stop(self) -> None:
        """See `Requests.stop`."""
        self._stopped.set()

    def _open(self) -> int:
        return os.dup(STDIN) if self._path in STDIN_NAMES else os.open(self._path, os.O_RDONLY)


def open_requests(path: Path) -> Requests:
    """Returns the input; ``-`` is the standard input. Opens it only when lines are requested.

    Raises:
      ConfigError: there is no such file, or it is a folder.
    """
    if path in STDIN_NAMES:
        if sys.stdin is None:
            raise ConfigError("the standard input, from which --input reads, is closed")
        return RequestStream(path)
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a file of requests")
    return RequestFile(path) if path.is_file() else RequestStream(path)


def open_results(path: Path, *, resume: bool, overwrite: bool) -> Results:
    """Opens the output; ``-`` is the standard output. Changes nothing that exists.

    Raises:
      ConfigError: see `ResultFile`; or the output is not a file, so that it cannot be resumed.
      OSError: the file cannot be opened.
    """
    if path not in STDOUT_NAMES and (not path.exists() or path.is_file() or path.is_dir()):
        return ResultFile(path, resume=resume, overwrite=overwrite)
    if path in STDOUT_NAMES and sys.stdout is None:
        raise ConfigError("the standard output, to which --output writes, is closed")
    if resume:
        raise ConfigError(f"--resume needs a file of results, and {path} cannot be read again")

    def open_stream() -> int:
        return os.dup(STDOUT) if path in STDOUT_NAMES else os.open(path, os.O_WRONLY)

    return ResultStream(open_stream)


def check_different(input: Path, output: Path) -> None:
    """Raises ConfigError if input and output are the same file, by whatever names or links.

    Opens neither. A terminal can be both.
    """
    source = _status(input, STDIN, STDIN_NAMES)
    target = _status(output, STDOUT, STDOUT_NAMES)
    if source is None or target is None or not os.path.samestat(source, target):
        return
    if stat.S_ISREG(source.st_mode) or stat.S_ISFIFO(source.st_mode):
        raise ConfigError(
            f"the input {input} and the output {output} are the same file; nothing was changed"
        )


def _status(path: Path, standard: int, names: tuple[Path, ...]) -> os.stat_result | None:
    try:
        return os.fstat(standard) if path in names else path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None

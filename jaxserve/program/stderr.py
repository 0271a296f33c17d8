"""Keeps the log of a program from stopping it: nothing waits for the reader of standard error."""

from __future__ import annotations

import os
import select
import sys
import threading
from contextlib import suppress
from typing import TextIO

STDERR = 2

DEFAULT_COLUMNS = 80
"""The width of a terminal that does not tell."""

READ_BYTES = 64 * 1024
"""Bytes read from the pipe at once."""

MAX_BUFFERED_BYTES = 1024 * 1024
"""The most output that waits for a slow reader; further output is dropped."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds that the last output may take at exit."""


class StderrRelay:
    """A pipe and a buffer between this process, with its children, and its standard error output.

    If nobody reads a log, a write blocks once the pipe to the reader is full; if the reader is
    gone, a write fails. While a relay is open, file descriptor 2 is another pipe. One thread always
    empties it, another writes to the original output. So this covers everything that is written to
    the descriptor: by Python, by native code, and by child processes, which inherit it.

    Output that exceeds `MAX_BUFFERED_BYTES`, or that cannot be written, is dropped. Its lines are
    counted, and the log has their number as soon as it can be written again.

    `sys.stderr` must be a stream on descriptor 2; see `standard_streams`.

    Attributes:
      is_terminal: whether the original output is a terminal.
      num_columns: the width of that terminal, or None.
      num_lost: lines that were dropped and that the log does not count yet.
    """

    def __init__(self) -> None:
        self.is_terminal = os.isatty(STDERR)
        self.num_columns: int | None = None
        if self.is_terminal:
            self.num_columns = os.get_terminal_size(STDERR).columns or DEFAULT_COLUMNS
        self.num_lost = 0
        self._output = os.dup(STDERR)
        self._pipe, write_end = os.pipe()
        os.dup2(write_end, STDERR)
        os.close(write_end)
        self._changed = threading.Condition()
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._num_dropped = 0  # lines that would have followed `_chunks`
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="stderr-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="stderr-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def __enter__(self) -> StderrRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the last output within `CLOSE_TIMEOUT_S`, and restores descriptor 2.

        If the reader takes nothing in that time, later output is discarded: it would block.
        """
        sys.stderr.flush()
        os.dup2(self._output, STDERR)  # closes the write end, unless a child still has it
        self._reader.join(CLOSE_TIMEOUT_S)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(CLOSE_TIMEOUT_S)
        if self._writer.is_alive():
            discard = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discard, STDERR)
            os.close(discard)
        else:
            os.close(self._output)

    def _read(self) -> None:
        while data := os.read(self._pipe, READ_BYTES):
            with self._changed:
                # In order: output that follows dropped output is dropped, too.
                if self._num_dropped or self._num_bytes + len(data) > MAX_BUFFERED_BYTES:
                    self._num_dropped += data.count(b"\n")
                else:
                    self._chunks.append(data)
                    self._num_bytes += len(data)
                    self._changed.notify()
        os.close(self._pipe)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._closing)
                data = b"".join(self._chunks)
                self.num_lost += self._num_dropped
                self._chunks.clear()
                self._num_bytes = self._num_dropped = 0
            if not data:
                return
            if not self._put(data):
                self.num_lost += data.count(b"\n")
            elif self.num_lost and self._put(b"\n(%d lines of the log are lost)\n" % self.num_lost):
                self.num_lost = 0

    def _put(self, data: bytes) -> bool:
        """Writes to the original output, however long it takes. Returns False if it cannot."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._output, rest) :]
            except BlockingIOError:  # another process has made the file non-blocking
                poll = select.poll()
                poll.register(self._output, select.POLLOUT)
                poll.poll()
            except OSError:  # the reader or the terminal is gone, or the disk is full
                return False
        return True


class ProgressOutput:
    """Writes progress to a stream, by default that of errors, and drops what cannot be written.

    For programs that do not open a `StderrRelay`, such as that of a user of the class `LLM`: its
    work must not fail because a reader or a terminal is gone, a disk is full, or the stream was
    closed. A write still waits for a reader that is slow. The object is a file for ``print`` and
    ``tqdm``.

    Args:
      stream: the stream; None for `sys.stderr`, which is None in turn if the parent process has
        closed it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = sys.stderr if stream is None else stream

    @property
    def encoding(self) -> str:
        """The encoding of the stream, by which ``tqdm`` chooses the characters of a bar."""
        return getattr(self._stream, "encoding", None) or "ascii"

    def fileno(self) -> int:
        """The descriptor of the stream, by which ``tqdm`` knows the width. Raises OSError."""
        if self._stream is None:
            raise OSError("the standard error output is closed")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes the text if that is possible. Returns its length."""
        if self._stream is not None:
            with suppress(OSError, ValueError):  # ValueError: closed, or a character it cannot have
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what the stream still holds, if that is possible."""
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.flush()


def standard_streams() -> TextIO:
    """Opens the standard streams that the parent process closed. Returns that of errors.

    Otherwise the next files and sockets would get their descriptors, and the output of libraries
    and of child processes would go there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
    if sys.stderr is None:  # because the descriptor was closed when Python started
        sys.stderr = os.fdopen(STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)
    return sys.stderr


def keep_quiet_at_exit() -> None:
    """Drops what the standard output still holds if nobody reads it.

    Otherwise Python tries once more to write it when it exits, and complains.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discard, sys.stdout.fileno())
        os.close(discard)

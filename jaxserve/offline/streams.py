"""Pipes, terminals and the standard streams as the input and the output of a batch run.

A pipe blocks for as long as its other end likes, even while it is opened. So each is read or
written by a thread of its own, and the end of the program does not wait for that thread.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable

from jaxserve.offline.batch_file import BatchResult
from jaxserve.offline.result_file import write_all
from jaxserve.openai.json_lines import encode_line

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 16
"""The most chunks that are read before they are needed."""

CLOSE_TIMEOUT_S = 2.0
"""Seconds that the reader of the results may take when the run is interrupted."""

Open = Callable[[], int]
"""Opens a file and returns its descriptor; may block."""


async def read_lines(
    open_file: Open, stopped: asyncio.Event | None = None
) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a stream as they arrive, with their line ends.

    Ends when ``stopped`` is set; a line that has arrived in part is not yielded then.

    Raises:
      OSError: the stream cannot be opened or read.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(MAX_CHUNKS)
    closed = threading.Event()

    def read() -> None:
        try:
            fd = open_file()
            try:
                chunk = b" "
                while chunk and room.acquire() and not closed.is_set():
                    chunk = os.read(fd, CHUNK_BYTES)
                    _call(loop, arrived.put_nowait, chunk)
            finally:
                os.close(fd)
        except OSError as error:
            _call(loop, arrived.put_nowait, error)

    threading.Thread(target=read, name="input", daemon=True).start()
    stopped = stopped or asyncio.Event()
    stopping = asyncio.create_task(stopped.wait())
    stopping.add_done_callback(lambda _: arrived.put_nowait(b""))  # wakes the loop below
    begun: list[bytes] = []
    try:
        while (chunk := await arrived.get()) and not stopped.is_set():
            if isinstance(chunk, OSError):
                raise chunk
            room.release()
            *whole, last = chunk.split(b"\n")
            for end in whole:
                if stopped.is_set():
                    return
                yield b"".join([*begun, end, b"\n"])
                begun.clear()
            begun.append(last)
        if any(begun) and not stopped.is_set():
            yield b"".join(begun)
    finally:
        stopping.cancel()
        closed.set()
        room.release()


class ResultStream:
    """An output that can only be written once, such as a pipe. No requests are answered yet."""

    answered: frozenset[str] = frozenset()

    def __init__(self, open_file: Open) -> None:
        self._open_file = open_file
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_given = self._num_written = 0
        self._error: OSError | None = None
        self._progress = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def begin(self) -> None:
        """Opens the stream."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def write(self, result: BatchResult) -> None:
        """Hands a result to the thread that writes."""
        self._num_given += 1
        self._queue.put(encode_line(result) + b"\n")

    async def flush(self) -> None:
        """Waits until these results are written. Raises OSError if they cannot be written."""
        goal = self._num_given
        while self._num_written < goal and self._error is None:
            await self._progress.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Closes the stream. Unwritten data has `CLOSE_TIMEOUT_S` to be written."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            fd = self._open_file()
            try:
                while (data := self._queue.get()) is not None:
                    write_all(fd, data)
                    _call(self._loop, self._report, None)
            finally:
                os.close(fd)
        except OSError as error:
            _call(self._loop, self._report, error)

    def _report(self, error: OSError | None) -> None:
        if error is None:
            self._num_written += 1
        self._error = error
        self._progress.set()
        self._progress = asyncio.Event()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Calls a function on a loop, unless the loop is closed: then the run has ended."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise

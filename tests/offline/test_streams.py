"""Pipes as input and output: streamed, without blocking the event loop."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import IO

import pytest

from jaxserve.offline import streams
from jaxserve.offline.batch_file import BatchResult
from jaxserve.offline.streams import ResultStream, read_lines
from jaxserve.testing.waiting import until


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The reading and the writing end of a pipe, without buffers."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as reader, os.fdopen(writing, "wb", 0) as writer:
        yield reader, writer


@pytest.mark.parametrize("chunk_bytes", [1, 3, 1 << 16])
@pytest.mark.parametrize("text", [b"", b"\n", b"ab\ncd\n", b"ab\n\ncd", b"x" * 5000 + b"\ny\n"])
async def test_lines_are_those_of_a_file(pipe, monkeypatch, chunk_bytes: int, text: bytes) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    reading, writing = pipe
    writing.write(text)
    writing.close()
    lines = [line async for line in read_lines(lambda: os.dup(reading.fileno()))]
    assert lines == text.splitlines(keepends=True)


async def test_a_line_arrives_before_the_next_is_written(pipe) -> None:
    reading, writing = pipe
    async with aclosing(read_lines(lambda: os.dup(reading.fileno()))) as lines:
        for i in range(3):
            writing.write(b"%d\n" % i)
            assert await anext(lines) == b"%d\n" % i
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        assert not waiting.done()  # and the loop is not blocked
        writing.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_input_is_not_read_far_ahead(pipe, monkeypatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", 2)
    monkeypatch.setattr(streams, "MAX_CHUNKS", 4)
    reading, writing = pipe
    writing.write(b"a\n" * 1000)
    num_read = 0
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        nonlocal num_read
        num_read += 1
        return read(fd, size)

    monkeypatch.setattr(os, "read", counted)
    async with aclosing(read_lines(lambda: os.dup(reading.fileno()))) as lines:
        for _ in range(10):
            assert await anext(lines) == b"a\n"
        assert num_read <= 10 + 4
        await until(lambda: num_read >= 10 + 3)


async def test_an_input_that_cannot_be_opened_or_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):  # a folder can be opened, but not read
        with pytest.raises(OSError, match="No such file|Is a directory"):
            await anext(read_lines(lambda path=path: os.open(path, os.O_RDONLY)))


async def test_opening_a_fifo_does_not_block_the_loop(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    results = ResultStream(lambda: os.open(fifo, os.O_WRONLY))
    results.begin()
    results.write(BatchResult.of_body("a", {}))
    await asyncio.sleep(0)
    async with aclosing(read_lines(lambda: os.open(fifo, os.O_RDONLY))) as lines:
        assert json.loads(await anext(lines))["custom_id"] == "a"
        await results.flush()
        results.close()
        assert [line async for line in lines] == []


async def test_results_are_written_in_order_and_flushed(pipe) -> None:
    reading, writing = pipe
    results = ResultStream(lambda: os.dup(writing.fileno()))
    results.begin()
    for i in range(50):
        results.write(BatchResult.of_body(str(i), {"text": "\u2028" * 10}))
    await results.flush()
    results.close()
    writing.close()
    with os.fdopen(os.dup(reading.fileno()), encoding="utf-8") as file:
        written = [json.loads(line) for line in file.read().splitlines()]
    assert [result["custom_id"] for result in written] == [str(i) for i in range(50)]


async def test_a_slow_reader_holds_its_requests_but_not_the_loop(pipe) -> None:
    reading, writing = pipe
    os.set_blocking(reading.fileno(), False)
    results = ResultStream(lambda: os.dup(writing.fileno()))
    results.begin()
    for i in range(10):
        results.write(BatchResult.of_body(str(i), "x" * 100_000))  # more than a pipe holds
    flushing = asyncio.ensure_future(results.flush())
    await asyncio.sleep(0)
    assert not flushing.done()
    data = b""
    while data.count(b"\n") < 10:
        data += reading.read(1 << 20) or b""
        await asyncio.sleep(0)
    await flushing
    results.close()
    assert [json.loads(line)["custom_id"] for line in data.splitlines()] == list("0123456789")


async def test_a_reader_that_leaves_is_an_error(pipe) -> None:
    reading, writing = pipe
    results = ResultStream(lambda: os.dup(writing.fileno()))
    results.begin()
    reading.close()
    results.write(BatchResult.of_body("a", {}))
    with pytest.raises(BrokenPipeError):
        await results.flush()
    results.close()


async def test_closing_does_not_wait_for_ever_for_a_reader(pipe, monkeypatch) -> None:
    monkeypatch.setattr(streams, "CLOSE_TIMEOUT_S", 0.01)
    reading, writing = pipe
    results = ResultStream(lambda: os.dup(writing.fileno()))
    results.begin()
    results.write(BatchResult.of_body("a", "x" * 1_000_000))
    begun = reading.read(1)
    results.close()
    # The rest is written all the same if somebody reads it.
    writing.close()
    assert json.loads(begun + reading.read())["custom_id"] == "a"

"""The relay between a process and its standard error output."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.program.stderr import MAX_BUFFERED_BYTES, STDERR, ProgressOutput, StderrRelay
from jaxserve.testing.waiting import wait_until

LINE = b"x" * 99 + b"\n"


class Reader:
    """Reads a pipe from `start` to its end."""

    def __init__(self, descriptor: int) -> None:
        self.data = b""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._descriptor, 1 << 16):
            self.data += data

    def wait(self) -> bytes:
        """Returns everything after the end of the pipe."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.data


@contextlib.contextmanager
def stderr_as(descriptor: int) -> Iterator[None]:
    """Makes file descriptor 2 a copy of another one while the block runs."""
    original = os.dup(STDERR)
    os.dup2(descriptor, STDERR)
    try:
        yield
    finally:
        os.dup2(original, STDERR)
        os.close(original)


@contextlib.contextmanager
def stderr_pipe() -> Iterator[Reader]:
    """Makes descriptor 2 the write end of a pipe, the only one. Afterwards, the reader must end."""
    read_end, write_end = os.pipe()
    reader = Reader(read_end)
    with stderr_as(write_end):
        os.close(write_end)
        yield reader
    reader.wait()
    os.close(read_end)


def write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(STDERR, rest) :]


def test_everything_arrives_in_order() -> None:
    lines = b"".join(b"%06d\n" % i for i in range(100_000))
    with stderr_pipe() as reader:
        reader.start()
        with StderrRelay() as relay:
            assert not relay.is_terminal
            for start in range(0, len(lines), 4321):
                write(lines[start : start + 4321])
                wait_until(lambda end=start: len(reader.data) > end)  # it takes all of it in time
            code = "import os; os.write(2, b'of a child')"
            subprocess.run([sys.executable, "-c", code], check=True)
    assert reader.data == lines + b"of a child"


def test_a_reader_that_hangs_blocks_nothing_and_learns_how_much_it_missed() -> None:
    num_lines = 4 * MAX_BUFFERED_BYTES // len(LINE)
    with stderr_pipe() as reader, StderrRelay():
        for _ in range(num_lines):
            write(LINE)  # would block forever
        reader.start()
        wait_until(lambda: b"are lost" in reader.data)
        write(b"afterwards\n")
        wait_until(lambda: reader.data.endswith(b"afterwards\n"))
    (lost,) = re.findall(rb"\n\((\d+) lines of the log are lost\)\n", reader.data)
    num_read = len(re.findall(rb"x\n", reader.data))
    assert num_read + int(lost) == num_lines
    assert MAX_BUFFERED_BYTES // len(LINE) - 1000 < num_read < num_lines


def test_a_reader_that_is_gone_does_not_disturb() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with stderr_as(write_end):
        with StderrRelay():
            for _ in range(1000):
                write(LINE)
        with pytest.raises(BrokenPipeError):  # descriptor 2 is the original one again
            os.write(STDERR, LINE)
    os.close(write_end)


def test_output_that_a_full_disk_refused_is_counted() -> None:
    """The original output is exchanged under the relay, as if the disk had space again."""
    with stderr_pipe() as reader:
        reader.start()
        original = os.dup(STDERR)
        with open("/dev/full", "w") as full, stderr_as(full.fileno()):
            relay = StderrRelay()
            write(b"one\ntwo\n")
            wait_until(lambda: relay.num_lost == 2)
            os.dup2(original, relay._output)
            write(b"three\n")
            relay.close()
        os.close(original)
    assert reader.data == b"three\n\n(2 lines of the log are lost)\n"


def test_closing_does_not_wait_for_a_reader_that_hangs() -> None:
    with stderr_pipe() as reader:
        relay = StderrRelay()
        write(LINE * 10_000)
        relay.close()
        for _ in range(1000):
            write(LINE)  # discarded: it would block forever
        reader.start()
        relay._writer.join(30)
        assert not relay._writer.is_alive()
        os.close(relay._output)
    assert reader.data == LINE * 10_000


def test_a_non_blocking_output_gets_everything() -> None:
    """Another process can make a terminal non-blocking for all that share it."""
    with stderr_pipe() as reader:
        os.set_blocking(STDERR, False)
        with StderrRelay():
            write(LINE * 5000)
            reader.start()
    assert reader.data == LINE * 5000


def test_a_terminal_that_is_closed_does_not_disturb() -> None:
    shown, terminal = os.openpty()
    with stderr_as(terminal):
        os.close(terminal)
        with StderrRelay() as relay:
            assert relay.is_terminal
            write(b"\rno line end")
            assert os.read(shown, 100) == b"\rno line end"
            os.close(shown)
            write(b"one\ntwo\n")
            wait_until(lambda: relay.num_lost == 2)


def test_streams_that_were_closed_are_opened() -> None:
    code = (
        "import os, sys; from jaxserve.program.stderr import standard_streams;"
        "assert sys.stderr is None; stream = standard_streams();"
        "print('nobody reads this', file=sys.stderr); assert stream is sys.stderr;"
        "assert [os.readlink(f'/proc/self/fd/{n}') for n in range(3)] == ['/dev/null'] * 3;"
        "assert all(map(os.get_inheritable, range(3))); os._exit(7)"
    )
    command = 'exec "$@" <&- >&- 2>&-'
    run = subprocess.run(["sh", "-c", command, "sh", sys.executable, "-c", code], timeout=60)
    assert run.returncode == 7


def test_progress_is_written_like_other_output(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as file:
        out = ProgressOutput(file)
        print("50 %", file=out, flush=True)
        assert path.read_text() == "50 %\n"
        assert (out.encoding, out.fileno()) == ("utf-8", file.fileno())


def test_progress_that_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as file:
        out = ProgressOutput(file)
        print("\u2588", file=out, flush=True)  # ASCII does not have it
        print("50 %", file=out)
    print("100 %", file=out, flush=True)  # closed
    assert path.read_text().split() == ["50", "%"]


def test_progress_without_a_stream_is_dropped(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """For Python, a file of None is the standard output."""
    monkeypatch.setattr(sys, "stderr", None)
    out = ProgressOutput()
    print("50 %", file=out, flush=True)
    with pytest.raises(OSError, match="is closed"):
        out.fileno()
    assert capsys.readouterr().out == ""

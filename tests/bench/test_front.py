"""The cost of a streamed token, measured on a server whose engine repeats the prompt."""

import json
import socket
import threading
from pathlib import Path

import pytest

from jaxserve.bench import front
from jaxserve.bench.__main__ import main
from jaxserve.testing.waiting import wait_until


def test_every_endpoint_is_measured(
    front_checkpoint: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(front, "PACES", (40,))
    monkeypatch.setattr(front, "SETTLE_S", 0.1)
    output = tmp_path / "figures.json"
    small = ["--model", str(front_checkpoint), "--streams", "5", "--seconds", "1"]
    assert main(["front", *small, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["figures"]
    assert [figures["endpoint"] for figures in found] == ["completions", "chat"]
    for figures in found:
        assert figures["tokens_per_s"] > 0
        assert figures["events_per_token"] > 0
        assert figures["cpu_us_per_token"] > 0
    assert "| chat, 40 tokens/s per stream |" in capsys.readouterr().out


class PiecewiseServer:
    """A server that replies to a request with these pieces, each after the one before was read."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._read_events = [threading.Event() for _ in pieces]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def mark_read(self, piece: int) -> None:
        self._read_events[piece].set()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(2**16)
            for piece, was_read in zip(self._pieces, self._read_events, strict=True):
                connection.sendall(piece)
                assert was_read.wait(60)


def test_events_are_counted_once_when_split_between_reads() -> None:
    server = PiecewiseServer(
        b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n", b"\ndata: 2\n\ndata: 3\n\n", b"data: 4\n"
    )
    with front.Streams(server.port, "chat", 1, 10) as streams:
        streams.read(until_all_began=True)
        assert streams.num_events == 0
        server.mark_read(0)

        def has_read_three_events() -> bool:
            streams.read(seconds=0.01)
            return streams.num_events >= 3

        wait_until(has_read_three_events)
        server.mark_read(1)
        streams.read(seconds=0.05)
        assert streams.num_events == 3
        server.mark_read(2)
        with pytest.raises(ConnectionError, match="ended"):
            streams.read(seconds=60)
    server.close()


def test_streams_that_do_not_begin_are_an_error() -> None:
    server = PiecewiseServer(b"HTTP/1.1 200 OK\r\n\r\n")
    with front.Streams(server.port, "chat", 1, 10) as streams:
        with pytest.raises(ConnectionError, match="1 streams have not begun"):
            streams.read(seconds=0.05, until_all_began=True)
        server.mark_read(0)
    server.close()

"""Streams of the API: chunks, framing and finish reasons."""

import httpx
import pytest

from jaxserve.testing.api_client import Streamed

CHUNK = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n'


def test_reads_a_stream() -> None:
    streamed = Streamed.parse(httpx.Headers(), CHUNK + LAST + b"data: [DONE]\n\n")
    assert streamed.done
    assert streamed.deltas() == ["a", "b"]
    assert streamed.text() == "ab"
    assert streamed.finish_reason() == "stop"
    assert not Streamed.parse(httpx.Headers(), CHUNK).done


@pytest.mark.parametrize("raw", [CHUNK[:-1], b"event: x\n" + CHUNK, CHUNK + b"\n", b": ping\n\n"])
def test_rejects_wrong_framing(raw) -> None:
    with pytest.raises(AssertionError):
        Streamed.parse(httpx.Headers(), raw)


def test_rejects_two_finish_reasons() -> None:
    with pytest.raises(AssertionError):
        Streamed.parse(httpx.Headers(), LAST + LAST).finish_reason()

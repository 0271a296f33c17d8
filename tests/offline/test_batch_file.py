"""The lines of a batch: requests, bad lines and the results of errors."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from jaxserve.errors import ContextLengthError
from jaxserve.offline.batch_file import BadLine, BatchRequest, BatchResult, read_requests


def line(custom_id: str, **extra) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps({**request, **extra})


def read(text: str | bytes) -> list[BatchRequest | BadLine]:
    data = text.encode() if isinstance(text, str) else text

    async def lines() -> AsyncIterator[bytes]:
        for line in data.splitlines(keepends=True):
            yield line

    async def read_all() -> list[BatchRequest | BadLine]:
        return [request async for request in read_requests(lines())]

    return asyncio.run(read_all())


def test_reads_requests_and_skips_empty_lines() -> None:
    first, second = read(f"\n{line('a', body={'x': 1})}\n   \n{line('b')}")
    assert isinstance(first, BatchRequest)
    assert (first.custom_id, first.method, first.url) == ("a", "POST", "/v1/completions")
    assert bytes(first.body) == b'{"x": 1}'
    assert isinstance(second, BatchRequest)


@pytest.mark.parametrize(
    ("text", "custom_id", "reason"),
    [
        ("not json", None, "line 2 of the input: the body is not valid JSON"),
        ('"text"', None, "line 2 of the input: body: Expected object"),
        ('{"method": "POST", "url": "u", "body": {}}', None, "custom_id: it is missing"),
        ('{"custom_id": 5, "url": "u", "body": {}}', None, "custom_id: Expected str, got int"),
        ('{"custom_id": "b", "url": "u", "body": {}}', "b", "method: it is missing"),
        ('{"custom_id": "b", "method": "POST", "body": {}}', "b", "url: it is missing"),
        ('{"custom_id": "b", "method": "POST", "url": "u"}', "b", "body: it is missing"),
        ('{"custom_id": "b", "method": "POST", "url": null, "body": {}}', "b", "url: Expected str"),
        (line("a"), "a", "line 2 of the input: its custom_id was used before, in line 1"),
        ("[" * 100_000, None, "line 2 of the input"),
    ],
)
def test_a_bad_line_has_a_reason(text: str, custom_id, reason: str) -> None:
    good, bad, after = read(f"{line('a')}\n{text}\n{line('z')}\n")
    assert isinstance(good, BatchRequest)
    assert isinstance(after, BatchRequest)
    assert isinstance(bad, BadLine)
    assert bad.custom_id == custom_id
    assert reason in bad.reason


def test_a_byte_order_mark_is_skipped() -> None:
    """Several files in one have several marks."""
    first, second = read(f"\ufeff{line('a')}\n\ufeff{line('b')}\n")
    assert (first.custom_id, second.custom_id) == ("a", "b")


def test_invalid_utf8_is_a_bad_line() -> None:
    (bad,) = read(b'{"custom_id": "\xff"}\n')
    assert isinstance(bad, BadLine)


def test_results_of_errors_have_their_code_and_status() -> None:
    result = BatchResult.of_error("a", ContextLengthError("too long"))
    assert result.response is not None
    assert result.response.body.error.code == "context_length_exceeded"
    other = BatchResult.of_error("a", ValueError("secret")).response
    assert other is not None
    assert other.status_code == 500

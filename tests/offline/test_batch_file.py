"""The files of a batch: reading requests, writing results and resuming after a crash."""

import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.offline.batch_file import (
    BadLine,
    BatchRequest,
    BatchResult,
    ResultFile,
    read_requests,
)


def line(custom_id: str, **extra) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps({**request, **extra})


def read(tmp_path: Path, text: str | bytes) -> list[BatchRequest | BadLine]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(read_requests(path))


def test_reads_requests_and_skips_empty_lines(tmp_path: Path) -> None:
    first, second = read(tmp_path, f"\n{line('a', body={'x': 1})}\n   \n{line('b')}")
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
def test_a_bad_line_has_a_reason(tmp_path: Path, text: str, custom_id, reason: str) -> None:
    good, bad, after = read(tmp_path, f"{line('a')}\n{text}\n{line('z')}\n")
    assert isinstance(good, BatchRequest)
    assert isinstance(after, BatchRequest)
    assert isinstance(bad, BadLine)
    assert bad.custom_id == custom_id
    assert reason in bad.reason


def test_invalid_utf8_is_a_bad_line(tmp_path: Path) -> None:
    (bad,) = read(tmp_path, b'{"custom_id": "\xff"}\n')
    assert isinstance(bad, BadLine)


def results_in(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_results_are_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile.create(path, overwrite=False)
    results.write(BatchResult.of_body("a", {"x": 1}))
    assert [r["custom_id"] for r in results_in(path)] == ["a"]
    results.write(BatchResult.of_error("b", InvalidRequestError("bad n", param="n")))
    results.write(BatchResult.of_bad_line(None, "not one"))
    results.close()
    first, second, third = results_in(path)
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"] == {"x": 1}
    assert first["error"] is None
    assert second["response"]["status_code"] == 400
    assert second["response"]["body"] == {
        "error": {"message": "bad n", "type": "BadRequestError", "param": "n", "code": 400}
    }
    assert second["error"] is None
    assert third["response"] is None
    assert third["error"] == {"code": "invalid_line", "message": "not one"}
    assert len({result["id"] for result in (first, second, third)}) == 3
    for result in (first, second, third):
        assert result.keys() == {"id", "custom_id", "response", "error"}


def test_results_of_errors_have_their_code_and_status() -> None:
    result = BatchResult.of_error("a", ContextLengthError("too long"))
    assert result.response is not None
    assert result.response.body.error.code == "context_length_exceeded"
    other = BatchResult.of_error("a", ValueError("secret")).response
    assert other is not None
    assert other.status_code == 500


def test_a_file_with_results_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match="--resume"):
        ResultFile.create(path, overwrite=False)
    assert path.read_text() == "precious\n"
    ResultFile.create(path, overwrite=True).close()
    assert path.read_text() == ""
    # An empty file can be replaced: nothing is lost.
    ResultFile.create(path, overwrite=False).close()


def test_resume_creates_a_missing_file(tmp_path: Path) -> None:
    results = ResultFile.resume(tmp_path / "out.jsonl")
    assert results.answered == frozenset()
    results.close()
    assert (tmp_path / "out.jsonl").exists()


def test_resume_keeps_successful_results_and_drops_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile.create(path, overwrite=False)
    for custom_id in ("a", "b", "a"):
        results.write(BatchResult.of_body(custom_id, {}))
    results.write(BatchResult.of_error("c", InvalidRequestError("bad")))
    results.write(BatchResult.of_bad_line(None, "bad"))
    results.close()
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n[]\n")
        file.write(path.read_bytes().splitlines()[1].replace(b'"b"', b'"d"'))  # without a line end

    resumed = ResultFile.resume(path)
    assert resumed.answered == {"a", "b"}
    resumed.write(BatchResult.of_body("c", {}))
    resumed.close()
    assert [result["custom_id"] for result in results_in(path)] == ["a", "b", "c"]
    assert list(tmp_path.iterdir()) == [path]


def test_resume_removes_a_truncated_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile.create(path, overwrite=False)
    for custom_id in ("a", "b"):
        results.write(BatchResult.of_body(custom_id, {"text": "ü"}))
    results.close()
    whole = path.read_bytes()
    first_len = whole.index(b"\n") + 1
    for cut in range(first_len, len(whole)):
        path.write_bytes(whole[:cut])
        resumed = ResultFile.resume(path)
        resumed.close()
        assert resumed.answered == {"a"}
        assert path.read_bytes() == whole[:first_len]

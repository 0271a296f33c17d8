"""Line breaks in text, and files that the batch program must not destroy.

The IDs of these cases are in the docstrings: they were reported later than those of ids.txt.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.ipc.launch import FACTORY
from jaxserve.offline.__main__ import main
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS
from jaxserve.testing.waiting import wait_until
from server.testing import flags

FAKE = "jaxserve.testing.fake_engine:build"
RESPONSES = "/v1/responses"
LINE_BREAKS = [*map(chr, (0x2028, 0x85, 0x2029, 0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x0D, 0x0A))]
BREAKS_TEXT = "".join(f"{i}{line_break}" for i, line_break in enumerate(LINE_BREAKS)) + "E"


@pytest.fixture(scope="module")
def breaks_checkpoint(scripted_checkpoint: Callable[..., Path]) -> Path:
    return scripted_checkpoint(breaks=[*re.findall(".", BREAKS_TEXT, re.DOTALL), EOS])


def breaks_request(path: str) -> dict[str, Any]:
    key = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    prompt = {key: "<breaks>"} if key else {"messages": [{"role": "user", "content": "<breaks>"}]}
    return {**prompt, "temperature": 0, "max_tokens" if key != "input" else "max_output_tokens": 40}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_streamed_text_has_no_line_breaks_for_any_client(serve, breaks_checkpoint, path) -> None:
    """JS-015: httpx and others split a stream where `str.splitlines` does."""
    server = serve(breaks_checkpoint).with_one_token_per_output()
    body = {**breaks_request(path), "stream": True}
    with server.http.stream("POST", path, json=body) as reply:
        lines = list(reply.iter_lines())
    raw = server.post(path, body).text
    assert raw.splitlines() == raw.split("\n")[:-1]
    assert {line.partition(":")[0] for line in lines} <= {"", "data", "event"}
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(text) for text in data if text != "[DONE]"]
    if path == RESPONSES:
        pieces = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    elif path == CHAT:
        choices = [choice for event in events for choice in event["choices"]]
        pieces = [choice["delta"].get("content") or "" for choice in choices]
    else:
        pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(pieces) == BREAKS_TEXT


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    body = {"prompt": "hi", "temperature": 0, "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def test_results_have_no_line_breaks_for_any_reader(
    tmp_path: Path, breaks_checkpoint: Path, settings: dict[str, Any]
) -> None:
    """JS-015, in the output of the batch program."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        line("\u2028", COMPLETIONS, **breaks_request(COMPLETIONS))
        + json.dumps(
            {"custom_id": "b", "method": "POST", "url": CHAT, "body": breaks_request(CHAT)}
        )
    )
    # The folder of compiled programs is a setting of the whole process, so this run sets none.
    batch_flags = flags(**{**settings, "compilation_cache_dir": ""}, model=breaks_checkpoint)
    assert main(["-i", str(source), "-o", str(out), *batch_flags], factory=FACTORY) == 0
    results = [json.loads(text) for text in out.read_text().splitlines()]
    choices = {r["custom_id"]: r["response"]["body"]["choices"][0] for r in results}
    assert choices["\u2028"]["text"] == BREAKS_TEXT
    assert choices["b"]["message"]["content"] == BREAKS_TEXT


@pytest.fixture
def run(front_checkpoint: Path, capfd) -> Callable[..., tuple[int, str]]:
    """``run(input, output, *flags)`` returns the exit code and the messages of the program."""

    def run(source: object, out: object, *argv: str, model: object = front_checkpoint):
        code = main(["-i", str(source), "-o", str(out), "--model", str(model), *argv], factory=FAKE)
        return code, capfd.readouterr().err

    return run


@pytest.mark.parametrize("option", ["--resume", "--overwrite", "--max-in-flight=1"])
@pytest.mark.parametrize("other_name", ["in.jsonl", "symlink", "hard link", "down/../in.jsonl"])
def test_output_and_input_are_never_the_same_file(
    tmp_path: Path, run, option: str, other_name: str
) -> None:
    """PUB-03: the input was emptied, with exit code 0."""
    source, other = tmp_path / "in.jsonl", tmp_path / other_name
    source.write_text(line("a") + line("b"))
    (tmp_path / "down").mkdir()
    if other_name == "symlink":
        other.symlink_to(source)
    elif other_name == "hard link":
        other.hardlink_to(source)
    before = source.read_bytes()
    for pair in ((source, other), (other, source)):
        code, message = run(*pair, option, model="/no/model")
        assert code == 1
        assert message.startswith("error: the input ")
        assert "are the same file" in message
        assert len(message.splitlines()) == 1
        assert source.read_bytes() == before


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_swapped_input_and_output_are_refused(tmp_path: Path, run, option: str) -> None:
    """PUB-03: ``-i results -o requests`` would replace the requests."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + line("b"))
    assert run(source, out)[0] == 0
    requests, results = source.read_bytes(), out.read_bytes()
    code, message = run(out, source, option)
    assert code == 1
    assert f'error: {source} is not a file of results: its line 1 is \'{{"custom_id"' in message
    assert (source.read_bytes(), out.read_bytes()) == (requests, results)


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
@pytest.mark.parametrize("fault", ["model", "flag", "input", "folder"])
def test_a_run_that_cannot_start_changes_nothing(
    tmp_path: Path, run, option: str, fault: str
) -> None:
    """PUB-04: --overwrite emptied the old results although there was no model."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + line("b", max_tokens=-1))
    assert run(source, out)[0] == 0
    before = out.read_bytes()
    assert before.count(b"\n") == 2
    code, _ = run(
        {"input": tmp_path / "missing", "folder": tmp_path}.get(fault, source),
        out,
        option,
        *(["--policy", "fastest"] if fault == "flag" else []),
        **({"model": "/no/model"} if fault == "model" else {}),
    )
    assert code == 1
    assert out.read_bytes() == before
    assert run(source, out, option)[0] == 0
    assert out.read_bytes() != before


def test_a_finished_run_is_resumed_without_the_model(tmp_path: Path, run) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + line("b"))
    assert run(source, out)[0] == 0
    before = out.read_bytes()
    code, message = run(source, out, "--resume", model="/no/model")
    assert code == 0
    assert "0 answered and 2 kept from before, 0 errors" in message
    assert out.read_bytes() == before


PROGRAM = f"""
import sys
from jaxserve.offline.__main__ import main
sys.exit(main(sys.argv[1:], factory={FAKE!r}))
"""


@pytest.fixture
def start(front_checkpoint: Path) -> Callable[..., Any]:
    """``with start(*argv, stdin=..., stdout=...) as process`` runs the batch program."""

    @contextmanager
    def start(*argv: object, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, argv), "--model", str(front_checkpoint)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            **pipes,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    return start


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_a_second_run_is_refused_and_the_first_loses_nothing(tmp_path: Path, run, start) -> None:
    """The first run waits for more requests while the others are tried."""
    out = tmp_path / "out.jsonl"
    again = tmp_path / "again.jsonl"
    again.write_text(line("a") + line("b"))
    with start("-i", "-", "-o", out, stdin=subprocess.PIPE) as process:
        process.stdin.write(line("a").encode())
        process.stdin.flush()
        wait_until(lambda: out.exists() and out.read_bytes().endswith(b"\n"))
        for option in ("--resume", "--overwrite", "--max-in-flight=1"):
            code, message = run(again, out, option)
            assert code == 1
            assert message.startswith(f"error: another run is writing to {out}")
        _, stderr = process.communicate(line("c").encode(), timeout=60)
        assert process.returncode == 0, stderr
    assert {json.loads(text)["custom_id"] for text in out.read_text().splitlines()} == {"a", "c"}
    assert run(again, out, "--resume")[0] == 0
    assert out.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize(("source", "out"), [("-", "-"), ("/dev/stdin", "/dev/stdout")])
def test_pipes_carry_each_result_before_the_next_request(start, source: str, out: str) -> None:
    with start("-i", source, "-o", out, **PIPES) as process:
        for i in range(3):
            process.stdin.write(line(f"r{i}").encode())
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
            assert result["custom_id"] == f"r{i}"
            assert result["response"]["status_code"] == 200
        rest, message = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, b"")
    assert b"3 answered, 0 errors" in message


def test_files_of_the_shell_are_read_and_written(tmp_path: Path, start) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"r{i}") for i in range(20)))
    with source.open("rb") as stdin, out.open("ab") as stdout:
        stdout.write(b"before\n")
        stdout.flush()
        with start("-i", "-", "-o", "-", stdin=stdin, stdout=stdout) as process:
            _, message = process.communicate(timeout=60)
    assert process.returncode == 0, message
    before, *results = out.read_text().splitlines()
    assert before == "before"
    assert {json.loads(text)["custom_id"] for text in results} == {f"r{i}" for i in range(20)}


def test_fifos_are_read_and_written(tmp_path: Path, start) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    os.mkfifo(source)
    os.mkfifo(out)
    with start("-i", source, "-o", out, "--overwrite") as process:
        source.write_text("".join(line(f"r{i}") for i in range(20)))
        results = [json.loads(text) for text in out.read_text().splitlines()]
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert {result["custom_id"] for result in results} == {f"r{i}" for i in range(20)}


def test_an_interrupt_ends_a_run_that_waits_for_its_pipes(start) -> None:
    with start("-i", "-", "-o", "-", **PIPES) as process:
        process.stdin.write(line("a").encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["custom_id"] == "a"
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
        assert process.wait(timeout=60) == 128 + signal.SIGINT
    assert b"stopped by SIGINT" in message
    assert b"1 answered" in message
    assert b"--resume continues" not in message
    assert b"Traceback" not in message


def test_a_reader_that_leaves_ends_the_run(start) -> None:
    with start("-i", "-", "-o", "-", **PIPES) as process:
        process.stdin.write(line("a").encode())
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write(line("b").encode())
        process.stdin.flush()
        message = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert b"error: [Errno 32] Broken pipe" in message
    assert b"Traceback" not in message


def test_a_pipe_cannot_be_resumed(tmp_path: Path, run) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    code, message = run(source, "-", "--resume", model="/no/model")
    assert code == 1
    assert message == "error: --resume needs a file of results, and - cannot be read again\n"


NO_PASSWD_ENTRY = """
import pwd

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = getpwuid
"""


@pytest.fixture
def without_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the processes of a test run as a user that exists nowhere."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_PASSWD_ENTRY)
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


def test_a_user_without_a_home_folder_is_served(
    without_home, serve_process, scripted_checkpoint
) -> None:
    """PUB-02: OpenShift gives a container a random user ID."""
    checkpoint = scripted_checkpoint(ab=["A", "B", EOS])
    with serve_process(checkpoint, compilation_cache_dir="~/.cache/jaxserve/compiled") as client:
        assert client.complete("<ab>", max_tokens=5)["choices"][0]["text"] == "AB"
        reply = client.complete("<ab>", max_tokens=5, guided_regex="AB?")
        assert reply["choices"][0]["text"] == "AB"
        log = client.process._log.read_text()
        assert re.search("compiled programs +not kept.*this user has none", log)


@pytest.mark.parametrize(
    ("flag", "path", "message"),
    [
        ("model", "some/model", "there is no folder some/model, and no home folder to download it"),
        ("model", "~/model", "~/model is in a home folder that does not exist: set HOME"),
        ("tokenizer", "~/model", "~/model is in a home folder that does not exist: set HOME"),
        ("chat-template", "~/it.jinja", "~/it.jinja cannot be read: Could not determine home"),
    ],
)
def test_a_path_in_a_missing_home_folder_is_one_sentence(
    without_home, front_checkpoint: Path, flag: str, path: str, message: str
) -> None:
    """PUB-02, for hub IDs: the front died with a traceback."""
    argv = ["--model", str(front_checkpoint), "--engine-factory", FAKE, f"--{flag}", path]
    ended = subprocess.run(
        [sys.executable, "-m", "server", *argv, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert message in ended.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_file_of_the_model_that_is_none_is_one_sentence(
    tmp_path: Path, front_checkpoint: Path, run, name: str, kind: str
) -> None:
    """A folder gave a traceback, and a pipe blocked the start for ever."""
    model = tmp_path / "model"
    shutil.copytree(front_checkpoint, model)
    (model / name).unlink()
    (model / name).mkdir() if kind == "folder" else os.mkfifo(model / name)
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    code, message = run(source, tmp_path / "out.jsonl", model=model)
    assert code == 1
    assert message.startswith(f"error: {model / name} must be a file, but it is a ")
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()

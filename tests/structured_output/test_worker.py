"""The process that checks grammars: its verdicts, its limits and its replacement."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import worker as grammar_worker
from jaxserve.structured_output.grammar import check_grammar
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_output.worker import (
    CHECK_MEMORY_BYTES,
    CHECK_TIME_S,
    GrammarWorker,
    TooMuchWorkError,
    _end,
)
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer
from jaxserve.testing.waiting import wait_until

TOKENIZER = tiny_tokenizer()
PAGE = resource.getpagesize()
VOCAB = 512
"""Width of the logits; more than the number of tokens."""


@pytest.fixture(scope="module")
def worker():
    return GrammarWorker(TOKENIZER, VOCAB)


def multiple_of(number):
    """Returns a short grammar from which llguidance makes ``number`` states."""
    return Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a+"),
        Grammar("regex", "(a"),
        Grammar("json_schema", '{"enum": ["é", "\\ud83d\\udd25"]}'),
        Grammar("json_schema", '{"type": "not-a-type"}'),
        Grammar("json_schema", "[" * 100_000),
        Grammar("grammar", 'start: <|im_end|> "hello" /[a-z]+/'),
        Grammar("grammar", 'start: <|nope|> "a"'),
        Grammar("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
)
def test_the_worker_and_a_check_in_this_process_agree(worker, grammar):
    def result(check):
        try:
            check()
        except InvalidRequestError as error:
            return error.message
        return None

    assert result(lambda: worker.check(grammar)) == result(
        lambda: check_grammar(grammar, Vocabulary(TOKENIZER, VOCAB))
    )


@pytest.mark.parametrize("time_s", [0.1, CHECK_TIME_S])
def test_a_slow_check_ends_after_its_processor_time_and_leaves_the_process_alone(time_s):
    worker = GrammarWorker(TOKENIZER, VOCAB, time_s=time_s)
    worker.check(Grammar("regex", "a"))
    process = worker._process
    before = processor_time(process)
    with pytest.raises(TooMuchWorkError, match="JSON schema cannot be used: it takes too much"):
        worker.check(multiple_of(8_000_009))  # this would take minutes and gigabytes
    assert time_s / 2 < processor_time(process) - before < 2 * time_s + 0.5
    worker.check(Grammar("grammar", 'start: <|im_end|> "a"'))
    assert worker._process is process


def processor_time(process):
    """Returns the seconds that a process and its ended children have run."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def test_a_check_cannot_fill_the_memory(worker):
    """The limit is that of the address space, so the check fails before it uses the memory."""
    worker.check(Grammar("regex", "a"))
    process = worker._process
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * PAGE
    assert 0 < int(line.split()[3]) - CHECK_MEMORY_BYTES <= used + (64 << 20)


def test_checks_leave_no_memory_behind(worker):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    grammar = Grammar("json_schema", json.dumps(schema))
    worker.check(grammar)
    before = resident(worker._process)
    for _ in range(5):
        worker.check(grammar)
    assert resident(worker._process) < before + (8 << 20)


def resident(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE


def test_closing_the_worker_ends_a_running_check_and_starts_no_process():
    worker = GrammarWorker(TOKENIZER, VOCAB, time_s=60)
    worker.check(Grammar("regex", "a"))
    process = worker._process
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def check():
        # What the check raises when its pipe is closed does not matter.
        with contextlib.suppress(Exception):
            worker.check(multiple_of(8_000_009))

    thread = threading.Thread(target=check)
    thread.start()
    wait_until(lambda: task.read_text().split())
    (child,) = task.read_text().split()
    worker.close()
    thread.join(60)
    assert not thread.is_alive()
    wait_until(lambda: not is_alive(child))
    with pytest.raises(RuntimeError):
        worker.check(Grammar("regex", "a"))
    assert worker._process.poll() is not None
    worker.close()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_process_ends_with_its_worker_and_not_before():
    """The size of the process that starts the worker does not matter."""
    large = np.ones(400 << 20, np.uint8)
    worker = GrammarWorker(TOKENIZER, VOCAB)
    del large
    worker.check(Grammar("regex", "a"))
    process = worker._process
    assert process is not None
    assert process.poll() is None
    del worker
    assert process.poll() is not None


def test_a_killed_process_is_replaced(worker):
    worker.check(Grammar("regex", "a"))
    worker._process.kill()
    worker._process.wait()
    worker.check(Grammar("grammar", 'start: <|im_end|> "a"'))
    with pytest.raises(InvalidRequestError, match="unclosed"):
        worker.check(Grammar("regex", "(a"))


def test_a_grammar_cannot_use_tokens_beyond_the_width_of_the_logits(worker):
    grammar = Grammar("grammar", 'start: <|im_end|> "a"')
    worker.check(grammar)
    with pytest.raises(InvalidRequestError, match="im_end"):
        GrammarWorker(TOKENIZER, 256).check(grammar)


class LongTokens:
    """A vocabulary larger than the memory that checks may add."""

    vocab_size = 200_000
    eos_token_id = 0
    special_ids = frozenset([0])

    def token_bytes(self, token_id):
        return b"%200d" % token_id if token_id > 255 else bytes([token_id])

    def encode(self, text, *, add_special_tokens=True):
        raise AssertionError("the process encodes by itself")


def test_the_memory_limit_does_not_count_the_vocabulary():
    worker = GrammarWorker(LongTokens(), LongTokens.vocab_size)
    worker.check(Grammar("regex", "a"))
    process = worker._process
    assert process is not None
    worker.check(Grammar("regex", "ab"))
    assert worker._process is process


def test_a_vocabulary_that_cannot_be_built_is_not_an_error_of_the_grammar():
    worker = GrammarWorker(TOKENIZER, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not be started"):
            worker.check(Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [("ZeroDivisionError('a bug')", RuntimeError), ("MemoryError()", TooMuchWorkError)],
)
def test_a_defect_of_the_check_is_not_the_fault_of_the_grammar(monkeypatch, error, expected):
    """Other errors than refusals end the check alone, and their tracebacks are not lost."""
    code = f"""
from jaxserve.structured_output import worker
def check(grammar, vocabulary):
    if grammar.spec == "bad":
        raise {error}
worker.check_grammar = check
worker.main()
"""
    popen = subprocess.Popen

    def start(arguments, **options):
        return popen([sys.executable, "-c", code], **options)

    monkeypatch.setattr(grammar_worker.subprocess, "Popen", start)
    worker = GrammarWorker(TOKENIZER, VOCAB)
    worker.check(Grammar("regex", "good"))
    with pytest.raises(expected) as caught:
        worker.check(Grammar("regex", "bad"))
    assert ("ZeroDivisionError: a bug" in str(caught.value)) == (expected is RuntimeError)
    worker.check(Grammar("regex", "good"))


def test_a_fork_does_not_end_the_process_of_its_parent(worker):
    worker.check(Grammar("regex", "a+"))
    process = worker._process
    _end(process, owner=os.getpid() + 1)
    assert process.poll() is None
    assert not process.stdin.closed
    worker.check(Grammar("regex", "b+"))
    assert worker._process is process

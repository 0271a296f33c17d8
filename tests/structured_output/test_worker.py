"""The process that checks grammars: its verdicts, its limits and its replacement."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import worker as grammar_worker
from jaxserve.structured_output.checks import GrammarChecks
from jaxserve.structured_output.grammar import check_grammar
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_output.worker import (
    CHECK_TIME_S,
    MAX_KEPT_BYTES,
    GrammarWorker,
    _end,
)
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
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


def test_a_slow_check_fails_and_ends_its_process(worker):
    worker.check(Grammar("regex", "a"))
    process = worker._process
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(InvalidRequestError, match="JSON schema cannot be used: it takes too much"):
        worker.check(multiple_of(8_000_009))  # this would take minutes and gigabytes
    assert process.returncode is not None
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 10 * CHECK_TIME_S
    worker.check(Grammar("grammar", 'start: <|im_end|> "a"'))
    assert worker._process.pid != process.pid


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
    statm = Path(f"/proc/{process.pid}/statm").read_text()
    assert int(statm.split()[1]) * resource.getpagesize() > MAX_KEPT_BYTES
    worker.check(Grammar("regex", "ab"))
    assert worker._process is process


def test_a_vocabulary_that_cannot_be_built_is_not_an_error_of_the_grammar():
    worker = GrammarWorker(TOKENIZER, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not be started"):
            worker.check(Grammar("regex", "a"))


async def test_json_without_a_schema_needs_no_process(monkeypatch):
    def start():
        raise OSError("no process")

    monkeypatch.setattr(grammar_worker, "_start", start)
    checks = GrammarChecks(TOKENIZER, VOCAB)
    await checks.check(Grammar("json_object"))
    with pytest.raises(OSError, match="no process"):
        await checks.check(Grammar("choice", '["a"]'))


def test_a_fork_does_not_end_the_process_of_its_parent(worker):
    worker.check(Grammar("regex", "a+"))
    process = worker._process
    _end(process, owner=os.getpid() + 1)
    assert process.poll() is None
    assert not process.stdin.closed
    worker.check(Grammar("regex", "b+"))
    assert worker._process is process

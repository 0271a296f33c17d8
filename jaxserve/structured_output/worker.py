"""Checks grammars in a process of its own, which is lost when one takes too much time or memory.

What compiles grammars can be made to work for hours, or to fill the memory, by a few characters,
and a thread cannot be stopped. The process limits itself, so nobody has to watch it: the system
ends it when a check goes beyond `CHECK_TIME_S` of processor time, and it ends when its standard
input does. The next check starts another one.

It is told the tokens of the model when it starts, and checks with what it has made of them: a
vocabulary like that of an engine, so that what passes can be compiled there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import TokenSource, Vocabulary, check_grammar, name_of

logger = logging.getLogger(__name__)

CHECK_TIME_S = 2
"""Seconds of processor time for one check, rounded up to the next whole second of the process."""

CHECK_MEMORY_BYTES = 1 << 30
"""Address space that checks may add to that of the process with its vocabulary."""

MAX_KEPT_BYTES = 192 << 20
"""A process to which checks have added more than this ends, so that its memory is given back."""

START_TIME_S = 30
"""Seconds of processor time for the vocabulary, of which 150,000 tokens take less than one."""

PATIENCE_S = 60.0
"""A process that does not answer in this time is ended. It can only be waiting for a processor."""

LENGTH_BYTES = 8


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a model, as far as checks need them. Implements `TokenSource`.

    Attributes:
      texts: of all tokens.
      eos_token_id: the end token, if there is one.
      special_ids: tokens that are no text.
      byte_ids: the tokens of a single byte.
    """

    texts: list[bytes]
    eos_token_id: int | None
    special_ids: frozenset[int]
    byte_ids: dict[bytes, int]

    @classmethod
    def of(cls, tokenizer: TokenSource) -> Tokens:
        """Those of a tokenizer."""
        special = tokenizer.special_ids
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        ids = {text: i for i, text in enumerate(texts) if len(text) == 1 and i not in special}
        return cls(texts, tokenizer.eos_token_id, special, ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.texts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self.texts[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of single bytes: where a text is cut has no part in whether a grammar is sound."""
        singles = (bytes([b]) for b in text.encode())
        return [self.byte_ids[b] for b in singles if b in self.byte_ids]


class Start(msgspec.Struct, frozen=True):
    """The first message to the process: of what to make a `Vocabulary`."""

    tokens: Tokens
    vocab_size: int


class Answer(msgspec.Struct, frozen=True):
    """What is wrong with the grammar, if anything; and whether the process ends with it.

    Also says that the vocabulary is there.
    """

    error: str | None = None
    is_last: bool = False


class GrammarWorker:
    """`structured.check_grammar`, with an end to its time and memory.

    The process is started by the first check and ended with this object.

    Args:
      tokenizer: of the model.
      vocab_size: width of its logits.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def check(self, grammar: Grammar) -> None:
        """Waits for the result. One check at a time.

        Raises:
          InvalidRequestError: the grammar cannot be followed, or is too much work.
          RuntimeError: no grammar can be checked.
        """
        answer = _ask(self._running(), grammar)
        if answer is None or answer.is_last:
            self._stop()
        if answer is None:
            logger.warning("the check of a %s took too much time or memory", grammar.kind)
            raise InvalidRequestError(
                f"{name_of(grammar)}: it takes too much time or memory to compile"
            )
        if answer.error is not None:
            raise InvalidRequestError(answer.error)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
            self._stop = weakref.finalize(self, _end, self._process)
            if _ask(self._process, self._first_message) is None:
                self._stop()
                raise RuntimeError("the process that checks grammars could not be started")
        return self._process

    @functools.cached_property
    def _first_message(self) -> Start:
        return Start(Tokens.of(self._tokenizer), self._vocab_size)


def _ask(process: subprocess.Popen[bytes], question: Start | Grammar) -> Answer | None:
    """What the process says, or None if it ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, msgspec.msgpack.encode(question))
        reply = _read(process.stdout)
    finally:
        timer.cancel()
    return None if reply is None else msgspec.msgpack.decode(reply, type=Answer)


def _start() -> subprocess.Popen[bytes]:
    module_path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    # What is given back to the system is seen by the limit on memory only with one arena.
    environment = {**os.environ, "PYTHONPATH": module_path, "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxserve.structured_output.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the last words of the library, when its memory is at an end
        env=environment,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # there was a question in it
            stream.close()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """The next message, or None at the end."""
    head = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None
    return data or None


def main() -> None:
    """Answers the questions of standard input on standard output until there are no more."""
    questions, replies = sys.stdin.buffer, sys.stdout.buffer
    data = _read(questions)
    if data is None:
        return
    _limit_time(START_TIME_S)
    start = msgspec.msgpack.decode(data, type=Start)
    vocabulary = Vocabulary(start.tokens, start.vocab_size)
    address_space, resident_at_start = _memory()
    if address_space:
        _limit(resource.RLIMIT_AS, address_space + CHECK_MEMORY_BYTES)
    _write(replies, msgspec.msgpack.encode(Answer()))
    while (data := _read(questions)) is not None:
        grammar = msgspec.msgpack.decode(data, type=Grammar)
        _limit_time(CHECK_TIME_S)
        error = None
        try:
            check_grammar(grammar, vocabulary)
        except InvalidRequestError as refusal:
            error = refusal.message
        _, resident = _memory()
        is_last = resident - resident_at_start > MAX_KEPT_BYTES
        _write(replies, msgspec.msgpack.encode(Answer(error, is_last)))
        if is_last:
            return


def _limit_time(seconds: int) -> None:
    """From now on; rounded up to the next whole second of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of what is in memory; zeros where there is no way to know.

    The most that was ever in memory will not do: it begins with that of the process which started
    this one.
    """
    statm = Path("/proc/self/statm")
    sizes = statm.read_text().split()[:2] if statm.exists() else ("0", "0")
    address_space, resident = (int(size) * resource.getpagesize() for size in sizes)
    return address_space, resident


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()

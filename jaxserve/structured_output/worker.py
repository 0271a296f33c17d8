"""Checks grammars in a separate process, which ends if a check takes too much time or memory.

A few characters can keep the compiler of grammars busy for hours or make it fill the memory, and a
thread cannot be stopped. The process limits itself, so nobody has to watch it: the kernel kills it
when a check exceeds `CHECK_TIME_S` of processor time, and it exits when its standard input closes.
The next check starts a new process.

The process receives the tokens of the model first and makes a vocabulary like that of an engine, so
that an engine can compile every grammar that passes the check.
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
from jaxserve.ipc.signals import leave_signals_to_the_front
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import check_grammar, name_of
from jaxserve.structured_output.vocabulary import TokenSource, Vocabulary

logger = logging.getLogger(__name__)

CHECK_TIME_S = 2
"""Processor time for one check. The kernel counts whole seconds, so a check may get one more."""

CHECK_MEMORY_BYTES = 1 << 30
"""Address space that checks may use in addition to that of the process with its vocabulary."""

MAX_KEPT_BYTES = 192 << 20
"""Once checks have added more resident memory than this, the process exits, to release it."""

START_TIME_S = 30
"""Processor time for making the vocabulary; 150,000 tokens take less than 1 s."""

REPLY_TIMEOUT_S = 60.0
"""The process is killed if it does not reply in this time. Its limits on processor time are far
lower, so it can only be waiting for a processor."""

LENGTH_BYTES = 8


class Tokens(msgspec.Struct, frozen=True):
    """The part of a tokenizer that checks need. Implements `TokenSource`.

    Attributes:
      texts: the bytes of each token.
      eos_token_id: ID of the end token, or None.
      special_ids: IDs of the tokens that stand for no text.
      byte_ids: single bytes -> the IDs of their tokens.
    """

    texts: list[bytes]
    eos_token_id: int | None
    special_ids: frozenset[int]
    byte_ids: dict[bytes, int]

    @classmethod
    def of(cls, tokenizer: TokenSource) -> Tokens:
        """Copies the tokens of a tokenizer."""
        special = tokenizer.special_ids
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        ids = {text: i for i, text in enumerate(texts) if len(text) == 1 and i not in special}
        return cls(texts, tokenizer.eos_token_id, special, ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.texts)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token."""
        return self.texts[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Splits a text into bytes: whether a grammar is valid does not depend on tokenization."""
        singles = (bytes([b]) for b in text.encode())
        return [self.byte_ids[b] for b in singles if b in self.byte_ids]


class Start(msgspec.Struct, frozen=True):
    """The first message to the process: the arguments of `Vocabulary`."""

    tokens: Tokens
    vocab_size: int


class Verdict(msgspec.Struct, frozen=True):
    """The result of a check. An empty verdict is the reply to `Start`.

    Attributes:
      error: why the grammar cannot be followed; None if it can.
      is_last: whether the process exits after this reply.
    """

    error: str | None = None
    is_last: bool = False


class GrammarWorker:
    """Runs `check_grammar` with limits on its time and memory.

    The first check starts the process; it ends with this object.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: width of the logits.
    """

    def __init__(self, tokenizer: TokenSource, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError unless the grammar can be followed; blocks.

        Only one thread at a time may call this.

        Raises:
          InvalidRequestError: the grammar cannot be followed, or takes too much work.
          RuntimeError: the process cannot be started.
        """
        verdict = _ask(self._running(), grammar)
        if verdict is None or verdict.is_last:
            self._stop()
        if verdict is None:
            logger.warning("the check of a %s took too much time or memory", grammar.kind)
            raise InvalidRequestError(
                f"{name_of(grammar)}: it takes too much time or memory to compile"
            )
        if verdict.error is not None:
            raise InvalidRequestError(verdict.error)

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, after starting it if it does not run. Raises RuntimeError."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
            self._stop = weakref.finalize(self, _end, self._process, os.getpid())
            if _ask(self._process, self._first_message) is None:
                self._stop()
                raise RuntimeError("the process that checks grammars could not be started")
        return self._process

    @functools.cached_property
    def _first_message(self) -> Start:
        return Start(Tokens.of(self._tokenizer), self._vocab_size)


def _ask(process: subprocess.Popen[bytes], message: Start | Grammar) -> Verdict | None:
    """Sends a message and returns the reply, or None if the process ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(REPLY_TIMEOUT_S, process.kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, msgspec.msgpack.encode(message))
        reply = _read(process.stdout)
    finally:
        timer.cancel()
    return None if reply is None else msgspec.msgpack.decode(reply, type=Verdict)


def _start() -> subprocess.Popen[bytes]:
    module_path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    # With one arena, freed memory leaves the address space, which the limit on memory counts.
    environment = {**os.environ, "PYTHONPATH": module_path, "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxserve.structured_output.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the message of llguidance when it runs out of memory
        env=environment,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process if this is its owner, and not a fork that got a copy of the object."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # an unsent message may be in the buffer
            stream.close()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """Returns the next message, or None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None
    return data or None


def main() -> None:
    """Checks the grammars that arrive on standard input and replies on standard output."""
    leave_signals_to_the_front()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    data = _read(requests)
    if data is None:
        return
    _limit_time(START_TIME_S)
    start = msgspec.msgpack.decode(data, type=Start)
    vocabulary = Vocabulary(start.tokens, start.vocab_size)
    address_space, resident_at_start = _memory()
    if address_space:
        _limit(resource.RLIMIT_AS, address_space + CHECK_MEMORY_BYTES)
    _write(replies, msgspec.msgpack.encode(Verdict()))
    while (data := _read(requests)) is not None:
        grammar = msgspec.msgpack.decode(data, type=Grammar)
        _limit_time(CHECK_TIME_S)
        error = None
        try:
            check_grammar(grammar, vocabulary)
        except InvalidRequestError as refusal:
            error = refusal.message
        _, resident = _memory()
        is_last = resident - resident_at_start > MAX_KEPT_BYTES
        _write(replies, msgspec.msgpack.encode(Verdict(error, is_last)))
        if is_last:
            return


def _limit_time(seconds: int) -> None:
    """Limits processor time from now on; the kernel's limit is up to one second later."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _memory() -> tuple[int, int]:
    """Returns (bytes of address space, bytes of resident memory); zeros without /proc.

    The peak of resident memory cannot be used: a new process inherits it from its parent.
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

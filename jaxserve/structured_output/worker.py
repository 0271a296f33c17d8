"""Checks grammars in a separate process, which ends a check that takes too much time or memory.

A few characters can keep the compiler of grammars busy for hours or make it fill the memory, and a
thread cannot be stopped. So the process forks for every check. The kernel kills the child when the
check exceeds its processor time; with it, all memory of the check is free again. The vocabulary is
shared with the child and is made once. The process exits when its standard input closes.

The process receives the tokens of the model first and makes a vocabulary like that of an engine, so
that an engine can compile every grammar that passes the check.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.signals import leave_signals_to_the_main_process
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import check_grammar, name_of
from jaxserve.structured_output.vocabulary import TokenSource, Vocabulary

CHECK_TIME_S = 2.0
"""The most processor time for one check."""

CHECK_MEMORY_BYTES = 1 << 30
"""Address space that a check may use in addition to that of the process with its vocabulary."""

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


class Check(msgspec.Struct, frozen=True):
    """A grammar to check, and the processor time for it in seconds."""

    grammar: Grammar
    time_s: float


class Verdict(msgspec.Struct, frozen=True):
    """The result of a check. An empty verdict is the reply to `Start`.

    Attributes:
      error: why the grammar cannot be followed; None if it can.
      is_cut: whether the check took too much time or memory, so that there is no result.
      defect: the traceback of an error that no grammar should cause; None if there was none.
    """

    error: str | None = None
    is_cut: bool = False
    defect: str | None = None


class TooMuchWorkError(InvalidRequestError):
    """The check of a grammar took too much processor time or memory."""


class GrammarWorker:
    """Runs `check_grammar` with limits on its time and memory.

    The first check starts the process, which ends with `close` or with this object.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: width of the logits.
      time_s: the most processor time for one check.
    """

    def __init__(
        self, tokenizer: TokenSource, vocab_size: int, *, time_s: float = CHECK_TIME_S
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._time_s = time_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._stop: Callable[[], object] = lambda: None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError unless the grammar can be followed; blocks.

        Only one thread at a time may call this.

        Raises:
          TooMuchWorkError: the check took too much time or memory.
          InvalidRequestError: the grammar cannot be followed.
          RuntimeError: the process cannot be started, its code has a defect, or the worker is
            closed.
        """
        verdict = _ask(self._running(), Check(grammar, self._time_s))
        if verdict is None:
            self._stop()
        if verdict is None or verdict.is_cut:
            raise TooMuchWorkError(
                f"{name_of(grammar)}: it takes too much time or memory to compile"
            )
        if verdict.defect is not None:
            raise RuntimeError(f"the check of a grammar failed:\n{verdict.defect}")
        if verdict.error is not None:
            raise InvalidRequestError(verdict.error)

    def close(self) -> None:
        """Ends the process, and with it a check that runs in another thread."""
        self._is_closed = True
        self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, after starting it if it does not run. Raises RuntimeError."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
            self._stop = weakref.finalize(self, _end, self._process, os.getpid())
            # Checked after the start, so that `close` in another thread misses no process.
            if self._is_closed or _ask(self._process, self._first_message) is None:
                self._stop()
                raise RuntimeError("the process that checks grammars could not be started")
        return self._process

    @functools.cached_property
    def _first_message(self) -> Start:
        return Start(Tokens.of(self._tokenizer), self._vocab_size)


def _ask(process: subprocess.Popen[bytes], message: Start | Check) -> Verdict | None:
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
    # Without threads, the process can fork.
    threads = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": module_path, **threads}
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
    with contextlib.suppress(ProcessLookupError):  # the group: a check may be running in a child
        os.killpg(process.pid, signal.SIGKILL)
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
    leave_signals_to_the_main_process()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    data = _read(requests)
    if data is None:
        return
    _limit(resource.RLIMIT_CPU, START_TIME_S)
    start = msgspec.msgpack.decode(data, type=Start)
    vocabulary = Vocabulary(start.tokens, start.vocab_size)
    _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    address_space = _address_space()
    if address_space:
        _limit(resource.RLIMIT_AS, address_space + CHECK_MEMORY_BYTES)
    # Objects that the garbage collector never visits stay shared with the children.
    gc.collect()
    gc.freeze()
    _write(replies, msgspec.msgpack.encode(Verdict()))
    while (data := _read(requests)) is not None:
        child = os.fork()
        if child == 0:
            _check_and_exit(msgspec.msgpack.decode(data, type=Check), vocabulary, replies)
        _, status = os.waitpid(child, 0)
        if status != 0:  # the child has sent no reply
            _write(replies, msgspec.msgpack.encode(Verdict(is_cut=True)))


def _check_and_exit(check: Check, vocabulary: Vocabulary, replies: IO[bytes]) -> NoReturn:
    """Replies in a child process. Every end but that of `os._exit` means that there is no reply."""
    try:
        # The default action of the signal, which nobody handles, ends the process.
        signal.setitimer(signal.ITIMER_PROF, check.time_s)
        verdict = Verdict()
        try:
            check_grammar(check.grammar, vocabulary)
        except InvalidRequestError as refusal:
            verdict = Verdict(refusal.message)
        except MemoryError:
            verdict = Verdict(is_cut=True)
        except Exception:
            verdict = Verdict(defect=traceback.format_exc())
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, msgspec.msgpack.encode(verdict))
        os._exit(0)
    finally:
        os._exit(1)


def _address_space() -> int:
    """Returns the bytes of address space; 0 without /proc."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[0]) if statm.exists() else 0
    return pages * resource.getpagesize()


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = hard if value == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, hard))


if __name__ == "__main__":
    main()

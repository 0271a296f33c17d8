"""Checks the grammars of requests without blocking the event loop, or one another."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from jaxserve.errors import InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.front.work_pool import SIZE_PER_S, WorkPool
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.worker import GrammarWorker, TooMuchWorkError
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

QUICK_TIME_S = 0.1
"""Processor time for the first check of a grammar. Most take a tenth of it."""

QUEUE_SHARE = 4
"""The queue for the first check holds as many grammars as the most completions in flight, divided
by this."""

LONG_QUEUE_SHARE = 32
"""The same for the queue of long checks, each of which may take `worker.CHECK_TIME_S`."""

NUM_KEPT = 256
"""Number of valid grammars in the cache, and of refused ones: clients send the same ones again."""

SIZE_PER_CHAR = SIZE_PER_S // 64
"""The size of a character of a grammar in the queue: a grammar of a few characters overtakes one of
2000 that has waited for up to half a minute."""

MAX_SIZE = 64 * SIZE_PER_S
"""Longer grammars wait no longer than those of this size."""


class GrammarChecks:
    """Runs `check_grammar` in worker processes, once for each grammar.

    A grammar gets `QUICK_TIME_S` first. One that needs more waits in a second, short queue, for a
    process of its own. So a cheap grammar waits at most `QUICK_TIME_S` for each expensive one.
    Requests with the same grammar wait for the same check.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: width of the logits.
      max_in_flight: the most completions in flight.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, max_in_flight: int = 1024) -> None:
        self._quick_worker = GrammarWorker(tokenizer, vocab_size, time_s=QUICK_TIME_S)
        self._long_worker = GrammarWorker(tokenizer, vocab_size)
        self._quick = WorkPool(
            "checks of grammars", max_waiting=max(max_in_flight // QUEUE_SHARE, 1)
        )
        self._long = WorkPool(
            "long checks of grammars", max_waiting=max(max_in_flight // LONG_QUEUE_SHARE, 1)
        )
        self._valid = _Recent()
        self._refused = _Recent()
        self._not_quick = _Recent()
        self._in_flight: dict[bytes, _Shared] = {}

    def close(self) -> None:
        """Ends the threads and the processes. Nothing can be checked from now on."""
        for pool in (self._quick, self._long):
            pool.close()
        for worker in (self._quick_worker, self._long_worker):
            worker.close()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError, without a ``param``, unless the grammar can be followed.

        Raises:
          QueueFullError: too many grammars wait for their check.
        """
        if grammar.kind == "json_object":
            return  # the request contributes nothing to this grammar
        key = hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
        if self._valid.get(key) is not None:
            return
        message = self._refused.get(key)
        if message is not None:
            raise InvalidRequestError(message)
        shared = self._in_flight.get(key)
        if shared is None:
            shared = _Shared(asyncio.create_task(self._run(key, grammar)))
            self._in_flight[key] = shared
        shared.num_callers += 1
        try:
            error = await asyncio.shield(shared.task)
        finally:
            shared.num_callers -= 1
            if not shared.num_callers:
                del self._in_flight[key]
                shared.task.cancel()
        if error is not None:
            raise type(error)(str(error)) from error

    async def _run(self, key: bytes, grammar: Grammar) -> JaxserveError | None:
        """Checks a grammar and remembers the verdict. Returns the error of its requests, or None.

        Each request raises a copy of the error, because an error collects the frames of all that
        raise it.
        """
        size = min(SIZE_PER_CHAR * len(grammar.spec), MAX_SIZE)
        try:
            if key not in self._not_quick:
                try:
                    await self._quick.run(lambda _: self._quick_worker.check(grammar), size=size)
                except TooMuchWorkError:
                    self._not_quick.add(key)
            if key in self._not_quick:
                await self._long.run(lambda _: self._long_worker.check(grammar), size=size)
        except QueueFullError as error:
            return error
        except InvalidRequestError as error:
            if isinstance(error, TooMuchWorkError):
                logger.warning("the check of a %s took too much time or memory", grammar.kind)
            self._refused.add(key, error.message)
            return InvalidRequestError(error.message)
        self._valid.add(key)
        return None


@dataclass(slots=True)
class _Shared:
    """A check in flight, and how many requests wait for it."""

    task: asyncio.Task[JaxserveError | None]
    num_callers: int = 0


class _Recent:
    """Texts by the digest of a grammar: the `NUM_KEPT` that were used last."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._texts

    def get(self, key: bytes) -> str | None:
        """Returns the text of a grammar, and keeps it for longer; None: there is none."""
        if key in self._texts:
            self._texts.move_to_end(key)
        return self._texts.get(key)

    def add(self, key: bytes, text: str = "") -> None:
        """Adds a text, and drops the oldest if there are too many."""
        self._texts[key] = text
        self._texts.move_to_end(key)
        if len(self._texts) > NUM_KEPT:
            self._texts.popitem(last=False)

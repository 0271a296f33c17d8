"""Checks the grammars of requests without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.worker import GrammarWorker
from jaxserve.text.tokenizer import Tokenizer

AT_A_TIME = 2
"""Maximum number of concurrent checks: each may take seconds of processor time."""

NUM_KEPT = 256
"""Number of valid grammars in the cache: clients send the same ones again and again."""


class GrammarChecks:
    """Runs `check_grammar` in worker processes, once for each grammar.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: width of the logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._free = asyncio.Semaphore(AT_A_TIME)
        self._idle: list[GrammarWorker] = []
        self._valid: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError, without a ``param``, unless the grammar can be followed."""
        if grammar.kind == "json_object":
            return  # the request contributes nothing to this grammar
        if grammar in self._valid:
            self._valid.move_to_end(grammar)
            return
        await self._free.acquire()
        worker = self._idle.pop() if self._idle else self._new_worker()
        checking = asyncio.create_task(asyncio.to_thread(worker.check, grammar))

        def done(task: asyncio.Task[None]) -> None:
            self._idle.append(worker)
            self._free.release()
            if not task.cancelled():
                task.exception()  # marks it as retrieved: the request may have been cancelled

        checking.add_done_callback(done)
        # A check is not cancelled with its request: it counts in the semaphore until it is done.
        await asyncio.shield(checking)
        self._valid[grammar] = None
        if len(self._valid) > NUM_KEPT:
            self._valid.popitem(last=False)

    def _new_worker(self) -> GrammarWorker:
        return GrammarWorker(self._tokenizer, self._vocab_size)

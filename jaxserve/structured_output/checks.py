"""Checks the grammars of requests without holding up others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.worker import GrammarWorker
from jaxserve.text.tokenizer import Tokenizer

AT_A_TIME = 2
"""Checks that run at the same time: one may take seconds, and processors have other work too."""

NUM_KEPT = 256
"""Sound grammars that are remembered: clients send the same ones again and again."""


class GrammarChecks:
    """`structured.check_grammar` beside the loop, once for each grammar.

    Args:
      tokenizer: of the model.
      vocab_size: width of its logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._idle: list[GrammarWorker] = []
        self._sound: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError, without a ``param``, if it cannot be followed."""
        if grammar.kind == "json_object":
            return  # nothing in it comes from the request
        if grammar in self._sound:
            self._sound.move_to_end(grammar)
            return
        await self._turns.acquire()
        worker = self._idle.pop() if self._idle else self._new_worker()
        checking = asyncio.create_task(asyncio.to_thread(worker.check, grammar))

        def done(task: asyncio.Task[None]) -> None:
            self._idle.append(worker)
            self._turns.release()
            if not task.cancelled():
                task.exception()  # seen, also if nobody waits for it any more

        checking.add_done_callback(done)
        # A check goes on when who asked for it has left, and its turn with it.
        await asyncio.shield(checking)
        self._sound[grammar] = None
        if len(self._sound) > NUM_KEPT:
            self._sound.popitem(last=False)

    def _new_worker(self) -> GrammarWorker:
        return GrammarWorker(self._tokenizer, self._vocab_size)

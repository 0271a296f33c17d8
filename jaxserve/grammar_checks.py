"""Checks the grammars of requests without holding up others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from jaxserve.grammar_worker import GrammarWorker
from jaxserve.sampling_params import Grammar
from jaxserve.structured import check_grammar
from jaxserve.tokenizer import Tokenizer

AT_A_TIME = 2
"""Checks that run at the same time: one may take seconds, and processors have other work too."""

NUM_KEPT = 256
"""Sound grammars that are remembered: clients send the same ones again and again."""

SIMPLE = frozenset({"json_object", "choice"})
"""Kinds of grammars that are little work whatever they say."""


class GrammarChecks:
    """`structured.check_grammar` beside the loop, once for each grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._idle: list[GrammarWorker] = []
        self._sound: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError, without a ``param``, if it cannot be followed."""
        if grammar in self._sound:
            self._sound.move_to_end(grammar)
            return
        await self._turns.acquire()
        worker = self._idle.pop() if self._idle else GrammarWorker(self._tokenizer)
        check: Callable[[Grammar], None] = worker.check
        if grammar.kind in SIMPLE:
            check = self._check_here
        checking = asyncio.create_task(asyncio.to_thread(check, grammar))

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

    def _check_here(self, grammar: Grammar) -> None:
        check_grammar(grammar, self._tokenizer)

"""Checks the grammars of requests without holding up others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from jaxserve.sampling_params import Grammar
from jaxserve.structured import check_grammar
from jaxserve.tokenizer import Tokenizer

AT_A_TIME = 2
"""Checks that run at the same time: one may take seconds, and threads have other work too."""

NUM_KEPT = 256
"""Sound grammars that are remembered: clients send the same ones again and again."""


class GrammarChecks:
    """`structured.check_grammar` in threads, once for each grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._sound: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError, without a ``param``, if it cannot be followed."""
        if grammar in self._sound:
            self._sound.move_to_end(grammar)
            return
        async with self._turns:
            await asyncio.to_thread(check_grammar, grammar, self._tokenizer)
        self._sound[grammar] = None
        if len(self._sound) > NUM_KEPT:
            self._sound.popitem(last=False)

"""What may stand around a text that has a grammar: a think block before it, calls instead of it."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.parsing.call_rules import Terminal, quoted
from jaxserve.text.tokenizer import Tokenizer


def answer_frame(*, think: str, calls: str) -> str:
    """A grammar in the Lark syntax of llguidance, in which ``@answer`` is the text.

    Args:
      think: the rule ``think`` with those that it needs, or empty.
      calls: the rule ``calls`` likewise.

    Returns:
      Empty if nothing can stand around the text.
    """
    if not think and not calls:
        return ""
    answer = "(@answer | calls)" if calls else "@answer"
    return f"start: {'think ' if think else ''}{answer}\n{think}{calls}"


def marks_of(tokenizer: Tokenizer) -> Terminal:
    """How to write a mark in a rule for the tokens of a model: some marks are special tokens."""
    special: Mapping[str, int] = {tokenizer.token_text(i): i for i in tokenizer.special_ids}

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else quoted(text)

    return mark

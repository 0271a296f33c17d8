"""A front end whose answers are known beforehand, for tests of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import Ready, Submit
from jaxserve.testing.scripted_engine import READY, ScriptedEngine
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer


def scripted_text_engine(
    *answers: str | Sequence[int],
    tokens_per_output: int = 1,
    ready: Ready = READY,
    **options: Any,
) -> TextEngine:
    """A front end on a `ScriptedEngine` with the tiny tokenizer.

    Args:
      *answers: texts or token ids. Requests get them in turn, each followed by the end token.
      tokens_per_output: how many tokens come at a time.
      ready: what the engine has settled on.
      **options: of `TextEngine`.
    """
    tokenizer = tiny_tokenizer()
    assert tokenizer.eos_token_id is not None
    scripts = [
        [*(tokenizer.encode(a) if isinstance(a, str) else a), tokenizer.eos_token_id]
        for a in answers
    ]

    def script(submit: Submit) -> Sequence[int]:
        return scripts[(len(engine.submitted) - 1) % len(scripts)]

    engine = ScriptedEngine(script, tokens_per_output=tokens_per_output, ready=ready)
    return TextEngine(engine, tokenizer, **{"model_names": ("tiny",), **options})

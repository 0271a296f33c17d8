"""A text engine with scripted completions, for tests of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.front.counts import Counts
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import Ready, Submit
from jaxserve.testing.scripted_engine import READY, ScriptedEngine
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer


def scripted_text_engine(
    *answers: str | Sequence[int],
    tokens_per_output: int = 1,
    ready: Ready = READY,
    max_in_flight: int = 1024,
    counts: Counts | None = None,
    **options: Any,
) -> TextEngine:
    """Returns a text engine on a `ScriptedEngine` with the tiny tokenizer.

    Args:
      *answers: strings or token IDs. Requests get them in turn, each followed by the end token.
      tokens_per_output: how many tokens each engine output carries.
      ready: the sizes that the engine reports.
      max_in_flight, counts: as for `TextEngine`.
      **options: as for `ServedModel.create`.
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
    model = ServedModel.create(ready, tokenizer, **{"names": ("tiny",), **options})
    return TextEngine(engine, model, max_in_flight=max_in_flight, counts=counts)

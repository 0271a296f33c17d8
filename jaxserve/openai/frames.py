"""What may stand around the text of an answer that has a grammar: thoughts, and calls instead."""

from __future__ import annotations

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import TextEngine
from jaxserve.openai.tools import PROMPT_TAIL, ToolUse
from jaxserve.parsing.answer_frame import answer_frame, marks_of
from jaxserve.parsing.call_rules import RuleWriter
from jaxserve.parsing.registry import call_rules, think_rules
from jaxserve.sampling_params import SamplingParams


def framed(
    text_engine: TextEngine, params: SamplingParams, use: ToolUse, prompt: str
) -> SamplingParams:
    """The parameters of an answer to a rendered prompt, if its text has a grammar.

    A model that thinks may do so before it, and calls that may be made can stand instead of it.

    Raises:
      InvalidRequestError: there are such calls, and no grammar is known for the form in which this
        model writes them.
    """
    if params.grammar is None:
        return params
    mark = marks_of(text_engine.tokenizer)
    think = calls = ""
    if text_engine.reasoning_parser is not None:
        think = think_rules(text_engine.reasoning_parser, mark, prompt=prompt[-PROMPT_TAIL:])
    if use.choice == "auto":
        assert text_engine.tool_call_parser is not None
        assert use.parameters is not None
        rules = RuleWriter(use.parameters, parallel=use.parallel, mark=mark)
        written = call_rules(text_engine.tool_call_parser, rules)
        if written is None:
            raise InvalidRequestError(
                f"an answer cannot be held to a grammar and have calls in the form "
                f"{text_engine.tool_call_parser}; send tool_choice 'none' or no grammar",
                param="tools",
            )
        calls = written
    frame = answer_frame(think=think, calls=calls)
    return msgspec.structs.replace(
        params, grammar=msgspec.structs.replace(params.grammar, frame=frame)
    )

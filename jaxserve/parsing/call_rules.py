"""Rules that hold a model to calls in its own format, where an answer is calls or a given text.

They are in the Lark syntax of llguidance. Each format that can be held to has a function from a
`RuleWriter` to its rules beside its parser, and a line in `registry.CALL_RULES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.parsing.enforced import any_call_schema
from jaxserve.structured_output.grammar import json_term

Terminal = Callable[[str], str]
"""From the text of a mark to what stands for it in a rule: the text, or a special token."""


class RuleWriter:
    """What the rules of a format are made with.

    Args:
      tools: function names -> JSON schemas of their parameters.
      parallel: whether there may be more than one call.
      mark: what stands for a mark of the format.

    Attributes:
      tools: as above.
      mark: as above.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool, mark: Terminal
    ) -> None:
        self.tools = tools
        self.mark = mark
        self._parallel = parallel

    def json_call(self, arguments: str) -> str:
        """A call of any tool as ``{"name": ..., arguments: {...}}``.

        Raises:
          InvalidRequestError: a schema with references is nested too deeply.
        """
        return json_term(any_call_schema(self.tools, arguments=arguments))

    def calls(self, call: str, *, between: str = "", before: str = "", after: str = "") -> str:
        """The rule ``calls``: one call, or as many as there may be."""
        more = f"({between} call)*" if self._parallel else ""
        return f"calls: {before} call {more} {after}\ncall: {call}\n"


def quoted(text: str) -> str:
    """A text as it stands in a rule."""
    return json.dumps(text, ensure_ascii=False)

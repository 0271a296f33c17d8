"""Reads completions that must be nothing but calls, whatever the format of the model.

Their text is plain JSON that matches `structured_output.structural_tag.forced_calls_schema`.
"""

from __future__ import annotations

from jaxserve.parsing.json_call import json_calls, stream_object
from jaxserve.parsing.parser import Format
from jaxserve.parsing.scanner import Reading, Scanner


def json_array_calls(scan: Scanner) -> Reading[None]:
    """Reads an array of calls, for ``tool_choice: "required"``."""
    yield from json_calls(scan)
    yield from scan.skip()


def named_call(name: str) -> Format:
    """Returns the format of a completion that is the arguments of one function."""

    def read(scan: Scanner) -> Reading[None]:
        if (yield from scan.seek()) == "{":
            scan.start_call(name)
            yield from stream_object(scan)
            yield from scan.skip()

    return read

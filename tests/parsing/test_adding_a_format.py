"""The example in the package's docstring is a working format."""

import inspect
import textwrap

import jaxserve.parsing
from jaxserve.parsing.json_call import stream_object
from jaxserve.parsing.parser import Parser
from jaxserve.parsing.scanner import NAME, Reading, Scanner


def example():
    doc = inspect.getdoc(jaxserve.parsing) or ""
    lines = [line for line in doc.splitlines() if line.startswith("    ")]
    names = {"NAME": NAME, "Scanner": Scanner, "Reading": Reading, "stream_object": stream_object}
    exec(textwrap.dedent("\n".join(lines)), names)
    return names["shout"]


def test_the_example_reads_calls(read_cut):
    shout = example()

    def make_parser():
        return Parser(shout, tools={"f": {}})

    completion = read_cut(make_parser, 'I CALL f {"a": 1}; and CALL f {"b": ')
    assert completion.calls == [("f", '{"a": 1}'), ("f", '{"b": ')]
    assert (completion.content, completion.num_complete) == ("I and", 1)
    for text in ("CALL me", "CALL g {}", "CALL f []", "CAL", "CALL f"):
        assert read_cut(make_parser, text).content == text

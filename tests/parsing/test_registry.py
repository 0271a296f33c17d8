"""Parsers by name, and the detection of formats in chat templates."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)

# Excerpts from the templates of well-known models about calls and thinking.
HERMES = """'\\n</tools>\\n\\nFor each function call, return a json object with function name and
 arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, '"""
QWEN3 = HERMES + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>"
CODER = "format with NO suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n<parameter=p>"
GLM = "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>"
MISTRAL = "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"
LLAMA = '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument'
LLAMA_BUILTIN = "{{- \"<|python_tag|>\" + tool_call.name + '.call(' }}"
LLAMA4 = "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]"
DEEPSEEK = "{% if '</think>' in content %}...{{'<｜Assistant｜><think>\\n'}}<｜tool▁calls▁begin｜>"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (GLM, None, None),
        (MISTRAL, "mistral", None),
        (LLAMA, "llama3_json", None),
        (LLAMA_BUILTIN, "llama3_json", None),
        (LLAMA4, "pythonic", None),
        (DEEPSEEK, None, "deepseek_r1"),
        (PLAIN, None, None),
        ("", None, None),
    ],
)
def test_formats_are_detected_in_templates(template, tools, reasoning):
    assert detect_tool_parser(template) == tools
    assert detect_reasoning_parser(template) == reasoning


def test_every_name_has_a_working_parser():
    for name in TOOL_PARSERS:
        parser = tool_parser(name)
        assert "".join(event.text for event in parser.push("a") + parser.finish()) == "a"
    for name in REASONING_PARSERS:
        parser = reasoning_parser(name, prompt="</think>")
        assert "".join(event.text for event in parser.push("a") + parser.finish()) == "a"


def test_an_error_for_an_unknown_name_lists_the_names():
    with pytest.raises(ConfigError, match=r"'herms'.*hermes, llama3_json, mistral, pythonic"):
        tool_parser("herms")
    with pytest.raises(ConfigError, match=r"'gpt'.*deepseek_r1, qwen3"):
        reasoning_parser("gpt")

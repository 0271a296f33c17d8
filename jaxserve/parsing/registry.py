"""The parsers and rules of all formats by name, and the formats that a chat template implies."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.parsing.parser import Parser
from jaxserve.structured_output.structural_tag import RuleWriter, TagTerm

# Name of a format -> "module:function", imported on first use.
TOOL_PARSERS: dict[str, str] = {
    "hermes": "jaxserve.parsing.hermes:hermes",
    "llama3_json": "jaxserve.parsing.llama3_json:llama3_json",
    "mistral": "jaxserve.parsing.mistral:mistral",
    "pythonic": "jaxserve.parsing.pythonic:pythonic",
    "qwen3_coder": "jaxserve.parsing.qwen3_coder:qwen3_coder",
}
# The rules of formats for structural tags. A format without rules has no line here.
CALL_RULES: dict[str, str] = {
    "hermes": "jaxserve.parsing.hermes:hermes_rules",
    "llama3_json": "jaxserve.parsing.llama3_json:llama3_json_rules",
    "mistral": "jaxserve.parsing.mistral:mistral_rules",
    "qwen3_coder": "jaxserve.parsing.qwen3_coder:qwen3_coder_rules",
}
REASONING_PARSERS: dict[str, str] = {
    "deepseek_r1": "jaxserve.parsing.reasoning:deepseek_r1",
    "qwen3": "jaxserve.parsing.reasoning:qwen3",
}
THINK_RULES: dict[str, str] = {
    "deepseek_r1": "jaxserve.parsing.reasoning:deepseek_r1_rules",
    "qwen3": "jaxserve.parsing.reasoning:qwen3_rules",
}


def tool_parser(name: str, tools: Mapping[str, Mapping[str, Any]] | None = None) -> Parser:
    """Returns a parser of the calls in one completion.

    Args:
      name: name of a format, a key of `TOOL_PARSERS`.
      tools: names of the functions that can be called -> JSON schemas of their parameters. A call
        of any other function is content. None: any function can be called.

    Raises:
      ConfigError: no format has this name.
    """
    return Parser(_lookup(TOOL_PARSERS, name, "tool call parser"), tools=tools)


def reasoning_parser(name: str, *, prompt: str = "") -> Parser:
    """Returns a parser of the think block of one completion.

    Args:
      name: name of a format, a key of `REASONING_PARSERS`.
      prompt: the rendered prompt, or its last characters: it may have opened or closed the block.

    Raises:
      ConfigError: no format has this name.
    """
    read = _lookup(REASONING_PARSERS, name, "reasoning parser")
    return Parser(functools.partial(read, prompt=prompt))


def call_rules(name: str, rules: RuleWriter) -> str | None:
    """Returns the rule ``calls`` of a format, for `structural_tag`; None if it has no rules.

    Raises:
      InvalidRequestError: a schema is nested too deeply.
    """
    return _lookup(CALL_RULES, name, "tool call parser")(rules) if name in CALL_RULES else None


def think_rules(name: str, tag: TagTerm, *, prompt: str) -> str:
    """Returns the rule ``think`` of a format, for `structural_tag`; "" if no block can follow.

    Args:
      name: name of a format, a key of `THINK_RULES`.
      tag: writes the tags of the format.
      prompt: the rendered prompt, or its last characters: it may have opened or closed the block.

    Raises:
      ConfigError: no format has this name.
    """
    return _lookup(THINK_RULES, name, "reasoning parser")(tag, prompt)


def detect_tool_parser(chat_template: str) -> str | None:
    """Returns the format of calls that a chat template asks for; None if it is unknown."""
    if "<tool_call>" in chat_template:
        if "<arg_key>" in chat_template:  # GLM has another format, which is not supported
            return None
        return "qwen3_coder" if "<function=" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "[func_name1(" in chat_template and "<TOOLCALL>" not in chat_template:
        return "pythonic"
    if "python_tag" in chat_template or '{"name": function name, "parameters"' in chat_template:
        return "llama3_json"
    return None


def detect_reasoning_parser(chat_template: str) -> str | None:
    """Returns the format of the think blocks of a chat template; None if it has no think tags."""
    if "<think>" not in chat_template and "</think>" not in chat_template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in chat_template else "qwen3"


def _lookup(parsers: Mapping[str, str], name: str, what: str) -> Any:
    if name not in parsers:
        raise ConfigError(f"unknown {what} {name!r}; expected one of {', '.join(sorted(parsers))}")
    module, function = parsers[name].split(":")
    return getattr(importlib.import_module(module), function)

"""Which module reads which format, and which format a chat template asks for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.parsing.call_rules import RuleWriter, Terminal
from jaxserve.parsing.parser import Parser

# Name of a format -> "module:function", imported when it is needed.
TOOL_PARSERS: dict[str, str] = {
    "hermes": "jaxserve.parsing.hermes:hermes",
    "llama3_json": "jaxserve.parsing.llama3_json:llama3_json",
    "mistral": "jaxserve.parsing.mistral:mistral",
    "pythonic": "jaxserve.parsing.pythonic:pythonic",
    "qwen3_coder": "jaxserve.parsing.qwen3_coder:qwen3_coder",
}
# The same for the rules that hold a model to a format, where it has any: see `answer_frame`.
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
    """A parser of the calls in one answer.

    Args:
      name: of a format, a key of `TOOL_PARSERS`.
      tools: the functions that can be called -> JSON schemas of their parameters. What would call
        another one is content. None: any name can be called.

    Raises:
      ConfigError: there is no format of this name.
    """
    return Parser(_lookup(TOOL_PARSERS, name, "tool call parser"), tools=tools)


def reasoning_parser(name: str, *, prompt: str = "") -> Parser:
    """A parser of the think block of one answer.

    Args:
      name: of a format, a key of `REASONING_PARSERS`.
      prompt: the rendered prompt, or its last characters: it may have opened or closed the block.

    Raises:
      ConfigError: there is no format of this name.
    """
    read = _lookup(REASONING_PARSERS, name, "reasoning parser")
    return Parser(functools.partial(read, prompt=prompt))


def call_rules(name: str, rules: RuleWriter) -> str | None:
    """The rule ``calls`` of a format, for `answer_frame`; None if it cannot be held to.

    Raises:
      InvalidRequestError: a schema with references is nested too deeply.
    """
    return _lookup(CALL_RULES, name, "tool call parser")(rules) if name in CALL_RULES else None


def think_rules(name: str, mark: Terminal, *, prompt: str) -> str:
    """The rule ``think`` of a format, for `answer_frame`; empty if the prompt leaves no room for a
    block. Arguments as for `reasoning_parser`.
    """
    return _lookup(THINK_RULES, name, "reasoning parser")(mark, prompt)


def detect_tool_parser(chat_template: str) -> str | None:
    """The format in which a chat template has the model write calls; None if none is known."""
    if "<tool_call>" in chat_template:
        if "<arg_key>" in chat_template:  # GLM: like neither of the two
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
    """The kind of think block that a chat template is written for; None if for none."""
    if "<think>" not in chat_template and "</think>" not in chat_template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in chat_template else "qwen3"


def _lookup(parsers: Mapping[str, str], name: str, what: str) -> Any:
    if name not in parsers:
        raise ConfigError(f"no {what} is called {name!r}; there are {', '.join(sorted(parsers))}")
    module, function = parsers[name].split(":")
    return getattr(importlib.import_module(module), function)

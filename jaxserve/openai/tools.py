"""The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.front.served_model import ServedModel
from jaxserve.openai.content import joined
from jaxserve.openai.decoding import wrong_type
from jaxserve.openai.protocol import ChatRequest
from jaxserve.parsing.forced_calls import json_array_calls, named_call
from jaxserve.parsing.parser import MessageParser, Parser
from jaxserve.parsing.registry import reasoning_parser, tool_parser
from jaxserve.parsing.scanner import NAME
from jaxserve.text.chat_template import shows_tools

MAX_TOOLS = 512
MAX_NAME_CHARS = 256

PROMPT_TAIL = 200
"""Number of characters at the end of a prompt that are searched for the tags of a think block."""

_CHOICES = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True):
    function: _Function
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call, and whether it must call one.

    Attributes:
      definitions: the tools as the client sent them, for the template; empty if none may be
        called.
      parameters: function names -> JSON schemas of their parameters.
      choice: as in ``tool_choice``; "named": the function ``name`` must be called.
      name: the function that must be called, if ``choice`` is "named".
      parallel: more than one call is allowed.
    """

    definitions: tuple[dict[str, Any], ...] = ()
    parameters: Mapping[str, Mapping[str, Any]] | None = None
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        """Whether the completion must be tool calls in plain JSON, after any think block."""
        return self.choice in ("required", "named")


def read_tools(request: ChatRequest, model: ServedModel) -> ToolUse:
    """Reads the tools of a request.

    Raises:
      InvalidRequestError: the tools or the choice are invalid, or the model cannot call tools.
    """
    parameters = _parameters(request.tools)
    choice, name = _choice(request.tool_choice, parameters)
    if choice == "none":
        return ToolUse()
    assert request.tools is not None
    use = ToolUse(
        tuple(request.tools), parameters, choice, name, request.parallel_tool_calls is not False
    )
    # Forced calls are plain JSON, whatever the format of the model.
    if model.tool_call_parser is None and not use.is_enforced:
        raise InvalidRequestError(
            "the chat template of this model has no known format for tool calls; start the server "
            "with --tool-call-parser NAME (and --chat-template FILE), or send tool_choice "
            "'required' or 'none'",
            param="tools",
        )
    return use


def with_tools_text(request: ChatRequest, use: ToolUse, model: ServedModel) -> ChatRequest:
    """Returns the request with a text about its tools, if it needs one.

    That is if the model must call a tool, but its template cannot show any. The text stands at the
    end of the system message. Without one it stands at the start of the first user message: not
    every template accepts a system message, and some have a default one.
    """
    template = model.template_for(with_tools=True)
    messages = request.messages
    if not use.is_enforced or not messages or template is None or shows_tools(template):
        return request
    roles = [message.get("role") for message in messages]
    place = 0 if roles[0] in ("system", "developer") or "user" not in roles else roles.index("user")
    message, text = messages[place], _tools_text(use)
    content = message.get("content")
    if not isinstance(content, str | list | None):
        return request  # rendering refuses it
    is_system = message.get("role") in ("system", "developer")
    shown = joined(content, text) if is_system else joined(text, content)
    messages = [*messages[:place], {**message, "content": shown}, *messages[place + 1 :]]
    return msgspec.structs.replace(request, messages=messages)


def _tools_text(use: ToolUse) -> str:
    functions = [tool["function"] for tool in use.definitions]
    if use.name is None:
        form = '[{"name": function name, "parameters": object with its arguments}]'
        answer = f"Call one or more of these functions. Answer with JSON of the form {form}."
        if not use.parallel:
            answer = answer.replace("one or more", "one")
    else:
        functions = [function for function in functions if function["name"] == use.name]
        answer = "Call this function. Answer with the JSON object of its arguments."
    return "\n".join([answer, *(json.dumps(f, ensure_ascii=False) for f in functions)])


def make_parser(model: ServedModel, use: ToolUse, prompt: str) -> MessageParser | None:
    """Returns the parser of one completion of a rendered prompt; None if all text is content."""
    reasoning = calls = None
    if model.reasoning_parser is not None:
        reasoning = reasoning_parser(model.reasoning_parser, prompt=prompt[-PROMPT_TAIL:])
    if use.is_enforced:
        read = json_array_calls if use.name is None else named_call(use.name)
        calls = Parser(read, tools=use.parameters, calls_only=True)
    elif use.choice == "auto":
        assert model.tool_call_parser is not None
        calls = tool_parser(model.tool_call_parser, use.parameters)
    if reasoning is None and calls is None:
        return None
    return MessageParser(reasoning, calls)


def call_id_maker(model: ServedModel) -> Callable[[], str]:
    """Returns a maker of call IDs in the form that the model's template accepts."""
    return _mistral_id if model.tool_call_parser == "mistral" else _call_id


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


def _parameters(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Returns the schemas of the parameters by function name. Raises InvalidRequestError."""
    if not tools:
        return {}
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    try:
        functions = [tool.function for tool in msgspec.convert(tools, list[_Tool])]
    except msgspec.ValidationError as error:
        raise wrong_type(error, list[_Tool], under="tools") from error
    parameters: dict[str, Mapping[str, Any]] = {}
    for i, function in enumerate(functions):
        name, path = function.name, f"tools[{i}].function.name"
        if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
            raise InvalidRequestError(
                f"{path} must be letters, digits and _ - . / :, at most {MAX_NAME_CHARS}, got "
                f"{name[:50]!r}",
                param=path,
            )
        if name in parameters:
            raise InvalidRequestError(f"{path}: {name!r} appears twice in tools", param=path)
        parameters[name] = function.parameters or {}
    return parameters


def _choice(
    value: Any, known: Mapping[str, Any]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    if value is None:
        value = "auto" if known else "none"
    if value in ("none", "auto"):
        return (value if known else "none"), None
    if value == "required":
        if not known:
            raise InvalidRequestError(
                "tool_choice 'required' needs tools to choose from", param="tool_choice"
            )
        return "required", None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value.get("type") != "function":
        shown = repr(value)[:100]
        raise InvalidRequestError(
            f"tool_choice must be {_CHOICES}, got {shown}", param="tool_choice"
        )
    if name not in known:
        raise InvalidRequestError(
            f"tool_choice names the function {name[:100]!r}, which is not in tools",
            param="tool_choice",
        )
    return "named", name

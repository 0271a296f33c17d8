"""The functions that a request to /v1/responses offers, and the names that the model sees.

Functions are in ``tools``, in its namespaces, and in items of the input that add tools. A chat has
no namespaces, so a function in one is shown under a name that starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.openai.responses_protocol import ResponsesRequest

ADDING_ITEMS = ("additional_tools", "tool_search_output")
"""The types of items that add tools."""

PLAIN_NAMESPACE = "functions"
"""A namespace whose functions keep their own names."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call.

    Attributes:
      definition: the tool as the client sent it.
      namespace: the namespace of the function, or None.
    """

    definition: Mapping[str, Any]
    namespace: str | None = None

    @property
    def shown_name(self) -> Any:
        """The name that the model sees. `read_tools` refuses one that is not a string."""
        return shown_name(self.definition.get("name"), self.namespace)

    def in_chat(self) -> dict[str, Any]:
        """Returns the tool in the form of a chat, which nests the function in the tool."""
        left_out = ("type", "strict", "name")
        fields = {k: v for k, v in self.definition.items() if k not in left_out and v is not None}
        name = {} if self.shown_name is None else {"name": self.shown_name}
        return {"type": "function", "function": {**name, **fields}}


def shown_name(name: Any, namespace: Any) -> Any:
    """Returns the name that the model sees for a function in a namespace, which may be None."""
    if not isinstance(name, str) or not isinstance(namespace, str):
        return name
    prefix = namespace.rstrip("_")
    return f"{prefix}__{name}" if prefix and namespace != PLAIN_NAMESPACE else name


def function_tools(request: ResponsesRequest) -> list[FunctionTool]:
    """Returns the functions of a request.

    Other tools, such as web_search, need a separate service and are left out. An item may add a
    function again; its last definition counts.
    """
    added: list[FunctionTool] = []
    for item in request.input if isinstance(request.input, list) else ():
        if isinstance(item, dict) and item.get("type") in ADDING_ITEMS:
            added += _functions(item.get("tools"))
    last = {_name_or(i, tool): tool for i, tool in enumerate(added)}
    tools = [tool for tool in _functions(request.tools) if _name_or(None, tool) not in last]
    return [*tools, *last.values()]


def _name_or(other: int | None, tool: FunctionTool) -> str | int | None:
    """Returns the name that the model sees, or ``other`` for one that `read_tools` refuses."""
    return tool.shown_name if isinstance(tool.shown_name, str) else other


def _functions(tools: Any, namespace: str | None = None) -> list[FunctionTool]:
    found: list[FunctionTool] = []
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind == "function":
            found.append(FunctionTool(tool, namespace))
        elif kind == "namespace" and namespace is None and isinstance(tool.get("name"), str):
            found += _functions(tool.get("tools"), tool["name"])
    return found

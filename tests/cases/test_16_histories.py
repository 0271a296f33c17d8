"""Failures that users of other servers have reported: chat templates, and histories with calls."""

from typing import Any

import pytest

from jaxserve.testing.api_client import CHAT
from jaxserve.testing.scripted_checkpoint import CONTENT_TEMPLATE, HISTORY_TEMPLATE
from jaxserve.testing.tiny import write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend

RESPONSES = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


@pytest.mark.parametrize("where", ["list", "files", "both"])
def test_js_133_the_template_for_tools_renders_chats_with_tools(serve, tmp_path, where) -> None:
    own = "{{ '%s:' }}{%% for t in tools or [] %%}{{ t.function.name }};{%% endfor %%}" + (
        CONTENT_TEMPLATE.replace("%", "%%")
    )
    named = [{"name": name, "template": own % name} for name in ("default", "tool_use", "rag")]
    named[1]["template"] += "{# <tool_call> #}"
    templates = named if where != "files" else None
    folder = write_checkpoint(
        tmp_path / "named",
        tokenizer_config={"chat_template": templates},
        tokenizer=full_backend(),
    )
    prefix = ""
    if where != "list":
        prefix = "file-"
        folder.joinpath("additional_chat_templates").mkdir()
        for name, path in (
            ("default", "chat_template.jinja"),
            ("tool_use", "additional_chat_templates/tool_use.jinja"),
            ("rag", "additional_chat_templates/rag.jinja"),
        ):
            text = own % f"file-{name}" + "{# <tool_call> #}" * (name == "tool_use")
            folder.joinpath(path).write_text(text)
    server = serve(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert server.text_engine.model.tool_call_parser == "hermes"
    assert server.shown_chat(messages) == f"{prefix}default:hi"
    assert server.shown_chat(messages, tools=[TOOL]) == f"{prefix}tool_use:f;hi"
    for tools, text in ((None, "default:hi"), ([TOOL], "tool_use:f;hi")):
        tokens = server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
        assert server.tokenizer.decode(tokens) == prefix + text


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("", ""), (" \n", ""), ("null", ""), (None, ""), ("{}", ""), ({}, "")]
    + [('{"a": 1}', " a=1"), ({"a": 1}, " a=1"), (' {"a": 1} ', " a=1")],
)
def test_js_141_the_arguments_of_earlier_calls_are_objects(
    server, set_templates, arguments, text
) -> None:
    set_templates(HISTORY_TEMPLATE)
    messages = [{"role": "assistant", "content": [], "tool_calls": [call(arguments)]}]
    assert server.shown_chat(messages) == f"[assistant:<c f{text}>]"
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert server.shown_input([item]) == f"[assistant:<c f{text}>]"


@pytest.mark.parametrize("arguments", ["[1]", "5", '"x"', "true", "{bad", [1], 5, True])
def test_js_141_other_arguments_are_refused_by_name(server, set_templates, arguments) -> None:
    set_templates(HISTORY_TEMPLATE)
    messages = [{"role": "assistant", "tool_calls": [call({}), call(arguments)]}]
    error = server.refused(CHAT, {"messages": messages})
    assert error["param"] == "messages[0].tool_calls[1].function.arguments"
    assert "must be the text of a JSON object" in error["message"]
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert server.refused(RESPONSES, {"input": [item]})["param"].startswith("input")


def test_js_141_errors_of_a_template_do_not_show_names_of_python(server, set_templates) -> None:
    set_templates("{{ messages[0].nothing.more }}")
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": "a"}]})
    assert "has no attribute 'nothing'" in error["message"]
    assert "UndefinedError" not in error["message"]


def test_pub_07_no_tool_calls_are_the_same_as_none_at_all(server, set_templates) -> None:
    set_templates(HISTORY_TEMPLATE)
    user = {"role": "user", "content": "hi"}
    for calls in ({"tool_calls": []}, {"tool_calls": None}, {}):
        answer = {"role": "assistant", "content": "hello", **calls}
        text = server.shown_chat([user, answer, user])
        assert text == "[user:hi][assistant:hello][user:hi]"


THINKING = [
    ({"type": "thinking", "thinking": "hm", "signature": "x"}, "hm"),
    ({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, {"text": "m"}]}, "hm\nm"),
    ({"type": "reasoning", "text": "hm"}, "hm"),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, "hm"),
    ({"type": "redacted_thinking", "data": "x"}, ""),
    ({"type": "thinking"}, ""),
]


@pytest.mark.parametrize(("part", "thought"), THINKING)
@pytest.mark.parametrize("with_text", [True, False])
def test_pub_12_thinking_in_a_history_is_reasoning(
    server, set_templates, part, thought, with_text
) -> None:
    set_templates(HISTORY_TEMPLATE)
    content = [part, {"type": "text", "text": "yes"}][: 1 + with_text]
    user = {"role": "user", "content": "hi"}
    text = server.shown_chat([user, {"role": "assistant", "content": content}, user])
    reasoning = f"({thought})" if thought else ""
    assert text == f"[user:hi][assistant:{'yes' * with_text}{reasoning}][user:hi]"
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert error["param"] == "messages[0].content[0]"
    own = {"role": "assistant", "content": content, "reasoning": "own"}
    assert "(own)" in server.shown_chat([user, own])

"""Failures that users of other servers have reported: templates, histories, clients, grammars."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.reference import Reference
from jaxserve.testing.scripted_checkpoint import CONTENT_TEMPLATE, EOS, EOS_ID, FIRST_SPECIAL_ID
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend, spm_backend
from jaxserve.testing.tolerance import assert_close
from jaxserve.text.template_files import ChatTemplates

RESPONSES = "/v1/responses"
INTEGER = {"type": "integer"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}

HISTORY = (
    "{% if tools %}[tools {% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<{{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% if not m.tool_calls %}empty{% endif %}{% endif %}]{% endfor %}{# <tool_call> #}"
)
END_IDS = {"generation_config": FIRST_SPECIAL_ID, "tokenizer": EOS_ID, "config": 261}
ENDS = ("<end-g>", "<end-c>")


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    """A random model."""
    return serve(random_checkpoint)


@pytest.fixture
def set_templates(server, monkeypatch):
    """``set_templates(default, tool_use)`` replaces the chat templates; calls are known."""

    def set_templates(default: str, tool_use: str | None = None, parser: str | None = "hermes"):
        model = dataclasses.replace(
            server.text_engine.model,
            chat_templates=ChatTemplates(default, tool_use),
            tool_call_parser=parser,
        )
        monkeypatch.setattr(server.text_engine, "model", model)

    return set_templates


def shown(server, path: str, body: dict[str, Any]) -> str:
    """Returns the prompt of a chat or a response."""
    prompts: list[list[int]] = []
    engine = server.text_engine.engine
    generate = engine.generate

    def keep(submit, **options):
        prompts.append(submit.prompt_token_ids)
        return generate(submit, **options)

    engine.generate = keep
    try:
        reply = server.post(path, body)
    finally:
        del engine.generate
    assert reply.status_code == 200, reply.text
    return server.tokenizer.decode(prompts[0], skip_special_tokens=False)


def shown_chat(server, messages: list[dict[str, Any]], **more: Any) -> str:
    return shown(server, CHAT, {"messages": messages, "max_tokens": 1, **more})


def shown_input(server, items: list[dict[str, Any]], **more: Any) -> str:
    return shown(server, RESPONSES, {"input": items, "max_output_tokens": 1, **more})


# End tokens.


@pytest.mark.parametrize("script", ["g", "t", "c"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_js_037_the_end_tokens_of_all_files_count(serve, scripted_checkpoint, path, script) -> None:
    ends = {"g": "<end-g>", "t": EOS, "c": "<end-c>"}
    folder = scripted_checkpoint(
        **{name: [f"ok{name}", end, "more"] for name, end in ends.items()},
        options={
            "special": ENDS,
            "generation_config": {"eos_token_id": [FIRST_SPECIAL_ID]},
            "config": {"eos_token_id": FIRST_SPECIAL_ID + 1},
        },
    )
    body = {"prompt": f"<{script}>", "messages": [{"role": "user", "content": f"<{script}>"}]}
    reply = serve(folder).post(path, {**body, "max_tokens": 9, "temperature": 0}).json()
    (choice,) = reply["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == (f"ok{script}", "stop")


# Tokens.


@pytest.fixture(scope="module")
def padded_server(serve, tmp_path_factory):
    """A model whose logits are wider than its tokenizer: IDs from 300 on are not tokens."""
    folder = tmp_path_factory.mktemp("padded") / "padded"
    return serve(write_checkpoint(folder, tiny_config(), tokenizer=full_backend(300)))


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_js_060_ids_after_the_last_token_have_no_text(padded_server, path) -> None:
    ids = [*padded_server.tokenizer.encode("ab"), 505, 511]
    reply = padded_server.post(path, {"tokens": ids})
    assert (reply.status_code, reply.json()) == (200, {"prompt": "ab"})
    error = padded_server.refused(path, {"tokens": [512]})
    assert error["param"] == "tokens"
    body = {"logit_bias": {"505": 100}, "logprobs": 3, "return_token_ids": True, "max_tokens": 3}
    (choice,) = padded_server.complete(ids, **body)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [505, 505, 505])
    again = padded_server.complete([*ids, *choice["token_ids"]], max_tokens=1)
    assert again["usage"]["prompt_tokens"] == len(ids) + 3


def top_of(reply: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Returns (token, its logprob, top logprobs) for each position but the first of a prompt."""
    logprobs = reply["choices"][0]["logprobs"]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    return [row for row in rows if row[2] is not None]


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("model", ["padded", "bytes"])
def test_js_067_tokens_with_one_text_do_not_replace_each_other(
    serve, padded_server, tmp_path_factory, model, k, rng
) -> None:
    server = padded_server
    if model == "bytes":  # <0x57> and W are different tokens with one text
        folder = tmp_path_factory.mktemp("spm") / "spm"
        server = serve(write_checkpoint(folder, tiny_config(), tokenizer=spm_backend()))
    prompt = [int(i) for i in rng.integers(0, 512, 40)]
    body = {"max_tokens": 0, "echo": True, "logprobs": k}
    by_name = top_of(server.complete(prompt, **body))
    by_id = top_of(server.complete(prompt, **body, return_tokens_as_token_ids=True))
    shared = 0
    for (token, logprob, top), (_, _, top_by_id) in zip(by_name, by_id, strict=True):
        assert sorted(top.values()) == sorted(top_by_id.values())
        assert top[token] == logprob
        assert len(top) >= k
        shared += any(name.startswith("token_id:") for name in top)
    assert shared > 0


# Templates and histories.


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
    assert shown_chat(server, messages) == f"{prefix}default:hi"
    assert shown_chat(server, messages, tools=[TOOL]) == f"{prefix}tool_use:f;hi"
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
    set_templates(HISTORY)
    messages = [{"role": "assistant", "content": [], "tool_calls": [call(arguments)]}]
    assert shown_chat(server, messages) == f"[assistant:<c f{text}>]"
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert shown_input(server, [item]) == f"[assistant:<c f{text}>]"


@pytest.mark.parametrize("arguments", ["[1]", "5", '"x"', "true", "{bad", [1], 5, True])
def test_js_141_other_arguments_are_refused_by_name(server, set_templates, arguments) -> None:
    set_templates(HISTORY)
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
    set_templates(HISTORY)
    user = {"role": "user", "content": "hi"}
    for calls in ({"tool_calls": []}, {"tool_calls": None}, {}):
        answer = {"role": "assistant", "content": "hello", **calls}
        text = shown_chat(server, [user, answer, user])
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
    set_templates(HISTORY)
    content = [part, {"type": "text", "text": "yes"}][: 1 + with_text]
    user = {"role": "user", "content": "hi"}
    text = shown_chat(server, [user, {"role": "assistant", "content": content}, user])
    reasoning = f"({thought})" if thought else ""
    assert text == f"[user:hi][assistant:{'yes' * with_text}{reasoning}][user:hi]"
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert error["param"] == "messages[0].content[0]"
    own = {"role": "assistant", "content": content, "reasoning": "own"}
    assert "(own)" in shown_chat(server, [user, own])


# Clients of /v1/responses.

NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files__",
    "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS}, {"type": "custom"}],
}
PLAIN_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {}}], ""),
        ([{"type": "compaction", "encrypted_content": "x"}], ""),
        ([{"type": "tool_search_call", "call_id": "c", "arguments": {}}], ""),
        ([{"type": "ghost_snapshot", "ghost_commit": {}}], ""),
        ([{"type": "of_next_year", "id": "x"}], ""),
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** X"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            ],
            "[assistant:<c patch input=*** X>][tool:done]",
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
            ],
            "[assistant:<c local_shell command=['ls']>][tool:a.py]",
        ),
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
            ],
            '[assistant:<c shell commands=[\'ls\']>][tool:[{"stdout": "a"}]]',
        ),
        (
            [{"type": "mcp_call", "id": "m", "name": "f", "arguments": '{"a": 1}', "output": "x"}],
            "[assistant:<m f a=1>][tool:x]",
        ),
        (
            [
                {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
                | {"namespace": "mcp__files__"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "[assistant:<c mcp__files__read>][tool:x]",
        ),
    ],
)
def test_pub_09_items_of_other_tools_are_skipped_or_shown(
    server, set_templates, items, text
) -> None:
    set_templates(HISTORY)
    around = [message("developer", "be brief"), message("user", "hi")]
    assert shown_input(server, [*around, *items]) == f"[system:be brief][user:hi]{text}"


def test_pub_09_items_and_namespaces_add_functions(server, set_templates) -> None:
    set_templates(HISTORY)
    adding = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, PLAIN_TOOL]}
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    first = "[tools mcp__files__read f ][user:hi]"
    user = message("user", "hi")
    assert shown_input(server, [adding, user], tools=hosted) == first
    assert shown_input(server, [user], tools=[NAMESPACE, PLAIN_TOOL, *hosted]) == first
    assert shown_input(server, [adding, user], tools=[PLAIN_TOOL]) == first


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "read"}])
def test_pub_09_a_call_carries_its_namespace(server, set_templates, choice) -> None:
    set_templates(HISTORY)
    body = {"input": "hi", "tools": [NAMESPACE], "tool_choice": choice, "max_output_tokens": 90}
    with server.openai() as client:
        (item,) = client.responses.create(model="rand", **body).output
        *_, last = client.responses.create(model="rand", stream=True, **body)
    for one in (item, last.response.output[0]):
        assert (one.type, one.name, one.namespace) == ("function_call", "read", "mcp__files__")
        assert json.loads(one.arguments)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/responses/input_tokens", "nothing at /v1/responses/input_tokens"),
        ("/v1/responses/compact", "nothing at /v1/responses/compact"),
        ("/v1/responses/x/y/z", "nothing at /v1/responses/x/y/z"),
        ("/v1/responses/resp_1/cancel", "stores no responses"),
    ],
)
def test_pub_44_only_stored_responses_are_said_to_be_missing(server, path, message) -> None:
    error = server.refused(path, {}, status=404)
    assert message in error["message"]


def test_pub_44_a_stored_response_cannot_be_read_or_deleted(server) -> None:
    with server.openai() as client:
        for function in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(Exception, match="stores no responses"):
                function("resp_1")
        with pytest.raises(Exception, match="stores no responses"):
            client.responses.input_items.list("resp_1")


# Numbers.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_pub_37_whole_floats_are_integers(server, path) -> None:
    start = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    body = {"top_k": 40, "max_tokens": 10, "seed": 3, "logit_bias": {"5": 1}, "min_tokens": 2}
    written = {"top_k": 40.0, "max_tokens": 1e1, "seed": 3.0, "min_tokens": 2.0}
    plain = server.post(path, {**start, **body}).json().get("choices")
    floats = server.post(path, {**start, **body, **written})
    assert floats.json().get("choices") == plain, floats.text
    for name, value in (("top_k", 40.5), ("seed", 1e30), ("max_tokens", "10"), ("n", True)):
        assert server.refused(path, {**start, name: value})["param"] == name


def test_pub_37_token_ids_may_be_whole_floats(server) -> None:
    more = {"max_tokens": 3, "temperature": 0, "stop_token_ids": [5.0], "return_token_ids": True}
    replies = [server.complete(prompt, **more) for prompt in ([1.0, 2.0], [1, 2], [[1.0, 2]])]
    assert len({str(reply["choices"]) for reply in replies}) == 1
    assert server.refused(COMPLETIONS, {"prompt": [1.0, 2.5]})["param"] == "prompt"
    tokens = server.post("/detokenize", {"tokens": [1.0, 2.0]}).json()
    assert tokens == server.post("/detokenize", {"tokens": [1, 2]}).json()


# Grammars.


def generated(server, field: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    """Returns the only choice of a random completion of at most 200 tokens."""
    body = {"prompt": "a", "max_tokens": 200, "seed": seed, "temperature": 1, **field, **more}
    reply = server.post(COMPLETIONS, body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


NODE = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/n"}},
    "required": ["x"],
    "additionalProperties": False,
}
ENDLESS = [
    {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2},
    {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#"}], "$defs": {"n": NODE}},
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
    },
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_js_153_a_schema_that_cannot_end_is_refused(server, set_templates, schema) -> None:
    start = {"prompt": "a"}
    error = server.refused(COMPLETIONS, {**start, **json_schema(schema)})
    assert error["param"] == "response_format"
    assert "no finite value matches" in error["message"]
    body = {**start, "structured_outputs": {"json": schema}}
    assert server.refused(COMPLETIONS, body)["param"] == "structured_outputs"
    set_templates(HISTORY)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    if schema.get("type") == "object":
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
        assert server.refused(CHAT, {**body, "tool_choice": "required"})["param"] == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [INTEGER, {"$ref": "#/$defs/n"}], "$defs": {"n": NODE}},
        {**NODE, "required": [], "$defs": {"n": NODE}},
        {"type": "array", "items": {"$ref": "#"}},
        {"properties": {"x": {"$ref": "#"}}, "required": ["x"], "maxLength": 5},
        {"type": ["object", "null"], **{k: NODE[k] for k in ("properties", "required")}}
        | {"$defs": {"n": NODE}},
    ],
)
def test_js_153_parts_that_cannot_end_are_left_out(server, schema) -> None:
    for seed in range(8):
        choice = generated(server, json_schema(schema), seed)
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])
        assert '"x"' not in choice["text"]


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" start', 'start: "a" x?\nx: "b" x | "c" x', 'root ::= "a" | "a" x\nx ::= "b" x'],
)
def test_js_153_rules_that_cannot_end_are_refused(server, grammar) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": grammar}})
    assert "no text of finite length matches the rule" in error["message"]


SLOW = "^(([a-z]{1,100}){1,100}){1,100}$"


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": SLOW},
        json_schema({"type": "string", "pattern": SLOW}),
        json_schema({**PARAMETERS, "properties": {"a": {"pattern": SLOW, "type": "string"}}}),
        json_schema(
            {**PARAMETERS, "properties": {"b": {"pattern": SLOW, "type": "string"}}, "required": []}
        ),
    ],
)
def test_js_153_a_pattern_that_fails_after_some_tokens_is_refused(server, field) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a", **field})
    assert error["message"].endswith("lexer error: too many expressions constructed")


def test_js_153_large_schemas_are_served(server) -> None:
    values = [f"value {i}" for i in range(10_000)]
    assert json.loads(generated(server, json_schema({"enum": values}), 1)["text"]) in values
    endless = {"type": "array", "items": INTEGER, "minItems": 10**9}
    assert generated(server, json_schema(endless), 1)["finish_reason"] == "length"
    text = generated(server, {"guided_regex": "(a+)+b"}, 1)["text"]
    assert set(text) <= {"a", "b"}


def test_js_153_an_error_of_the_lexer_ends_only_its_request(server, monkeypatch) -> None:
    """The check passes, as it may, and the engine meets the error."""

    async def passes(grammar: Any) -> None:
        return None

    monkeypatch.setattr(server.text_engine.grammars, "check", passes)
    long = {"prompt": "a", "max_tokens": 200, "guided_regex": SLOW, "min_tokens": 200}
    error = server.refused(COMPLETIONS, {**long, "seed": 1, "temperature": 1})
    assert "too many expressions constructed" in error["message"]
    streamed = server.post(COMPLETIONS, {**long, "seed": 1, "temperature": 1, "stream": True})
    last = streamed.text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    assert json.loads(last)["error"] == error


SCORE = {"type": "object", "properties": {"score": INTEGER}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**SCORE, "required": ["score"], "patternProperties": {"^score$": {"minimum": 3}}},
        {**SCORE, "patternProperties": {"^score$": INTEGER}},
        {
            **SCORE,
            "properties": {"a": INTEGER, "b": {"type": "boolean"}},
            "patternProperties": {"^(a|b)$": {}},
        },
        {
            **SCORE,
            "properties": {"inner": {**SCORE, "patternProperties": {"^score$": INTEGER}}},
            "required": ["inner"],
        },
    ],
)
def test_pub_08_patterns_of_declared_names_are_no_dead_end(server, schema) -> None:
    for seed in range(12):
        choice = generated(server, json_schema(schema), seed)
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["text"])
        assert "score" not in value or "minimum" not in str(schema) or value["score"] >= 3


def test_pub_08_patterns_of_more_names_still_allow_them(server) -> None:
    names = set()
    more = {**SCORE, "patternProperties": {"^(score|other)$": INTEGER}}
    for seed in range(30):
        choice = generated(server, json_schema(more), seed, temperature=5)
        if choice["finish_reason"] == "stop":
            names |= set(json.loads(choice["text"]))
    assert names == {"score", "other"}


@pytest.mark.parametrize("form", ["password", "binary", "byte", "int64", "regex", "uri-reference"])
def test_pub_23_unknown_formats_are_annotations(server, form) -> None:
    schema = {"type": "string", "format": form, "maxLength": 9}
    assert isinstance(json.loads(generated(server, json_schema(schema), 1)["text"]), str)
    nested = {**SCORE, "properties": {"format": schema}, "required": ["format"]}
    assert json.loads(generated(server, json_schema(nested), 1)["text"])["format"] is not None


def test_pub_23_a_refusal_names_no_option_that_nobody_can_set(server) -> None:
    schema = {"oneOf": [INTEGER, {"type": "number"}]}
    error = server.refused(COMPLETIONS, {"prompt": "a", **json_schema(schema)})
    assert "coerce" not in error["message"]
    assert "oneOf" in error["message"]
    for keyword in ("not", "if", "contains", "propertyNames", "dependentSchemas"):
        error = server.refused(COMPLETIONS, {"prompt": "a", **json_schema({keyword: {}})})
        assert keyword in error["message"]


TINY = {"type": "boolean"}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "schema": TINY}},
        {"response_format": {"type": "json_object", "schema": TINY}},
        {"json_schema": TINY},
        {"json_schema": json.dumps(TINY)},
        {"grammar": 'root ::= "true" | "false"'},
        {"ebnf": 'root ::= "true" | "false"'},
        {"regex": "true|false"},
    ],
)
def test_pub_24_schemas_of_other_servers_are_enforced(server, field) -> None:
    assert generated(server, field, 1)["text"].strip() in ("true", "false")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30, **field}
    (choice,) = server.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"].strip() in ("true", "false")


def test_pub_24_other_values_are_refused_by_name(server) -> None:
    for field in ("json_schema", "grammar", "ebnf", "regex"):
        assert server.refused(COMPLETIONS, {"prompt": "a", field: 5})["param"] == field
    two = {"prompt": "a", "grammar": 'root ::= "a"', "regex": "a"}
    assert "at most one of" in server.refused(COMPLETIONS, two)["message"]
    body = {"prompt": "a", "response_format": {"type": "json_object", "schema": "x"}}
    assert server.refused(COMPLETIONS, body)["param"] == "response_format"
    assert server.complete("a", grammar="", json_schema=None, max_tokens=1)["choices"]


# Forced calls with a template that cannot show tools.


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_need_no_template_for_tools(server, set_templates, choice, parallel) -> None:
    set_templates(CONTENT_TEMPLATE, parser=None)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 30,
        "temperature": 1,
    }
    for seed in range(5):
        reply = server.post(CHAT, {**body, "seed": seed})
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()["choices"]
        assert not answer["message"]["content"]
        for one in answer["message"].get("tool_calls", []):
            assert one["function"]["name"] == "f"
            if answer["finish_reason"] == "tool_calls":
                assert json.loads(one["function"]["arguments"]) in ({"a": 1}, {"a": 2})
        assert answer["finish_reason"] in ("tool_calls", "length")
    error = server.refused(CHAT, {**body, "tool_choice": "auto"})
    assert "tool_choice 'required' or 'none'" in error["message"]


def test_the_tools_are_shown_if_the_template_cannot_show_them(server, set_templates) -> None:
    roles = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    set_templates(roles, parser=None)
    small = {"type": "function", "function": {"name": "f"}}
    user = {"role": "user", "content": "hi"}
    named = "Call this function. Answer with the JSON object of its arguments."
    shape = '{"name": "f"}'
    for system in ([], [{"role": "system", "content": "be brief"}]):
        text = shown_chat(server, [*system, user], tools=[small], tool_choice=NAMED)
        if system:
            assert text == f"[system:be brief\n\n{named}\n{shape}][user:hi]"
        else:
            assert text == f"[user:{named}\n{shape}\n\nhi]"
    assert shown_chat(server, [user], tools=[small], tool_choice="none") == "[user:hi]"
    set_templates("{{ tools | length }}" + roles, parser=None)
    assert shown_chat(server, [user], tools=[small], tool_choice=NAMED) == "1[user:hi]"


# Rotary embeddings.


def test_js_223_dynamic_scaling_rotates_each_token_by_its_own_length(serve, tmp_path, rng) -> None:
    """Up to the original length that is no scaling; beyond it, as if tokens came one by one."""
    length, factor, theta = 32, 2.0, 10000.0
    scaling = {"rope_type": "dynamic", "factor": factor}
    config = tiny_config(max_position_embeddings=length, rope_scaling=scaling)
    folder = write_checkpoint(tmp_path / "ntk", config, tokenizer=full_backend())
    tensors = dict(open_checkpoint(str(folder)).tensors())
    positions = np.maximum(np.arange(1.0, 51.0), length)
    bases = theta * (factor * positions / length - (factor - 1)) ** (16 / 14)
    by_position = bases[:, None, None] ** -(np.arange(0, 16, 2) / 16)
    prompt = [int(i) for i in rng.integers(0, 512, 50)]
    expected = Reference(tensors, frequencies=by_position).logprobs(prompt)
    unscaled = Reference(tensors).logprobs(prompt)
    assert np.abs(expected - unscaled)[:length].max() < 1e-9 < np.abs(expected - unscaled).max()
    for chunk in (32, 7):
        server = serve(folder, max_num_batched_tokens=chunk)
        assert server.text_engine.model.max_model_len == 64
        why = {d.what: d.why for d in server.text_engine.engine.ready.decisions}["rope"]
        assert "beyond 32 tokens" in why
        reply = server.complete(prompt, max_tokens=0, echo=True, logprobs=0)
        found = reply["choices"][0]["logprobs"]["token_logprobs"][1:]
        assert_close(
            found, [expected[i, token] for i, token in enumerate(prompt[1:])], num_tokens=50
        )

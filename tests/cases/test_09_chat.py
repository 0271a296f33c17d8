"""Chats: messages, chat templates, and special tokens in prompts and completions."""

import dataclasses
import socket

import pytest
from tokenizers import processors

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import SPECIAL_TOKENS, full_backend
from jaxserve.text.template_files import ChatTemplates

BOS = SPECIAL_TOKENS["bos_token"]
ROLES = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
STRINGS_ONLY = "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endfor %}"
EITHER = (
    "{% for m in messages %}[{{ m['role'] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}]{% endfor %}"
)
TRIMMING = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] | trim }}]{% endfor %}"
CALLS = (
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}>{% endfor %}]{% endfor %}"
)


@pytest.fixture
def server(serve, random_checkpoint):
    return serve(random_checkpoint)


@pytest.fixture
def set_template(server, monkeypatch):
    """``set_template(source)`` replaces the chat template of the server."""

    def set_template(source: str) -> None:
        templates = ChatTemplates(source)
        model = dataclasses.replace(server.text_engine.model, chat_templates=templates)
        monkeypatch.setattr(server.text_engine, "model", model)

    return set_template


def rendered_prompt(server, messages, **more):
    """Returns the prompt of a chat, and asserts that /tokenize makes the same one."""
    reply = server.chat(messages, max_tokens=1, return_token_ids=True, **more)
    ids = reply["prompt_token_ids"]
    assert reply["usage"]["prompt_tokens"] == len(ids)
    tokenized = server.post("/tokenize", {"messages": messages, **more}).json()
    assert tokenized["tokens"] == ids
    return server.tokenizer.decode(ids, skip_special_tokens=False)


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("source", [ROLES, STRINGS_ONLY, EITHER])
def test_js_127_a_single_text_part_equals_a_string(server, set_template, source) -> None:
    set_template(source)
    for text in ("hi", "", "a\nb", " spaced "):
        as_text = rendered_prompt(server, [{"role": "user", "content": text}])
        as_list = rendered_prompt(server, [{"role": "user", "content": text_parts(text)}])
        assert as_text == as_list == f"[user:{text}]"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("source", [ROLES, STRINGS_ONLY, EITHER])
def test_js_128_text_parts_are_joined_by_newlines(server, set_template, source, role) -> None:
    set_template(source)
    for texts in (("a", "", "b"), ("a", "b"), ("", ""), ()):
        prompt = rendered_prompt(server, [{"role": role, "content": text_parts(*texts)}])
        assert prompt == f"[{role}:{chr(10).join(texts)}]"


PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}:"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}]{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        PARTS_ONLY,
        PARTS_ONLY.replace("m.content", "m['content']").replace("part.text", "part['text'] | trim"),
        PARTS_ONLY.replace(
            "{% for part in m.content %}",
            "{% set content = m.content %}"
            "{% for part in content if part.type == 'text' %}{% generation %}",
        ).replace(">{% endfor %}", ">{% endgeneration %}{% endfor %}"),
    ],
)
def test_js_128_a_template_that_reads_parts_gets_one_part(server, set_template, source) -> None:
    set_template(source)
    for role in ("user", "assistant"):
        for content in ("a\nb", text_parts("a", "b")):
            prompt = rendered_prompt(server, [{"role": role, "content": content}])
            assert prompt == f"[{role}:<a\nb>]"
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so"}]
    prompt = rendered_prompt(server, messages, continue_final_message=True)
    assert prompt == "[user:<u>][assistant:<so"


def test_js_129_parts_that_are_not_text_are_refused(server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        for part, word in (
            ({"type": "image_url", "image_url": {"url": url}}, "image_url"),
            (
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                "image_url",
            ),
            (
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
                "input_audio",
            ),
            ({"type": "video_url", "video_url": {"url": url}}, "video_url"),
            ({"type": "file", "file": {"file_data": url}}, "file"),
            ({"type": "foo"}, "foo"),
            ({"type": 5, "text": "a"}, "type"),
            ({"text": "a"}, "type"),
            ({"type": "text"}, "text"),
            ({"type": "text", "text": 5}, "text"),
            ("a", "type"),
            (None, "type"),
        ):
            for parts in ([part, *text_parts("hi")], [*text_parts("hi"), part]):
                messages = [{"role": "user", "content": parts}]
                error = server.refused(CHAT, {"messages": messages})
                assert error["param"].startswith(f"messages[0].content[{parts.index(part)}]")
                assert word in error["message"]
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("stream", [False, True])
def test_js_130_an_error_raised_by_a_template_is_returned(server, set_template, stream) -> None:
    set_template(
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (loop.index0 % 2 == 0) != (m.role == 'user') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    user = {"role": "user", "content": "u"}
    for messages, words in (
        ([{"role": "system", "content": "s"}, user], "System role not supported"),
        ([{"role": "developer", "content": "s"}, user], "System role not supported"),
        ([user, user], "roles must alternate"),
    ):
        error = server.refused(CHAT, {"messages": messages, "stream": stream})
        assert error["message"] == words
        assert error["param"] == "messages"
    assert rendered_prompt(server, [user]) == "u"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].no.such.thing }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ ''.__class__ }}x{{ 1 + 'a' }}",
    ],
)
def test_js_130_a_broken_template_is_a_client_error(server, set_template, source) -> None:
    set_template(source)
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": "u"}]})
    assert "template" in error["message"]
    assert "Traceback" not in error["message"]


def test_js_131_the_developer_role_becomes_system_unless_the_template_knows_it(
    server, set_template
) -> None:
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    set_template(ROLES)
    assert rendered_prompt(server, messages) == "[system:d][user:u]"
    set_template(ROLES + "{% if messages[0].role == 'developer' %}!{% endif %}")
    assert rendered_prompt(server, messages) == "[developer:d][user:u]!"


def test_js_132_a_chat_without_a_template_is_refused(serve, scripted_checkpoint, tmp_path) -> None:
    path = scripted_checkpoint(
        ab=["A", "B", EOS], options={"tokenizer_config": {"chat_template": None}}
    )
    server = serve(path)
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "<ab>"}], "stream": stream}
        error = server.refused(CHAT, body)
        assert "--chat-template" in error["message"]
    assert server.complete("<ab>", max_tokens=5)["choices"][0]["text"] == "AB"
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1].content }}")
    server_with_template = serve(path, chat_template=file)
    assert server_with_template.chat("<ab>")["choices"][0]["message"]["content"] == "AB"


@pytest.fixture(scope="module")
def adds_bos_and_eos(tmp_path_factory):
    """A checkpoint whose tokenizer adds BOS and EOS; its config has special tokens as objects."""
    backend = full_backend(tiny_config()["vocab_size"])
    ids = [(token, backend.token_to_id(token)) for token in (BOS, EOS)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=ids
    )
    as_object = {"__type": "AddedToken", "lstrip": False, "normalized": False, "special": True}
    names = {name: {**as_object, "content": text} for name, text in SPECIAL_TOKENS.items()}
    return write_checkpoint(
        tmp_path_factory.mktemp("both") / "both",
        tokenizer=backend,
        tokenizer_config={**names, "chat_template": "{{ bos_token }}" + ROLES + "{{ pad_token }}"},
    )


def test_js_134_special_tokens_may_be_objects(serve, adds_bos_and_eos) -> None:
    server = serve(adds_bos_and_eos)
    assert rendered_prompt(server, [{"role": "user", "content": "u"}]) == f"{BOS}[user:u]"
    assert server.tokenizer.special_tokens == SPECIAL_TOKENS


def test_js_134_a_special_token_may_be_null(tmp_path, serve) -> None:
    path = write_checkpoint(
        tmp_path / "null",
        tokenizer=full_backend(tiny_config()["vocab_size"]),
        tokenizer_config={"chat_template": "{{ bos_token }}" + ROLES},
    )
    names = path / "tokenizer_config.json"
    text = names.read_text()
    assert f'"{BOS}"' in text
    names.write_text(text.replace(f'"{BOS}"', "null"))
    assert rendered_prompt(serve(path), [{"role": "user", "content": "u"}]) == "[user:u]"


def test_js_135_the_bos_token_of_a_template_is_not_repeated(serve, adds_bos_and_eos) -> None:
    server = serve(adds_bos_and_eos)
    bos = server.tokenizer.bos_token_id
    reply = server.chat("hello", max_tokens=1, return_token_ids=True)
    ids = reply["prompt_token_ids"]
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert server.tokenizer.eos_token_id not in ids
    reply = server.chat("hello", max_tokens=1, return_token_ids=True, add_special_tokens=True)
    assert reply["prompt_token_ids"] == [bos, *ids]


def test_js_136_add_special_tokens_controls_the_tokens_around_a_prompt(
    serve, adds_bos_and_eos
) -> None:
    server = serve(adds_bos_and_eos)
    bos, eos = server.tokenizer.bos_token_id, server.tokenizer.eos_token_id

    def ids_of(prompt, **more):
        reply = server.complete(prompt, max_tokens=1, return_token_ids=True, **more)
        ids = reply["choices"][0]["prompt_token_ids"]
        assert server.post("/tokenize", {"prompt": prompt, **more}).json()["tokens"] == ids
        return ids

    bare = ids_of("hi", add_special_tokens=False)
    assert not {bos, eos} & set(bare)
    assert ids_of("hi") == ids_of("hi", add_special_tokens=True) == [bos, *bare]
    assert ids_of(f"{BOS}hi", add_special_tokens=False) == [bos, *bare]
    assert ids_of(f"{BOS}hi") == [bos, bos, *bare]
    assert ids_of(f"{BOS}hi{EOS}", add_special_tokens=False) == [bos, *bare, eos]


@pytest.mark.parametrize("source", [ROLES, STRINGS_ONLY, EITHER, TRIMMING])
@pytest.mark.parametrize("start", ["OK! ", "OK!\n", "", " x", "OK", "user", " \n\t "])
def test_js_138_continue_final_message_keeps_the_message_unchanged(
    server, set_template, source, start
) -> None:
    """The white space at its end is kept, even if the template trims it."""
    set_template(source)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [
        {"role": "user", "content": f"say {start.strip()} OK"},
        {"role": "assistant", "content": start},
    ]
    kept = start.lstrip() if source == TRIMMING else start
    expected = f"[user:say {start.strip()} OK][assistant:{kept}"
    prompt = rendered_prompt(server, messages, **options)
    assert prompt == expected
    messages[-1]["content"] = text_parts(start)
    assert rendered_prompt(server, messages, **options) == prompt
    assert rendered_prompt(server, messages, continue_final_message=True) == prompt


def test_js_139_continue_final_message_needs_a_final_assistant_message(server) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    error = server.refused(CHAT, {"messages": [user, assistant], **both})
    assert error["param"] == "continue_final_message"
    for messages in ([user], [assistant, user], [user, {**assistant, "role": "system"}]):
        body = {"messages": messages, "continue_final_message": True}
        body["add_generation_prompt"] = False
        assert server.refused(CHAT, body)["param"] == "continue_final_message"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_js_140_tool_calls_need_no_content(server, set_template, content) -> None:
    set_template(CALLS)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": [null]}'},
    }
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    expected = '[user:u][assistant:<add {"a": 1, "b": [null]}>][tool:3]'
    assert rendered_prompt(server, messages) == expected
    messages[1]["tool_calls"] = None
    assert rendered_prompt(server, messages) == "[user:u][assistant:][tool:3]"


MARKED = ["x", "<special>", "<think>", "y", EOS]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_js_142_skip_special_tokens_applies_to_the_completion(
    serve, scripted_checkpoint, path
) -> None:
    server = serve(scripted_checkpoint(marked=MARKED, options={"special": ("<special>",)}))
    body = {"max_tokens": 9}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "<marked>"}]
    else:
        body["prompt"] = "<marked>"
    for skip, text in (
        (None, "x<think>y"),
        (True, "x<think>y"),
        (False, "x<special><think>y"),
    ):
        request = {**body, "skip_special_tokens": skip}
        streamed = server.stream(path, request)
        (choice,) = server.post(path, request).json()["choices"]
        assert streamed.finish_reason() == choice["finish_reason"] == "stop"
        whole = choice["message"]["content"] if path == CHAT else choice["text"]
        assert whole == streamed.text() == text


SPACED = ["a", " ,", " 's", "<think>", "</think>", " .", EOS]


@pytest.mark.parametrize("clean_up", [True, False, None])
def test_js_143_tokenization_spaces_are_not_cleaned_up(
    serve, scripted_checkpoint, clean_up
) -> None:
    config = {"clean_up_tokenization_spaces": clean_up}
    server = serve(scripted_checkpoint(spaced=SPACED, options={"tokenizer_config": config}))
    reply = server.complete("<spaced>", max_tokens=9, return_token_ids=True)
    (choice,) = reply["choices"]
    assert choice["text"] == "a , 's<think></think> ."
    assert choice["text"] == server.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert server.stream_complete("<spaced>", max_tokens=9).text() == choice["text"]

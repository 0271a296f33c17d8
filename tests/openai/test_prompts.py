"""Prompts, and messages that the chat template renders."""

import dataclasses
import threading
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.front.text_engine import INLINE_CHARS, TextEngine
from jaxserve.openai import prompts
from jaxserve.testing.openai_calls import MESSAGES, ask, complete
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.text.chat_template import render_chat
from jaxserve.text.template_files import ChatTemplates


async def test_accepts_every_form_of_prompt() -> None:
    text_engine = scripted_text_engine("hello")
    hello = text_engine.model.tokenizer.encode("hello")
    cases = [
        ("hello", [hello]),
        (["hello", "he"], [hello, text_engine.model.tokenizer.encode("he")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]
    for prompt, expected in cases:
        text_engine.engine.submitted.clear()
        reply = await complete(text_engine, {"prompt": prompt})
        assert sorted(s.prompt_token_ids for s in text_engine.engine.submitted) == sorted(expected)
        assert reply.usage.prompt_tokens == sum(map(len, expected))


async def rendered(text_engine: TextEngine, body: dict[str, Any]) -> str:
    await ask(text_engine, body)
    ids = text_engine.engine.submitted[-1].prompt_token_ids
    return text_engine.model.tokenizer.decode(ids, skip_special_tokens=False)


async def test_messages_are_rendered_with_the_template() -> None:
    text_engine = scripted_text_engine("hello")
    plain = await rendered(text_engine, {})
    assert plain == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    text_part = {"type": "text", "text": "hello"}
    parts = [{"role": "user", "content": [text_part], "name": "me", "unknown": 1}]
    assert await rendered(text_engine, {"messages": parts}) == plain
    bare = await rendered(text_engine, {"add_generation_prompt": False})
    assert bare == "<|im_start|>user\nhello<|im_end|>\n"
    several = [{"role": "user", "content": [text_part, {"type": "text", "text": ""}, text_part]}]
    assert "user\nhello\n\nhello<" in await rendered(text_engine, {"messages": several})
    empty = [{"role": "system", "content": []}, {"role": "assistant", "content": None}, *MESSAGES]
    assert "system\n<|im_end|>\n<|im_start|>assistant\n<" in await rendered(
        text_engine, {"messages": empty}
    )


async def test_the_developer_role_becomes_system_unless_the_template_has_it() -> None:
    messages = [{"role": "developer", "content": "d"}, *MESSAGES]
    text_engine = scripted_text_engine("hello")
    assert "<|im_start|>system\nd" in await rendered(text_engine, {"messages": messages})
    with_developer = "{# developer #}{% for m in messages %}{{ m.role }}:{% endfor %}"
    text_engine = scripted_text_engine("hello", chat_template=with_developer)
    assert await rendered(text_engine, {"messages": messages}) == "developer:user:"


@pytest.mark.parametrize("text", ["OK! ", "OK!\n", "", " x", "hello hello", "<|im_end|>"])
@pytest.mark.parametrize("trims", [False, True])
async def test_the_final_message_can_be_continued(text, trims) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content|trim }}</s>{% endfor %}"
        if trims
        else "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    )
    text_engine = scripted_text_engine("hello", chat_template=template)
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    prompt = await rendered(text_engine, {"messages": messages, "continue_final_message": True})
    shown = text.lstrip() if trims else text
    assert prompt == "[user]hello</s>[assistant]" + shown


async def test_earlier_tool_calls_reach_the_template_as_objects() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.x + 1 }}{% endfor %}({{ m.content }}){% endfor %}"
    )
    text_engine = scripted_text_engine("hello", chat_template=template)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    assert await rendered(text_engine, {"messages": messages}) == "42()(42)"


HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "in_thread"),
    [
        (HELLO, False),
        ({**HELLO, "content": "hello" * (INLINE_CHARS // 5 + 1)}, True),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, True),
    ],
)
async def test_a_thread_renders_what_can_be_long(monkeypatch, message, in_thread) -> None:
    threads = set()

    def render(*args: Any, **kwargs: Any) -> str:
        threads.add(threading.current_thread())
        return render_chat(*args, **kwargs)

    monkeypatch.setattr(prompts, "render_chat", render)
    await rendered(scripted_text_engine("llo"), {"messages": [message, HELLO], "max_tokens": 1})
    (thread,) = threads
    assert (thread is not threading.main_thread()) == in_thread


async def test_the_request_sets_template_variables() -> None:
    template = "{{ mode }}{{ reasoning_effort }}{{ messages|length }}"
    text_engine = scripted_text_engine("hello", chat_template=template)
    body = {"chat_template_kwargs": {"mode": "m"}, "reasoning_effort": "high"}
    assert await rendered(text_engine, body) == "mhigh1"


async def test_the_request_overrides_template_variables_of_the_server() -> None:
    variables = {"mode": "server", "other": 1}
    template = "{{ mode }}{{ other }}"
    text_engine = scripted_text_engine(
        "hello", chat_template=template, template_variables=variables
    )
    assert await rendered(text_engine, {}) == "server1"
    assert await rendered(text_engine, {"chat_template_kwargs": {"mode": "own"}}) == "own1"


async def test_a_template_that_fails_or_is_missing_is_an_error() -> None:
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        await ask(scripted_text_engine("hello", chat_template=template), {})
    with pytest.raises(InvalidRequestError, match="is empty") as caught:
        await ask(scripted_text_engine("hello", chat_template="{# nothing #}"), {})
    assert caught.value.param == "messages"
    text_engine = scripted_text_engine("hello")
    text_engine.model = dataclasses.replace(text_engine.model, chat_templates=ChatTemplates())
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        await ask(text_engine, {})
    assert (await complete(text_engine, {})).choices[0].text == "hello"

"""Request bodies become prompts and parameters, or an error that names the wrong field."""

import dataclasses
import json
import threading
from typing import Any

import msgspec
import pytest

from jaxserve.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.front.text_engine import INLINE_CHARS, TextEngine
from jaxserve.openai import chat, completions, prompts
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.text.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hello"}]


async def complete(text_engine: TextEngine, body: dict[str, Any] | bytes):
    data = body if isinstance(body, bytes) else json.dumps({"prompt": "hello"} | body).encode()
    return await completions.complete(
        await completions.prepare(text_engine, decode(data, CompletionRequest))
    )


async def ask(text_engine: TextEngine, body: dict[str, Any] | bytes):
    data = body if isinstance(body, bytes) else json.dumps({"messages": MESSAGES} | body).encode()
    return await chat.complete(await chat.prepare(text_engine, decode(data, ChatRequest)))


BAD_SAMPLING = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.7"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": False}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 10}, "presence_penalty"),
    ({"frequency_penalty": -10}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": True}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 2000}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"model": 5}, "model"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"AI": -100}}, "logit_bias"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": "a"}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a", " "]}, "bad_words"),
    ({"bad_words": [1]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 2000}, "bad_words"),
    ({"bad_words": ["x" * 100]}, "bad_words"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "a" * 2000}, "cache_salt"),
    ({"request_id": 5}, "request_id"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"detokenize": 0}, "detokenize"),
    ({"detokenize": False, "stop": "a"}, "stop"),
]


@pytest.mark.parametrize(("body", "param"), BAD_SAMPLING)
async def test_both_endpoints_reject_bad_sampling_fields_by_name(body, param) -> None:
    text_engine = scripted_text_engine("hello")
    for run in (complete, ask):
        with pytest.raises(InvalidRequestError) as caught:
            await run(text_engine, body)
        assert caught.value.param == param
        assert caught.value.message
        assert len(caught.value.message) < 500
    assert text_engine.engine.submitted == []
    assert (await complete(text_engine, {})).choices[0].text == "hello"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[], [1, 2]]}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "1"}, "logprobs"),
    ],
)
async def test_rejects_bad_completion_fields(body, param) -> None:
    text_engine = scripted_text_engine("hello")
    with pytest.raises(InvalidRequestError) as caught:
        await complete(text_engine, body)
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": 5, "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [5]}, *MESSAGES]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"special_tokens": {}}}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {"tools": [{"function": {"name": "f"}}, {"function": {"name": "a b"}}]},
            "tools[1].function.name",
        ),
        ({"tools": [{"function": {"name": "f"}}] * 2}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f"}}] * 1000}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        (
            {"tools": [{"function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"function": {"name": "f"}}]}, "tools"),  # the template shows no tools
        ({"tools": "f"}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "foo"}, "tool_choice"),
        (
            {
                "tools": [{"function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"echo": 1}, "echo"),
    ],
)
async def test_rejects_bad_chat_fields(body, param) -> None:
    text_engine = scripted_text_engine("hello")
    with pytest.raises(InvalidRequestError) as caught:
        await ask(text_engine, body)
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt":"a"} x',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\xf0\x9f',
        b'{"prompt":"\\ud83d"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","top_p":Infinity}',
        b'{"prompt":"a","min_p":-Infinity}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
async def test_rejects_bodies_that_are_not_json_objects(body) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, CompletionRequest)
    assert len(caught.value.message) < 500


def test_many_errors_make_one_short_message() -> None:
    body = json.dumps({"messages": [5] * 50_000, "stop": "x" * 10_000}).encode()
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, ChatRequest)
    assert caught.value.message == "messages[0]: Expected object, got int"


NULLS = dict.fromkeys(
    [
        *msgspec.structs.asdict(CompletionRequest()),
        *msgspec.structs.asdict(ChatRequest()),
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls"),
    ]
)


async def test_null_means_absent() -> None:
    text_engine = scripted_text_engine("hello")
    body = {key: value for key, value in NULLS.items() if key not in ("prompt", "messages")}
    await complete(text_engine, {})
    await complete(text_engine, body)
    await ask(text_engine, {})
    await ask(text_engine, body)
    sent = [s.params for s in text_engine.engine.submitted]
    unseeded = [msgspec.structs.replace(params, seed=0) for params in sent]
    assert unseeded[0] == unseeded[1]
    assert unseeded[2] == unseeded[3]


async def test_accepts_values_without_effect_and_unknown_fields() -> None:
    text_engine = scripted_text_engine("hello")
    body = {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "logit_bias": {},
        "suffix": "",
        "best_of": 1,
        "bad_words": [],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "return_token_ids": False,
        "stop": [],
        "reasoning_effort": "low",
        "no_such_field": {"deep": [1, {"er": None}]},
    }
    assert (await complete(text_engine, body)).choices[0].text == "hello"
    assert (await ask(text_engine, body)).choices[0].message.content == "hello"


async def test_fields_reach_the_engine() -> None:
    text_engine = scripted_text_engine("hello")
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 2**32 + 7,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop_token_ids": [4],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "priority": -3,
        "logit_bias": {"7": 3, "8": -500},
        "cache_salt": "salt",
    }
    converted = ("priority", "stop_token_ids", "logit_bias", "cache_salt")
    expected = SamplingParams(
        **{k: v for k, v in body.items() if k not in converted},
        logit_bias={7: 3.0, 8: -500.0},
        stop_token_ids=(4,),
    )
    await complete(text_engine, body | {"logprobs": 2})
    await ask(text_engine, body | {"logprobs": True, "top_logprobs": 2})
    for submit in text_engine.engine.submitted:
        assert submit.params == msgspec.structs.replace(expected, logprobs=2)
        assert submit.priority == -3
        assert submit.cache_salt == "salt"


async def test_the_length_of_a_completion_has_limits_and_defaults() -> None:
    text_engine = scripted_text_engine("hello")
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (complete, {"prompt": [1] * 6}, 16),
        (complete, {"prompt": [1] * 250}, 6),
        (complete, {"max_tokens": 9}, 9),
        (complete, {"max_tokens": 4, "max_completion_tokens": 4}, 4),
        (ask, {"max_completion_tokens": 3}, 3),
        (ask, {"max_tokens": 9, "max_completion_tokens": 3}, 3),
        (ask, {"max_tokens": 9}, 9),
    ]
    for run, body, expected in cases:
        await run(text_engine, body)
        assert text_engine.engine.submitted[-1].params.max_tokens == expected
    await ask(text_engine, {})
    submit = text_engine.engine.submitted[-1]
    assert submit.params.max_tokens == 256 - len(submit.prompt_token_ids)


async def test_the_request_overrides_defaults_of_the_model() -> None:
    defaults = GenerationDefaults({"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.2}, 30)
    text_engine = scripted_text_engine("hello", defaults=defaults)
    await ask(text_engine, {})
    params = text_engine.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.1, 1, 1.2)
    assert params.max_tokens == 30
    await ask(text_engine, {"temperature": 1.5, "top_k": -1, "max_tokens": 50})
    params = text_engine.engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (1.5, 0, 50)


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
    text_engine.model = dataclasses.replace(text_engine.model, chat_template=None)
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        await ask(text_engine, {})
    assert (await complete(text_engine, {})).choices[0].text == "hello"


async def test_rejects_unknown_models_and_long_prompts() -> None:
    text_engine = scripted_text_engine("hello")
    for run in (complete, ask):
        with pytest.raises(UnknownModelError):
            await run(text_engine, {"model": "nope"})
        assert (await run(text_engine, {"model": ""})).model == "tiny"
        assert (await run(text_engine, {"model": "tiny"})).model == "tiny"
    with pytest.raises(ContextLengthError):
        await complete(text_engine, {"prompt": [1] * 300})
    long = [{"role": "user", "content": "hello " * 300}]
    with pytest.raises(ContextLengthError) as caught:
        await ask(text_engine, {"messages": long})
    assert caught.value.param == "messages"

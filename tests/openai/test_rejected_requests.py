"""Bad request bodies are rejected with an error that names the wrong field."""

import json

import pytest

from jaxserve.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.testing.openai_calls import MESSAGES, ask, complete
from jaxserve.testing.scripted_text_engine import scripted_text_engine

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
    *(({"logit_bias": {key: 5}}, "logit_bias") for key in ("5.0", "5e0", " 5", "+5", "05", "")),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {str(i << 40): 5 for i in range(1000)}}, "logit_bias"),  # collide in a dict
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


async def assert_rejected(call, body, param):
    """Asserts that ``call``, `complete` or `ask`, names the field and submits nothing."""
    text_engine = scripted_text_engine("hello")
    with pytest.raises(InvalidRequestError) as caught:
        await call(text_engine, body)
    assert caught.value.param == param
    assert text_engine.engine.submitted == []


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
    await assert_rejected(complete, body, param)


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
    await assert_rejected(ask, body, param)


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

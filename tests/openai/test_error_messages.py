"""Error messages name the field, what it must be and what it was."""

import json
import re
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.openai import chat, completions, embeddings, responses
from jaxserve.openai.decoding import decode
from jaxserve.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.openai.responses_protocol import ResponsesRequest
from jaxserve.testing.scripted_text_engine import scripted_text_engine

COMPLETION = ({"prompt": "hello"}, CompletionRequest, completions.prepare)
CHAT = ({"messages": [{"role": "user", "content": "hello"}]}, ChatRequest, chat.prepare)
RESPONSE = ({"input": "hello"}, ResponsesRequest, responses.prepare)
EMBEDDING = ({"input": "hello"}, embeddings.EmbeddingRequest, embeddings.prepare)

HUGE = 10**4299
LONG = "wide load " * 100_000
TOOL = {"type": "function", "name": "f", "parameters": {}}

HELLO = {"role": "user", "content": "hello"}
CASES: list[tuple[Any, dict[str, Any], str, str]] = [
    (COMPLETION, {"seed": 2**64}, "seed", r"between -9223372036854775808 and 9223372036854775807"),
    (COMPLETION, {"temperature": -1}, "temperature", "at least 0, got -1"),
    (COMPLETION, {"top_p": 2}, "top_p", "greater than 0 and at most 1, got 2"),
    (COMPLETION, {"max_tokens": 0.5}, "max_tokens", "Expected int, got float"),
    (COMPLETION, {"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
    (COMPLETION, {"max_tokens": HUGE}, "max_tokens", "at most 9223372036854775807, got 1000"),
    (COMPLETION, {"min_tokens": 9, "max_tokens": 5}, "min_tokens", r"at most max_tokens \(5\)"),
    (
        CHAT,
        {"min_tokens": 9, "max_completion_tokens": 5},
        "min_tokens",
        r"at most max_completion_tokens \(5\), got 9",
    ),
    (COMPLETION, {"prompt": [1.5]}, "prompt", r"prompt\[0\]: Expected int, got float"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt", r"prompt\[1\]: Expected int, got str"),
    (COMPLETION, {"prompt": [[1], "a"]}, "prompt", r"prompt\[1\]: Expected array, got str"),
    (COMPLETION, {"prompt": [None]}, "prompt", "a list of either, got a list of null"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt", "a list of either, got object"),
    (COMPLETION, {"prompt": [[1], []]}, "prompt", r"prompt\[1\]: the prompt is empty"),
    (COMPLETION, {"prompt": ["a", LONG]}, "prompt", "has 1000000 characters"),
    (COMPLETION, {"prompt": [[1], [1] * 999]}, "prompt", r"prompt\[1\]: .* has 999 tokens"),
    (COMPLETION, {"prompt": [[1], [999]]}, "prompt", r"prompt\[1\]: token IDs \[999\] are out"),
    (
        COMPLETION,
        {"prompt": [[1]] * 2, "max_tokens": 999},
        "max_tokens",
        r"prompt\[0\]: .* 999 for",
    ),
    (EMBEDDING, {"input": [[1.5]]}, "input", r"input\[0\]\[0\]: Expected int, got float"),
    (EMBEDDING, {"encoding_format": "hex"}, "encoding_format", "'hex'; .*'base64', 'float'"),
    (COMPLETION, {"bad_words": [LONG]}, "bad_words", "at most 1000 characters each, got 1000000"),
    (COMPLETION, {"bad_words": ["a "] * 2000}, "bad_words", "at most 1024 words, got 2000"),
    (COMPLETION, {"bad_words": ["ab " * 300]}, "bad_words", "words of 1 to 64 tokens, got "),
    (COMPLETION, {"logit_bias": {"a": 1}}, "logit_bias", "its keys: Expected int, got str"),
    (COMPLETION, {"logit_bias": {"1": "a"}}, "logit_bias", "its values: Expected float, got str"),
    (COMPLETION, {"response_format": "json"}, "response_format", "an object .*, got 'json'"),
    (COMPLETION, {"response_format": {"type": 1}}, "response_format", "'json_object' .*, got 1"),
    (COMPLETION, {"guided_regex": 5}, "guided_regex", "a regular expression, as a string, got 5"),
    (COMPLETION, {"guided_json": 5}, "guided_json", "a JSON schema, as an object .*, got 5"),
    (
        COMPLETION,
        {"guided_choice": []},
        "guided_choice",
        r"a list of at least one string, got \[\]",
    ),
    (COMPLETION, {"structured_outputs": 5}, "structured_outputs", "an object with one .* got int"),
    (COMPLETION, {"structured_outputs": {"a": 1}}, "structured_outputs", "one of json,.*, got a"),
    (
        COMPLETION,
        {"structured_outputs": {"regex": 5}},
        "structured_outputs",
        r"structured_outputs.regex must be a regular expression, as a string, got 5",
    ),
    (CHAT, {"functions": [{}]}, "functions", "functions is not supported; use tools"),
    (CHAT, {"reasoning_effort": "lots"}, "reasoning_effort", "'lots'; expected one of .*'medium'"),
    (CHAT, {"messages": [{"role": 5}]}, "messages[0].role", "such as 'user', got 5"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got int"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        "messages[0].tool_calls",
        "a list of objects, got object",
    ),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "it is missing"),
    (CHAT, {"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    (RESPONSE, {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least"),
    (RESPONSE, {"max_output_tokens": 10**6}, "max_output_tokens", "1000000 for the output"),
    (RESPONSE, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    (
        RESPONSE,
        {"min_tokens": 9, "max_output_tokens": 5},
        "min_tokens",
        r"at most max_output_tokens \(5\)",
    ),
    (RESPONSE, {"response_format": 5}, "response_format", "response_format must be an object"),
    (
        RESPONSE,
        {"text": {"format": {"type": "x"}}},
        "text.format",
        r"text\.format\.type .* got 'x'",
    ),
    (RESPONSE, {"reasoning": {"effort": "x"}}, "reasoning.effort", "expected one of .*'low'"),
    (RESPONSE, {"input": [5]}, "input[0]", "items must have type .*, got 5"),
    (RESPONSE, {"input": [{"type": {}}]}, "input[0]", "items must have type .*, got {}"),
    (RESPONSE, {"input": [{"type": ["message"]}]}, "input[0]", r"items .*, got \['message'\]"),
    (RESPONSE, {"input": [{"role": 5}]}, "input[0].role", "must be a string, got int"),
    (RESPONSE, {"input": LONG}, "input", "the prompt has 10000.. characters"),
    (RESPONSE, {"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", r"tools\[0\]\.name must be"),
    *(
        (RESPONSE, {"tools": [{**TOOL, "name": name}]}, "tools[0].name", "Expected str, got")
        for name in ({}, ["f"], 5)
    ),
    (
        RESPONSE,
        {"tools": [TOOL], "input": [HELLO, {"type": "additional_tools", "tools": [{"name": {}}]}]},
        "tools[1].name",
        "Expected str, got object",
    ),
    (RESPONSE, {"tools": [TOOL], "tool_choice": 5}, "tool_choice", "'function', 'name': .*, got 5"),
]


@pytest.mark.parametrize(("endpoint", "wrong", "param", "pattern"), CASES)
async def test_a_message_names_the_field_the_expectation_and_the_value(
    endpoint, wrong, param, pattern
) -> None:
    base, form, prepare = endpoint
    body = json.dumps({**base, **wrong}).encode()
    with pytest.raises(InvalidRequestError) as caught:
        await prepare(scripted_text_engine("hello"), decode(body, form))
    assert caught.value.param == param
    assert re.search(pattern, caught.value.message, re.DOTALL), caught.value.message[:300]


HALF_A_PAIR = "half of a surrogate pair"


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        (rb'{"prompt": "x \ud83d"}', HALF_A_PAIR),
        (rb'{"prompt": "\ude00"}', HALF_A_PAIR),
        (rb'{"prompt": "\ud83d\ud83d"}', HALF_A_PAIR),
        (rb'{"prompt": "\ud83d \ude00"}', HALF_A_PAIR),
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (rb'{"prompt": "\ud83d\ude00', "it ends too early"),
        (b'{"prompt": "abc', "it ends too early"),
        (b"{'prompt': 1}", "object keys must be strings"),
        (b"[]", "body: Expected object, got array"),
    ],
)
def test_a_malformed_body_is_described(body, pattern) -> None:
    with pytest.raises(InvalidRequestError, match=pattern):
        decode(body, CompletionRequest)

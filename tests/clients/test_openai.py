"""The helpers of the openai package that parse streams and structured output."""

from typing import Any

import openai
from pydantic import BaseModel

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Place(BaseModel):
    city: str


TOOL = openai.pydantic_function_tool(Place, name="weather")
OPTIONS: dict[str, Any] = {"api_key": "none", "max_retries": 0}


def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **OPTIONS)


def async_client(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", **OPTIONS)


def test_parse_returns_the_object_of_a_chat(serve) -> None:
    server = serve('{"city": "Rome"}')
    with client(server) as api:
        reply = api.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place)
    assert reply.choices[0].message.parsed == Place(city="Rome")
    assert server.text_engine.engine.submitted[-1].params.grammar is not None


def test_parse_returns_the_arguments_of_a_tool_call(serve) -> None:
    with client(serve(CALL)) as api:
        reply = api.chat.completions.parse(model="tiny", messages=MESSAGES, tools=[TOOL])
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Place(city="Rome")


async def test_a_stream_has_text_and_a_tool_call(serve) -> None:
    async with (
        async_client(serve("hello " + CALL)) as api,
        api.chat.completions.stream(
            model="tiny", messages=MESSAGES, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream,
    ):
        events = [event async for event in stream]
        reply = await stream.get_final_completion()
    kinds = {event.type for event in events}
    assert kinds >= {
        "content.delta",
        "tool_calls.function.arguments.delta",
        "tool_calls.function.arguments.done",
    }
    pieces = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert (reply.choices[0].message.content or "").strip() == "hello"
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Place(city="Rome")
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 5


def test_a_stream_returns_the_parsed_object(serve) -> None:
    with (
        client(serve('{"city": "Rome"}')) as api,
        api.chat.completions.stream(
            model="tiny", messages=MESSAGES, response_format=Place
        ) as stream,
    ):
        (done,) = [event for event in stream if event.type == "content.done"]
        assert done.parsed == Place(city="Rome")
        assert stream.get_final_completion().choices[0].message.parsed == Place(city="Rome")


async def test_an_asynchronous_client_streams_a_chat(serve) -> None:
    async with async_client(serve("hello é world")) as api:
        chunks = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        deltas = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert len(deltas) > 3
    assert "".join(deltas) == "hello é world"


def test_parse_returns_the_object_of_a_response(serve) -> None:
    with client(serve('{"city": "Rome"}')) as api:
        reply = api.responses.parse(model="tiny", input="hi", text_format=Place)
    assert reply.output_parsed == Place(city="Rome")


async def test_a_streamed_response_has_a_function_call(serve) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    async with (
        async_client(serve(CALL)) as api,
        api.responses.stream(model="tiny", input="hi", tools=[tool]) as stream,
    ):
        kinds = [event.type async for event in stream]
        reply = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    calls = [item for item in reply.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Rome"}')]

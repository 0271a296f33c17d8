"""langchain-openai: chats, tools and structured output, with and without streaming."""

import functools
import operator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}{# <tool_call> #}"
)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Place(BaseModel):
    """Where something is."""

    city: str


def client(server: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options
    )


def test_a_chat_returns_text_and_usage(serve) -> None:
    server = serve("hello é world")
    reply = client(server, temperature=0, max_tokens=50).invoke("hi")
    assert reply.content == "hello é world"
    assert reply.response_metadata["finish_reason"] == "stop"
    usage = reply.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 2
    assert server.last_prompt() == "hi"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_stream_calls_a_tool_and_the_chat_continues_with_its_result(
    serve, asynchronous
) -> None:
    """The result of the tool becomes part of the next prompt."""
    server = serve("hello " + CALL, "the end", chat_template=TEMPLATE)
    model = client(server, stream_usage=True).bind_tools([weather])
    messages: list[Any] = [HumanMessage("hi")]
    if asynchronous:
        chunks = [chunk async for chunk in model.astream(messages)]
    else:
        chunks = list(model.stream(messages))
    assert len(chunks) > 5
    reply = functools.reduce(operator.add, chunks)
    assert reply.text.strip() == "hello"
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert reply.usage_metadata["output_tokens"] > 5
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    message = AIMessage(content=reply.text, tool_calls=reply.tool_calls)
    assert model.invoke([*messages, message, result]).content == "the end"
    assert "tool: rain in Rome\n" in server.last_prompt()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_follows_a_grammar(serve, method) -> None:
    """With either method, a grammar restricts the completion to the JSON of the arguments."""
    server = serve('{"city": "Rome"}')
    model = client(server).with_structured_output(Place, method=method)
    assert model.invoke("hi") == Place(city="Rome")
    assert server.text_engine.engine.submitted[-1].params.grammar is not None


def test_the_responses_api_returns_and_streams_text(serve) -> None:
    model = client(serve("hello world"), use_responses_api=True)
    assert model.invoke("hi").text == "hello world"
    chunks = list(model.stream("hi"))
    assert functools.reduce(operator.add, chunks).text == "hello world"

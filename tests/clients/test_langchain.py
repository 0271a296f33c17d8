"""langchain-openai: chats, tools and structured answers, streamed and not."""

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


def test_a_plain_chat(serve) -> None:
    server = serve("hello é world")
    reply = client(server, temperature=0, max_tokens=50).invoke("hi")
    assert reply.content == "hello é world"
    assert reply.response_metadata["finish_reason"] == "stop"
    usage = reply.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 2
    assert server.last_prompt() == "hi"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_streamed_chat_with_a_tool(serve, asynchronous) -> None:
    """The call goes to the tool, and its result into the next prompt."""
    server = serve("hello " + CALL, "the end", chat_template=TEMPLATE)
    model = client(server, stream_usage=True).bind_tools([weather])
    said: list[Any] = [HumanMessage("hi")]
    if asynchronous:
        chunks = [chunk async for chunk in model.astream(said)]
    else:
        chunks = list(model.stream(said))
    assert len(chunks) > 5
    reply = functools.reduce(operator.add, chunks)
    assert reply.text.strip() == "hello"
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert reply.usage_metadata["output_tokens"] > 5
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    whole = AIMessage(content=reply.text, tool_calls=reply.tool_calls)
    assert model.invoke([*said, whole, result]).content == "the end"
    assert "tool: rain in Rome\n" in server.last_prompt()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(serve, method) -> None:
    """With a named function too the model is held to the arguments, and says nothing else."""
    server = serve('{"city": "Rome"}')
    model = client(server).with_structured_output(Place, method=method)
    assert model.invoke("hi") == Place(city="Rome")
    assert server.text_engine.engine.submitted[-1].params.grammar is not None


def test_a_chat_through_the_responses_api(serve) -> None:
    model = client(serve("hello world"), use_responses_api=True)
    assert model.invoke("hi").text == "hello world"
    chunks = list(model.stream("hi"))
    assert functools.reduce(operator.add, chunks).text == "hello world"

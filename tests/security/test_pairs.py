"""No pair of request options causes a server error or changes another completion.

CVE-2026-44223, PYSEC-2026-2303, CVE-2026-21869: each option worked alone, and two together stopped
the engine. Few requests here cover every pair of values of two options.
"""

import asyncio
import itertools
import random

import httpx
import pytest

from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from server.testing import ServerThread, flags

COMMON = {
    "n": [2],
    "temperature": [0, 3.0],
    "top_p": [0.3],
    "top_k": [1, 5],
    "min_p": [0.4],
    "seed": [-(2**63), 7],
    "max_tokens": [1, 9],
    "min_tokens": [1],
    "stop": [["a", "zz"]],
    "stop_token_ids": [[5, 6]],
    "ignore_eos": [True],
    "presence_penalty": [2],
    "frequency_penalty": [-2],
    "repetition_penalty": [1.5],
    "logit_bias": [{"7": 100, "8": -100}],
    "allowed_token_ids": [[5, 6, 7, 8, 9]],
    "bad_words": [["a", "the"]],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "prompt_logprobs": [2],
    "truncate_prompt_tokens": [1, -1],
    "add_special_tokens": [True],
    "cache_salt": ["s"],
    "priority": [-5],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "stream": [True],
    "guided_regex": ["[ab]{2,5}"],
    "response_format": [{"type": "json_object"}],
}
OPTIONS = {
    "/v1/completions": COMMON
    | {"prompt": [[5], [[5, 6], [7]], "a", ["a", "b"]], "echo": [True], "logprobs": [0, 3]},
    "/v1/chat/completions": COMMON
    | {
        "logprobs": [True],
        "top_logprobs": [3],
        "tools": [[{"type": "function", "function": {"name": "f", "parameters": {}}}]],
        "tool_choice": ["none", "required"],
        "continue_final_message": [True],
        "add_generation_prompt": [False],
        "parallel_tool_calls": [False],
    },
}
NEEDED = {
    "/v1/completions": {"prompt": [9, 8, 7], "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
NEIGHBOUR = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ABSENT = object()


def covering(options: dict[str, list], rng: random.Random) -> list[dict]:
    """Returns requests that cover every pair of values of two options. Absence is a value."""
    values = {name: [ABSENT, *listed] for name, listed in options.items()}
    index = {name: range(len(listed)) for name, listed in values.items()}
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(values, 2)
        for i in index[a]
        for j in index[b]
    }
    rows = []
    while uncovered:
        row = dict(min(uncovered))
        names = [name for name in values if name not in row]
        for name in rng.sample(names, len(names)):
            gains = [
                sum(pair(values, name, i, other, j) in uncovered for other, j in row.items())
                for i in index[name]
            ]
            row[name] = gains.index(max(gains))
        uncovered -= set(itertools.combinations([(name, row[name]) for name in values], 2))
        rows.append({n: values[n][i] for n, i in row.items() if values[n][i] is not ABSENT})
    return rows


def pair(values, a, i, b, j):
    """Returns two (option, index of its value) pairs in the order of the options."""
    order = list(values)
    return tuple(sorted([(a, i), (b, j)], key=lambda choice: order.index(choice[0])))


def test_every_pair_is_covered() -> None:
    options = {"a": [1, 2], "b": [1], "c": [1, 2, 3]}
    rows = covering(options, random.Random(0))
    for a, b in itertools.combinations(options, 2):
        for x, y in itertools.product([None, *options[a]], [None, *options[b]]):
            assert any((row.get(a), row.get(b)) == (x, y) for row in rows)
    assert len(rows) < 4 * 2 * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = tiny_config()
    tokenizer = full_backend(config["vocab_size"])
    template = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = tmp_path_factory.mktemp("pairs") / "model"
    write_checkpoint(
        folder, config, tokenizer=tokenizer, tokenizer_config={"chat_template": template}
    )
    sizes = {"dtype": "float32", "num_blocks": 41, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    server = ServerThread(*flags(model=folder, **sizes, warmup=False, compilation_cache_dir=""))
    yield server
    server.close()


@pytest.mark.parametrize("path", OPTIONS)
async def test_no_pair_of_options_causes_an_error_or_changes_a_neighbour(server, path) -> None:
    """A request that shares steps with each pair gets the same completion as alone."""
    rng = random.Random(path)
    rows = covering(OPTIONS[path], rng)
    seen = set()
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

        async def neighbour():
            reply = await client.post("/v1/completions", json=NEIGHBOUR)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        async def send(body):
            """Drops the fields that the server rejects until the rest is served."""
            while (reply := await client.post(path, json=body)).status_code == 400:
                field = reply.json()["error"]["param"]
                assert field in OPTIONS[path], (body, reply.text)
                body = {name: value for name, value in body.items() if name != field}
                body = NEEDED[path] | body
            assert reply.status_code == 200, (body, reply.text)
            assert '"error":{' not in reply.text, (body, reply.text)
            seen.update(itertools.combinations(sorted(body), 2))

        expected = await neighbour()
        for start in range(0, len(rows), 4):
            bodies = [NEEDED[path] | row for row in rows[start : start + 4]]
            choices, *_ = await asyncio.gather(neighbour(), *map(send, bodies))
            assert choices == expected, bodies
    assert len(rows) > 8
    names = OPTIONS[path]
    assert len(seen) > 0.8 * len(names) * (len(names) - 1) / 2, "few pairs were served"
    assert server.text_engine.num_in_flight == 0

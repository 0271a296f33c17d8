"""The work of a request is limited, and other requests are served while it is checked.

CVE-2026-34756, CVE-2024-8939 (fan-out), CVE-2025-48942..44, CVE-2026-25048, CVE-2026-55574
(grammars), CVE-2026-105757 (errors that reach the engine), CVE-2025-62426, CVE-2026-115911
(templates), CVE-2025-48956 (headers).
"""

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from jaxserve import sampling_params
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.config import MIB
from jaxserve.front import grammar_checks, text_engine
from jaxserve.openai import (
    errors,
    json_structure,
    limits,
    messages,
    params,
    prompt_list,
    prompts,
    tools,
)
from jaxserve.structured_output import compiling, structural_tag
from jaxserve.structured_output import constraint as grammars
from jaxserve.structured_output import grammar as structured
from jaxserve.structured_output import worker as grammar_worker
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.tiny import tiny_config, write_checkpoint
from jaxserve.text import chat_template
from server import body_memory, write_watch
from server import http as server_http
from server.app import create_app
from server.settings import ApiSettings, ServerSettings
from server.state import ServerState
from server.testing import ServerThread, flags

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
PROMPT = {"prompt": "hello", "max_tokens": 3}


def make_client(text_engine, **settings):
    app = create_app(ServerState(text_engine), ApiSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize(
    "body",
    [
        *(PROMPT | {"n": n} for n in (129, 16384, 2**31, 2**63 - 1)),
        *(PROMPT | {"best_of": n} for n in (2, 2**31)),
        {"prompt": ["a"] * 2049},
        *({"prompt": [[1]] * n} for n in (10_000, 100_000)),
        {"prompt": ["a"] * 1000, "n": 128},
        *(PROMPT | {"stop": stop} for stop in (["a"] * 65, "x" * 1001)),
        PROMPT | {"stop_token_ids": [1] * 257},
        PROMPT | {"logprobs": 21},
        *(PROMPT | {"logit_bias": {str(i): 1 for i in range(n)}} for n in (10_000, 2**18 + 1)),
        PROMPT | {"allowed_token_ids": [1] * (2**18 + 1)},
        PROMPT | {"bad_words": ["a"] * 1025},
        PROMPT | {"bad_words": ["a b c d " * 500]},
        PROMPT | {"guided_choice": ["a"] * 1025},
        PROMPT | {"guided_regex": "a" * (2**18 + 1)},
        PROMPT | {"cache_salt": "x" * 1001},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_rejects_requests_that_fan_out_beyond_a_limit(body) -> None:
    text_engine = scripted_text_engine("hello")
    async with make_client(text_engine) as client:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code in (400, 413, 429), reply.text
        assert len(reply.content) < 5000
        assert text_engine.metrics.prompt_tokens == 0
        assert text_engine.num_in_flight == 0
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize(
    "field",
    ["tokenize", "messages", "tools", "chat_template", "add_generation_prompt", "documents_", "_x"],
)
async def test_template_variables_cannot_override_those_of_the_server(field) -> None:
    text_engine = scripted_text_engine(
        "hello", chat_template="{% for m in messages %}x{% endfor %}"
    )
    body = {"messages": [{"role": "user", "content": "a"}]}
    async with make_client(text_engine) as client:
        expected = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        more = {"chat_template_kwargs": {field: [1] * 5}}
        reply = await client.post("/v1/chat/completions", json=body | more)
        assert reply.status_code == 400 or reply.json()["usage"] == expected
        sent = await client.post("/v1/chat/completions", json=body | {"chat_template": "{{ 1 }}"})
        assert sent.status_code == 400


def references(depth, width, keyword):
    """Returns a short schema that expands to ``width ** depth`` parts."""
    names = [f"d{i}" for i in range(depth + 1)]
    defs = {
        a: {keyword: [{"$ref": f"#/$defs/{b}"}] * width}
        for a, b in zip(names, names[1:], strict=False)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, names[-1]: {"type": "string"}}}


def objects(depth, width):
    defs: dict[str, dict] = {f"d{depth}": {"type": "string"}}
    for i in range(depth):
        fields = {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)}
        defs[f"d{i}"] = {"type": "object", "properties": fields}
    return {"allOf": [{"$ref": "#/$defs/d0"}] * 2, "$defs": defs}


def alternatives(width):
    parts = [
        {
            "anyOf": [
                {"properties": {f"a{i}": {"const": j}}, "required": [f"a{i}"]} for j in range(3)
            ]
        }
        for i in range(width)
    ]
    return {"allOf": parts}


AMBIGUOUS_PATTERN = "(a|aa)*" * 300 + "$"
PATTERNS = {f"p{i}": {"type": "string", "pattern": f"^{f'(a|a{i}|aa)*' * 300}$"} for i in range(20)}
SCHEMA = {"type": "object", "properties": PATTERNS}


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": AMBIGUOUS_PATTERN},
        {"structured_outputs": {"regex": AMBIGUOUS_PATTERN}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_rejects_grammars_that_are_too_expensive_for_the_vocabulary(field, smollm2) -> None:
    """With a small vocabulary, or with single bytes, all of these grammars compile."""
    text_engine = scripted_text_engine("hello")
    tokenizer = open_checkpoint(str(smollm2)).tokenizer()
    text_engine.grammars = grammar_checks.GrammarChecks(tokenizer, tokenizer.vocab_size)
    async with make_client(text_engine) as client:
        reply = await client.post("/v1/completions", json=PROMPT | field)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == next(iter(field))
    assert text_engine.num_in_flight == 0


WORDS = "\n".join(f"a{i}: W{i} start?\nW{i}: /[a-z ]{{1,{i + 1}}}/" for i in range(800))
EXPENSIVE_GRAMMARS = {
    "counted": ("guided_regex", "((a{1,100}){1,100}){1,100}"),
    "counted more": ("guided_regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "letters": ("guided_regex", r"(\\p{L}{1,500}\\p{N}{1,500}){1,500}"),
    "look-ahead": ("guided_regex", "(.*a.{30}){20}b"),
    "deep": ("guided_regex", "(" * 100_000),
    "classes": ("guided_regex", "[" * 100_000),
    "choices": ("guided_choice", ["x" * 200 + str(i) for i in range(1024)]),
    "references": ("guided_json", references(60, 2, "anyOf")),
    "all references": ("guided_json", references(60, 2, "allOf")),
    "objects": ("guided_json", objects(20, 4)),
    "alternatives": ("guided_json", alternatives(30)),
    "itself": ("guided_json", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "multiple": ("guided_json", {"type": "integer", "multipleOf": 8_000_009}),
    "multiples": (
        "guided_json",
        {
            "properties": {
                f"p{i}": {"type": "integer", "multipleOf": 300_007 + i} for i in range(40)
            }
        },
    ),
    "long": ("guided_json", {"type": "string", "minLength": 10**9, "maxLength": 10**18}),
    "items": ("guided_json", {"type": "array", "minItems": 10**9, "maxItems": 10**18}),
    "rules": ("guided_grammar", "start: " + "(" * 20_000),
    "doubled": (
        "guided_grammar",
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + '\nT60: "a"',
    ),
    "ambiguous": ("guided_grammar", "start: s\ns: s s | s s s | /[a-z ]/ |"),
    "many ways": (
        "guided_grammar",
        "start: " + " | ".join(f"a{i}" for i in range(800)) + "\n" + WORDS,
    ),
    "hidden": (
        "guided_grammar",
        'start: "abc" x\nx: ' + " | ".join(f"a{i}" for i in range(800)) + "\n" + WORDS,
    ),
    "ebnf": ("guided_grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
}
"""Expensive or odd grammars: none may cause an internal error or delay other requests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("bombs") / "model", tiny_config())
    sizes = {"dtype": "float32", "num_blocks": 41, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    server = ServerThread(*flags(model=folder, **sizes, warmup=False, compilation_cache_dir=""))
    yield server
    server.close()


async def test_other_requests_are_served_while_expensive_grammars_are_checked(server) -> None:
    """All grammars are sent at once, and other requests wait for none of them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

        async def send(field, value):
            body = {"prompt": [5, 6], "max_tokens": 6, field: value}
            return await client.post("/v1/completions", json=body)

        assert (await send("guided_regex", "a+")).status_code == 200
        tasks = [asyncio.create_task(send(*grammar)) for grammar in EXPENSIVE_GRAMMARS.values()]
        served = 0
        while not all(task.done() for task in tasks):
            reply = await client.post("/v1/completions", json={"prompt": [7], "max_tokens": 2})
            assert reply.status_code == 200
            served += 1
        assert served > 5
        for name, task in zip(EXPENSIVE_GRAMMARS, tasks, strict=True):
            reply = task.result()
            # A 500 that names the grammar: it compiled, but the engine could not follow it.
            assert reply.status_code in (200, 400, 500), (name, reply.text)
            assert "Internal" not in reply.text, name
        refused = {
            name
            for name, task in zip(EXPENSIVE_GRAMMARS, tasks, strict=True)
            if task.result().status_code == 400
        }
        assert refused >= {"multiple", "multiples", "objects", "deep", "rules", "ebnf"}
        assert (await send("guided_regex", "a+")).status_code == 200
        assert (await client.get("/health")).status_code == 200


# --- the table of limits in the documents ---


def rows() -> dict[str, str]:
    """Returns the maximum of each limit, as the document states it."""
    section = DOCUMENT.read_text().partition("## Limits")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {cell[0].strip(): cell[1].strip() for cell in cells[2:]}


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]


def test_the_table_of_limits_matches_the_code() -> None:
    api, serving, documented = ApiSettings(), ServerSettings(), rows()
    expected = {
        "completions in flight: `n` for each prompt": [api.max_queue],
        "body, decompressed": [api.max_body_mib],
        "JSON structure in a body, see below": [api.max_json_structure_mib],
        "digits of a number in a body": [json_structure.MAX_DIGITS],
        "all bodies in flight, not counting the first 64 KiB of each": [api.max_body_memory_mib],
        "time in which a client reads nothing that was sent": [serving.write_timeout],
        "time in which a peer answers no TCP probe or acknowledges nothing": [
            write_watch.IDLE_S + write_watch.PROBE_INTERVAL_S * write_watch.NUM_PROBES
        ],
        "time to receive a body": [api.body_timeout],
        "pause of a body of over 64 KiB, and its slowest rate, while others need its memory": [
            body_memory.PAUSE_S,
            body_memory.MIN_BYTES_PER_S >> 10,
        ],
        "head: request line and headers": [server_http.MAX_HEAD_BYTES >> 10],
        "pipelined requests that wait for an earlier response": [server_http.MAX_QUEUED],
        "time to receive the head; time that a connection may be idle": [
            serving.keep_alive_timeout
        ],
        "prompts in a request; messages": [prompt_list.MAX_PROMPTS, messages.MAX_MESSAGES],
        "calls of `/tokenize` and `/detokenize` in flight": [text_engine.MAX_TEXT_CALLS],
        "text for `/tokenize`, IDs for `/detokenize`, texts cut by `truncate_prompt_tokens`": [
            prompts.TEXT_FACTOR,
            params.MAX_TEXT_TOKENS,
        ],
        "arguments of an earlier tool call": [messages.MAX_ARGUMENT_CHARS],
        "token IDs in parameters, times the completions of the request": [limits.MAX_PARAMETER_IDS],
        "tokens of prompts that a reply repeats; log probabilities of prompt tokens in it, "
        "counting up to 21 at a position": [
            limits.MAX_REPEATED_IDS,
            limits.MAX_PROMPT_SCORES,
        ],
        "`n`": [sampling_params.MAX_N],
        "`stop`": [sampling_params.MAX_STOP_STRINGS, params.MAX_STOP_CHARS],
        "`stop_token_ids`": [sampling_params.MAX_STOP_TOKEN_IDS],
        "`logit_bias`, `allowed_token_ids`": [sampling_params.MAX_LOGIT_BIAS],
        "`bad_words`": [
            sampling_params.MAX_BAD_WORDS,
            sampling_params.MAX_BAD_WORD_TOKENS,
            params.MAX_BAD_WORD_CHARS,
        ],
        "`tools`; name of a function": [tools.MAX_TOOLS, tools.MAX_NAME_CHARS],
        "error message": [errors.MAX_MESSAGE_CHARS],
        "cached grammars: valid; refused; compiled": [
            grammar_checks.NUM_KEPT,
            grammar_checks.NUM_KEPT,
            grammars.NUM_CACHED,
        ],
        "time for an engine to compile a grammar": [compiling.COMPILE_TIMEOUT_S],
        "total time for the grammar of a completion, not counting 0.05 s for each token": [
            grammars.MAX_EXTRA_TIME_S
        ],
        "rest of a request that has already been answered": [
            server_http.MAX_UNREAD_BYTES // MIB,
            server_http.UNREAD_TIMEOUT_S,
        ],
        "grammar or schema; choices": [sampling_params.MAX_GRAMMAR_CHARS, structured.MAX_CHOICES],
        "schemas of arguments in the format `qwen3_coder` with a grammar, each with a copy of "
        "what it refers to": [structural_tag.MAX_VALUE_CHARS],
        "grammars that wait for their check; for one that takes over 0.1 s": [
            grammar_checks.QUEUE_SHARE,
            grammar_checks.LONG_QUEUE_SHARE,
        ],
        "processor time and memory for checking a grammar": [
            grammar_worker.CHECK_TIME_S,
            grammar_worker.CHECK_MEMORY_BYTES // MIB,
        ],
        "chat template: output; loop iterations and calls; processor time": [
            chat_template.MAX_OUTPUT_CHARS,
            chat_template.MAX_LOOP_TURNS,
            chat_template.MAX_RENDER_TIME_S,
        ],
        "`cache_salt`": [params.MAX_SALT_CHARS],
    }
    assert body_memory.FREE_BYTES == 64 * 1024
    weights = (json_structure.COMMA_BYTES, json_structure.QUOTE_BYTES, json_structure.BRACKET_BYTES)
    text = " ".join(DOCUMENT.read_text().split())
    assert "{} bytes for each comma, {} for each quote, {} for each".format(*weights) in text
    assert sampling_params.MAX_ALLOWED_TOKEN_IDS == sampling_params.MAX_LOGIT_BIAS
    assert grammar_checks.QUICK_TIME_S == 0.1  # in the name of a row
    for name, values in expected.items():
        assert numbers(documented[name]) == [int(value) for value in values], name

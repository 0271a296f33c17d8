"""The KV cache: prefix sharing, preemption, chunked prompts, windows and compilation.

A completion must equal that of a reference without a cache, whatever else is running.
"""

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.testing.api_client import COMPLETIONS, Streamed
from jaxserve.testing.one_step import logits_of
from jaxserve.testing.reference import Reference
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.testing.tolerance import assert_close

NO_PREFIX_CACHE = "there is no prefix cache yet: no request uses the blocks of another"
SMALL_BLOCKS = {"block_size": 4}
SMALL_POOL = {"block_size": 4, "num_blocks": 15}
"""14 usable blocks, with room for 56 tokens."""


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=count)


@pytest.fixture(scope="module")
def reference(random_checkpoint: Path) -> Reference:
    return Reference(dict(open_checkpoint(str(random_checkpoint)).tensors()))


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint, **SMALL_BLOCKS)


def body(prompt: Any, count: int, **more: Any) -> dict[str, Any]:
    """Returns a greedy request for exactly ``count`` tokens with their log probabilities."""
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        **more,
    }


def generate(server, prompt: Any, count: int, **more: Any) -> list[dict[str, Any]]:
    """Returns the choices, by index. The prompts of a list run at the same time."""
    choices = server.complete(**body(prompt, count, **more))["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


@functools.cache
def expected_completion(
    reference: Reference, prompt: tuple[int, ...], count: int
) -> tuple[list[int], Any]:
    """Returns the token IDs of a completion and their log probabilities."""
    tokens = reference.greedy(prompt, count)
    logprobs = reference.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    return tokens, logprobs[np.arange(count), tokens]


def assert_matches_reference(
    reference: Reference, prompt: Sequence[int], count: int, choice: dict[str, Any]
) -> None:
    tokens, logprobs = expected_completion(reference, tuple(prompt), count)
    assert choice["token_ids"] == tokens
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]["token_logprobs"]
    assert_close(found, logprobs, num_tokens=len(prompt) + count)


def cached_tokens(server, prompt: Sequence[int], **more: Any) -> int:
    usage = server.complete(**body(prompt, 1, **more))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_js_194_repeated_prompts_and_shared_prefixes_match_the_reference(server, reference) -> None:
    prompt = ids(1, 22)
    for _ in range(3):
        (choice,) = generate(server, prompt, 12)
        assert_matches_reference(reference, prompt, 12, choice)
    for length in (1, 4, 5, 9):
        other = prompt[:12] + ids(10 + length, length)
        (choice,) = generate(server, other, 12)
        assert_matches_reference(reference, other, 12, choice)


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
def test_js_194_a_repeated_prompt_uses_cached_blocks(server) -> None:
    prompt = ids(2, 22)
    assert cached_tokens(server, prompt) == 0
    assert cached_tokens(server, prompt) == 20


@pytest.mark.parametrize("length", [4, 8, 12])
def test_js_195_prompts_of_whole_blocks_can_be_repeated(server, reference, length: int) -> None:
    prompt = ids(length, length)
    for _ in range(3):
        (choice,) = generate(server, prompt, 6)
        assert_matches_reference(reference, prompt, 6, choice)
    # Once there is a prefix cache: at least one token of a cached prompt is computed.
    assert cached_tokens(server, prompt) < length


def test_js_195_prompts_of_whole_blocks_can_be_scored_again(server, reference) -> None:
    prompt = ids(8, 8)
    expected = reference.logprobs(prompt)[np.arange(7), prompt[1:]]
    for _ in range(3):
        (choice,) = generate(server, prompt, 1, echo=True)
        first, *rest = choice["logprobs"]["token_logprobs"][:8]
        assert first is None
        assert_close(rest, expected, num_tokens=len(prompt))


def test_js_198_a_block_is_not_freed_while_a_request_uses_it(server, reference) -> None:
    shared = ids(3, 12)
    second, third = [*shared, *ids(4, 3)], ids(5, 12)
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            second_future = pool.submit(generate, server, second, 100)
            short_future = pool.submit(generate, server, [*shared, 7], 2)
            abandoned = {**body([*shared, 8], 100), "stream": True}
            with server.http.stream("POST", COMPLETIONS, json=abandoned) as reply:
                next(reply.iter_bytes())
            third_future = pool.submit(generate, server, third, 100)
            assert_matches_reference(reference, second, 100, second_future.result()[0])
            assert_matches_reference(reference, [*shared, 7], 2, short_future.result()[0])
            assert_matches_reference(reference, third, 100, third_future.result()[0])
    server.until_idle()


def test_js_200_a_cache_salt_must_be_a_string_that_is_not_empty(server) -> None:
    request = body(ids(6, 20), 1)
    for salt in ("", 5, True, ["a"], {}):
        error = server.refused(COMPLETIONS, {**request, "cache_salt": salt})
        assert error["param"] == "cache_salt"
    texts = [
        server.complete(**request, cache_salt=salt)["choices"][0]["text"]
        for salt in ("a", "b", "a", "5", "None", None)
    ]
    assert len(set(texts)) == 1


def test_js_200_requests_with_different_salts_share_no_blocks(server, reference) -> None:
    prompt = ids(7, 40)
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "None"}):
        # Once there is a prefix cache: the first request with a salt finds nothing in it.
        assert cached_tokens(server, prompt, **salt) == 0
        for _ in range(2):
            (choice,) = generate(server, prompt, 6, **salt)
            assert_matches_reference(reference, prompt, 6, choice)


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
@pytest.mark.parametrize("salt", [{"cache_salt": "c"}, {}])
def test_js_200_requests_with_the_same_salt_share_blocks(server, salt: dict[str, str]) -> None:
    prompt = ids(8, 40)
    assert cached_tokens(server, prompt, **salt) == 0
    assert cached_tokens(server, prompt, **salt) == 36


SIMILAR_PREFIXES = [
    # The same digits, split differently.
    ([1, 23, 4, 5], [12, 3, 4, 5]),
    ([1, 1, 11, 111], [11, 11, 1, 11]),
    # Equal blocks after different ones.
    ([9, 8, 7, 6, 1, 2, 3, 4], [9, 8, 7, 5, 1, 2, 3, 4]),
    ([1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7, 8, 1, 2, 3, 4]),
    # The same blocks in another order.
    ([1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4]),
    ([0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("one", "other"), SIMILAR_PREFIXES)
def test_js_201_similar_blocks_are_not_confused(server, reference, one, other) -> None:
    tail = [40, 41, 42]
    for prompt in ([*one, *tail], [*other, *tail], [*one, *tail]):
        (choice,) = generate(server, prompt, 6)
        assert_matches_reference(reference, prompt, 6, choice)


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
def test_js_201_a_cached_block_is_identified_by_its_whole_prefix(server) -> None:
    one, tail = [300, 301, 302, 303, 304, 305, 306, 307], [40, 41, 42]
    assert cached_tokens(server, [*one, *tail]) == 0
    assert cached_tokens(server, [*one[4:], *one[:4], *tail]) == 0
    assert cached_tokens(server, [*one[:4], *one[:4], *tail]) == 4
    assert cached_tokens(server, [*one, *tail]) == 8


@pytest.fixture
def small_server(serve, random_checkpoint) -> Iterator[Any]:
    """A server with 14 usable blocks, on which the test must cause preemptions."""
    server = serve(random_checkpoint, **SMALL_POOL)
    before = server.metric("num_preemptions_total")
    yield server
    assert server.metric("num_preemptions_total") > before
    server.until_idle()


@pytest.mark.parametrize("num_prompts", [4, 9])
def test_js_202_preemption_does_not_change_greedy_tokens(
    small_server, reference, num_prompts: int
) -> None:
    """Four requests run at a time and need about 30 blocks; the longest needs all 14."""
    prompts = [ids(20 + i, 7 + i) for i in range(num_prompts - 1)] + [ids(50, 36)]
    choices = generate(small_server, prompts, 20)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_matches_reference(reference, prompt, 20, choice)


def test_js_202_preemption_does_not_change_seeded_tokens(small_server) -> None:
    prompts = [ids(60 + i, 10) for i in range(6)]
    sampled = {"temperature": 1.0, "seed": 5}
    together = [choice["token_ids"] for choice in generate(small_server, prompts, 20, **sampled)]
    alone = [generate(small_server, prompt, 20, **sampled)[0]["token_ids"] for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, alone))) > 1


def joined(streamed: Streamed, index: int) -> dict[str, Any]:
    """Returns the joined values of the chunks of one choice."""
    pieces = streamed.choices(index)
    logprobs = [piece["logprobs"] for piece in pieces if piece.get("logprobs")]
    return {
        "text": streamed.text(index),
        "ids": [token for piece in pieces for token in piece.get("token_ids") or []],
        "tokens": [token for part in logprobs for token in part["tokens"]],
        "logprobs": [value for part in logprobs for value in part["token_logprobs"]],
        "top": [list(top) for part in logprobs for top in part["top_logprobs"]],
        "offsets": [offset for part in logprobs for offset in part["text_offset"]],
        "finish_reason": streamed.finish_reason(index),
    }


def test_js_203_preemption_does_not_change_streams(small_server) -> None:
    prompts = [ids(70 + i, 8 + i) for i in range(4)]
    with_usage = {"stream_options": {"include_usage": True}}
    together = small_server.stream(COMPLETIONS, body(prompts, 20, **with_usage))
    num_prompt_tokens = 0
    for index, prompt in enumerate(prompts):
        alone = small_server.stream(COMPLETIONS, body(prompt, 20, **with_usage))
        expected, actual = joined(alone, 0), joined(together, index)
        assert len(expected["ids"]) == len(expected["tokens"]) == 20
        num_tokens = len(prompt) + 20
        assert_close(actual.pop("logprobs"), expected.pop("logprobs"), num_tokens=num_tokens)
        assert actual == expected
        num_prompt_tokens += alone.usage["prompt_tokens"]
        assert alone.usage["completion_tokens"] == 20
    assert together.usage["prompt_tokens"] == num_prompt_tokens == 8 + 9 + 10 + 11
    assert together.usage["completion_tokens"] == 80


def test_js_205_preemption_does_not_change_scores_of_prompts(small_server, reference) -> None:
    prompts = [ids(80, 14), ids(81, 17)]
    choices = generate(small_server, prompts, 20, echo=True)
    for prompt, together in zip(prompts, choices, strict=True):
        (alone,) = generate(small_server, prompt, 20, echo=True)
        one, other = alone["logprobs"], together["logprobs"]
        for key in ("tokens", "text_offset"):
            assert one[key] == other[key]
            assert len(one[key]) == len(prompt) + 20
        assert one["token_logprobs"][0] is other["token_logprobs"][0] is None
        sequence = [*prompt, *reference.greedy(prompt, 20)]
        expected = reference.logprobs(sequence)[np.arange(len(sequence) - 1), sequence[1:]]
        for logprobs in (one, other):
            assert_close(logprobs["token_logprobs"][1:], expected, num_tokens=len(sequence))
            assert len(logprobs["top_logprobs"]) == len(sequence)


@pytest.fixture(scope="module")
def long_server(serve, tmp_path_factory):
    """A server for the same model with a longer context, in steps of up to 128 tokens."""
    folder = tmp_path_factory.mktemp("long") / "long"
    config = tiny_config(max_position_embeddings=2048)
    write_checkpoint(folder, config, tokenizer=full_backend())
    return serve(folder, num_blocks=140, max_num_batched_tokens=128)


def test_js_206_prompts_in_chunks_match_the_reference(
    serve, random_checkpoint, reference, long_server
) -> None:
    prompts = [ids(100 + length, length) for length in (7, 8, 9, 63, 64, 65)]
    for server in (serve(random_checkpoint, max_num_batched_tokens=8), long_server):
        for prompt in prompts:
            (choice,) = generate(server, prompt, 4)
            assert_matches_reference(reference, prompt, 4, choice)
        for prompt, choice in zip(prompts, generate(server, prompts, 4), strict=True):
            assert_matches_reference(reference, prompt, 4, choice)


def test_js_206_a_long_prompt_does_not_delay_a_stream(long_server) -> None:
    """The long prompt takes 16 steps, and the other request gets a token in each of them."""
    server = long_server.with_one_token_per_output()
    prompts = [ids(110, 8), ids(111, 2000)]
    streamed = server.stream(COMPLETIONS, body(prompts, 12))
    order = [choice["index"] for chunk in streamed.chunks for choice in chunk["choices"]]
    assert order == [0] * 12 + [1] * 12
    alone = server.stream(COMPLETIONS, body(prompts[1], 12))
    assert joined(alone, 0)["ids"] == joined(streamed, 1)["ids"]


@pytest.fixture(scope="module")
def windowed_checkpoint(tmp_path_factory) -> tuple[Path, Reference]:
    """A Mistral checkpoint whose layers see 8 positions, and its reference."""
    config = tiny_config("MistralForCausalLM", sliding_window=8)
    tensors = random_tensors(config)
    folder = tmp_path_factory.mktemp("mistral") / "mistral"
    write_checkpoint(folder, config, tensors, tokenizer=full_backend())
    return folder, Reference(tensors, windows=(8, 8))


def test_js_207_sequences_longer_than_the_window_match_the_reference(
    serve, windowed_checkpoint
) -> None:
    """Prompts run in chunks of 8 tokens and blocks of 4: alone, again, and all together."""
    folder, reference = windowed_checkpoint
    server = serve(folder, block_size=4, max_num_batched_tokens=8)
    prompts = [ids(120 + length, length) for length in range(6, 21)]
    for prompt in prompts[::4]:
        for _ in range(2):
            (choice,) = generate(server, prompt, 20)
            assert_matches_reference(reference, prompt, 20, choice)
    for prompt, choice in zip(prompts, generate(server, prompts, 20), strict=True):
        assert_matches_reference(reference, prompt, 20, choice)
    without_window = Reference(reference.tensors)
    assert without_window.greedy(prompts[-1], 20) != reference.greedy(prompts[-1], 20)


FULL, WINDOW = "full_attention", "sliding_attention"
OFF = {"sliding_window": 8, "use_sliding_window": False}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", OFF, (None, None)),
        ("Mistral", {"sliding_window": "null"}, (None, None)),
        ("Mistral", {}, (None, None)),  # 4096, which is more than the context
        ("Mistral", {"sliding_window": 256}, (None, None)),
        ("Mistral", {"sliding_window": 8}, (8, 8)),
        ("Mistral", {"sliding_window": 8, "layer_types": [FULL, WINDOW]}, (None, 8)),
        ("Mistral", {"sliding_window": 8, "layer_types": [FULL, FULL]}, (None, None)),
        ("Llama", {"sliding_window": 8}, (None, None)),
        *(
            case
            for family in ("Qwen2", "Qwen3")
            for case in (
                (family, OFF, (None, None)),
                (family, {"sliding_window": 8}, (None, None)),
                (family, {"use_sliding_window": True, "sliding_window": "null"}, (None, None)),
                (
                    family,
                    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
                    (None, 8),
                ),
                (
                    family,
                    {
                        "use_sliding_window": True,
                        "sliding_window": 8,
                        "layer_types": [WINDOW, FULL],
                    },
                    (8, None),
                ),
            )
        ),
    ],
)
def test_js_208_windows_may_be_off_or_in_some_layers_only(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = tiny_config(f"{family}ForCausalLM", **changes)
    if changes.get("sliding_window") == "null":
        config["sliding_window"] = None
    tensors = random_tensors(config)
    folder = write_checkpoint(tmp_path / "x", config, tensors)
    text = ids(130, 24)
    expected = Reference(tensors, windows=windows).logits(text)
    assert_close(logits_of(folder, text), expected, num_tokens=len(text), config=config)
    other = (8, 8) if windows == (None, None) else (None, None)
    assert np.abs(Reference(tensors, windows=other).logits(text) - expected).max() > 0.01


def test_js_208_a_window_without_a_size_is_refused(tmp_path: Path) -> None:
    config = tiny_config("MistralForCausalLM", layer_types=[FULL, WINDOW])
    config["sliding_window"] = None
    tensors = random_tensors(tiny_config("MistralForCausalLM"))
    folder = write_checkpoint(tmp_path / "x", config, tensors)
    with pytest.raises(CheckpointError, match="no sliding_window"):
        logits_of(folder, ids(131, 4))


@pytest.fixture
def compiled_programs(caplog) -> Iterator[list[str]]:
    """The names of the programs that JAX compiles, in any thread, while the test runs."""
    names: list[str] = []

    class CompileLogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Compiling "):
                names.append(message.split()[1])

    handler = CompileLogHandler()
    logger = logging.getLogger("jax")
    jax.config.update("jax_log_compiles", True)
    logger.addHandler(handler)
    try:
        yield names
    finally:
        logger.removeHandler(handler)
        jax.config.update("jax_log_compiles", False)


COMMON_SAMPLING = [{}, {"top_k": 5, "temperature": 1}, {"seed": 3, "temperature": 1}]
RARE_SAMPLING = [
    {"logprobs": 3},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"5": 4}},
    {"min_p": 0.1, "temperature": 1, "seed": 1},
]
PROMPT_LENGTHS = [1, 2, 3, 7, 8, 9, 31, 32, 33, 60]


def test_js_209_programs_are_compiled_for_buckets_and_not_for_lengths(
    serve, random_checkpoint, compiled_programs: list[str]
) -> None:
    """Common sampling parameters compile nothing; others compile once for each bucket."""
    server = serve(random_checkpoint, warmup=True)

    def run(lengths: Sequence[int], batches: Sequence[int], sampling: dict[str, Any]) -> None:
        for length in lengths:
            server.complete(ids(length, length), **{"max_tokens": 3, "temperature": 0, **sampling})
        for size in batches:
            prompts = [ids(size * 10 + i, 3 + 7 * i) for i in range(size)]
            server.complete(prompts, **{"max_tokens": 5, "temperature": 0, **sampling})

    assert compiled_programs
    compiled_programs.clear()
    for sampling in COMMON_SAMPLING:
        run(PROMPT_LENGTHS, range(1, 9), sampling)
    assert compiled_programs == []
    run(PROMPT_LENGTHS[::2], range(1, 9), {})
    for sampling in RARE_SAMPLING:
        run((1, 20, 60), (1, 2, 4, 8), sampling)
    # Each of these sizes is in the same bucket as an earlier one.
    compiled_programs.clear()
    compiled = server.metric("compilations_total")
    for sampling in RARE_SAMPLING:
        run(range(2, 64, 9), (3, 5, 6, 7), sampling)
    assert compiled_programs == []
    assert server.metric("compilations_total") == compiled

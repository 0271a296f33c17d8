"""The KV cache, blocks that are shared, preemption, chunks of prompts, windows, and compilation.

What a request is answered must be what a reference without any cache says, whatever else goes on.
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
"""14 blocks, which is room for 56 tokens."""


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=count)


@pytest.fixture(scope="module")
def reference(rand: Path) -> Reference:
    return Reference(dict(open_checkpoint(str(rand)).tensors()))


@pytest.fixture(scope="module")
def server(serve, rand):
    return serve(rand, **SMALL_BLOCKS)


def body(prompt: Any, count: int, **more: Any) -> dict[str, Any]:
    """A greedy request for so many tokens with their log probabilities."""
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        **more,
    }


def answers(server, prompt: Any, count: int, **more: Any) -> list[dict[str, Any]]:
    """The choices by their index. A list of prompts is worked on at the same time."""
    choices = server.complete(**body(prompt, count, **more))["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


@functools.cache
def expected(reference: Reference, prompt: tuple[int, ...], count: int) -> tuple[list[int], Any]:
    """The answer, and its log probabilities."""
    tokens = reference.greedy(prompt, count)
    logprobs = reference.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    return tokens, logprobs[np.arange(count), tokens]


def assert_right(
    reference: Reference, prompt: Sequence[int], count: int, choice: dict[str, Any]
) -> None:
    tokens, logprobs = expected(reference, tuple(prompt), count)
    assert choice["token_ids"] == tokens
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]["token_logprobs"]
    assert_close(found, logprobs, num_tokens=len(prompt) + count)


def cached_tokens(server, prompt: Sequence[int], **more: Any) -> int:
    usage = server.complete(**body(prompt, 1, **more))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_js_194_the_same_prompt_again_and_others_that_begin_like_it(server, reference) -> None:
    prompt = ids(1, 22)
    for _ in range(3):
        (choice,) = answers(server, prompt, 12)
        assert_right(reference, prompt, 12, choice)
    for length in (1, 4, 5, 9):
        other = prompt[:12] + ids(10 + length, length)
        (choice,) = answers(server, other, 12)
        assert_right(reference, other, 12, choice)


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
def test_js_194_what_is_known_of_a_prompt_is_not_computed_again(server) -> None:
    prompt = ids(2, 22)
    assert cached_tokens(server, prompt) == 0
    assert cached_tokens(server, prompt) == 20


@pytest.mark.parametrize("length", [4, 8, 12])
def test_js_195_prompts_of_whole_blocks(server, reference, length: int) -> None:
    prompt = ids(length, length)
    for _ in range(3):
        (choice,) = answers(server, prompt, 6)
        assert_right(reference, prompt, 6, choice)
    cached = cached_tokens(server, prompt)
    assert cached < length


def test_js_195_prompts_of_whole_blocks_with_their_scores(server, reference) -> None:
    prompt = ids(8, 8)
    wanted = reference.logprobs(prompt)[np.arange(7), prompt[1:]]
    for _ in range(3):
        (choice,) = answers(server, prompt, 1, echo=True)
        first, *rest = choice["logprobs"]["token_logprobs"][:8]
        assert first is None
        assert_close(rest, wanted, num_tokens=len(prompt))


def test_js_198_a_block_lives_as_long_as_one_that_uses_it(server, reference) -> None:
    shared = ids(3, 12)
    second, third = [*shared, *ids(4, 3)], ids(5, 12)
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            stays = pool.submit(answers, server, second, 100)
            early = pool.submit(answers, server, [*shared, 7], 2)
            leaving = {**body([*shared, 8], 100), "stream": True}
            with server.http.stream("POST", COMPLETIONS, json=leaving) as reply:
                next(reply.iter_bytes())
            fills = pool.submit(answers, server, third, 100)
            assert_right(reference, second, 100, stays.result()[0])
            assert_right(reference, [*shared, 7], 2, early.result()[0])
            assert_right(reference, third, 100, fills.result()[0])
    server.until_idle()


def test_js_200_a_salt_is_a_text_of_some_length(server) -> None:
    request = body(ids(6, 20), 1)
    for salt in ("", 5, True, ["a"], {}):
        error = server.refused(COMPLETIONS, {**request, "cache_salt": salt})
        assert error["param"] == "cache_salt"
    texts = [
        server.complete(**request, cache_salt=salt)["choices"][0]["text"]
        for salt in ("a", "b", "a", "5", "None", None)
    ]
    assert len(set(texts)) == 1


def test_js_200_different_salts_share_nothing(server) -> None:
    prompt = ids(7, 40)
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "None"}):
        assert cached_tokens(server, prompt, **salt) == 0


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
@pytest.mark.parametrize("salt", [{"cache_salt": "c"}, {}])
def test_js_200_the_same_salt_shares(server, salt: dict[str, str]) -> None:
    prompt = ids(8, 40)
    assert cached_tokens(server, prompt, **salt) == 0
    assert cached_tokens(server, prompt, **salt) == 36


ALIKE = [
    # The same digits, cut differently.
    ([1, 23, 4, 5], [12, 3, 4, 5]),
    ([1, 1, 11, 111], [11, 11, 1, 11]),
    # The same content of a block after different ones.
    ([9, 8, 7, 6, 1, 2, 3, 4], [9, 8, 7, 5, 1, 2, 3, 4]),
    ([1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7, 8, 1, 2, 3, 4]),
    # The same blocks in another order.
    ([1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4]),
    ([0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_js_201_blocks_that_look_alike(server, reference, one, other) -> None:
    tail = [40, 41, 42]
    for prompt in ([*one, *tail], [*other, *tail], [*one, *tail]):
        (choice,) = answers(server, prompt, 6)
        assert_right(reference, prompt, 6, choice)


@pytest.mark.xfail(strict=True, reason=NO_PREFIX_CACHE)
def test_js_201_a_block_is_found_by_all_that_comes_before_it(server) -> None:
    one, tail = [300, 301, 302, 303, 304, 305, 306, 307], [40, 41, 42]
    assert cached_tokens(server, [*one, *tail]) == 0
    assert cached_tokens(server, [*one[4:], *one[:4], *tail]) == 0
    assert cached_tokens(server, [*one[:4], *one[:4], *tail]) == 4
    assert cached_tokens(server, [*one, *tail]) == 8


@pytest.fixture
def small_pool(serve, rand) -> Iterator[Any]:
    """A server with 14 blocks, on which the test must lead to preemptions."""
    server = serve(rand, **SMALL_POOL)
    before = server.metric("num_preemptions_total")
    yield server
    assert server.metric("num_preemptions_total") > before
    server.until_idle()


@pytest.mark.parametrize("num_prompts", [4, 9])
def test_js_202_answers_after_preemption(small_pool, reference, num_prompts: int) -> None:
    """Four run at a time, and want about 30 blocks; the longest needs all 14 of them."""
    prompts = [ids(20 + i, 7 + i) for i in range(num_prompts - 1)] + [ids(50, 36)]
    choices = answers(small_pool, prompts, 20)
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_right(reference, prompt, 20, choice)


def test_js_202_seeds_after_preemption(small_pool) -> None:
    prompts = [ids(60 + i, 10) for i in range(6)]
    sampled = {"temperature": 1.0, "seed": 5}
    together = [choice["token_ids"] for choice in answers(small_pool, prompts, 20, **sampled)]
    alone = [answers(small_pool, prompt, 20, **sampled)[0]["token_ids"] for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, alone))) > 1


def joined(streamed: Streamed, index: int) -> dict[str, Any]:
    """What the chunks of an answer have told, put together."""
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


def test_js_203_streams_after_preemption(small_pool) -> None:
    prompts = [ids(70 + i, 8 + i) for i in range(4)]
    with_usage = {"stream_options": {"include_usage": True}}
    together = small_pool.stream(COMPLETIONS, body(prompts, 20, **with_usage))
    num_prompt_tokens = 0
    for index, prompt in enumerate(prompts):
        alone = small_pool.stream(COMPLETIONS, body(prompt, 20, **with_usage))
        wanted, got = joined(alone, 0), joined(together, index)
        assert len(wanted["ids"]) == len(wanted["tokens"]) == 20
        num_tokens = len(prompt) + 20
        assert_close(got.pop("logprobs"), wanted.pop("logprobs"), num_tokens=num_tokens)
        assert got == wanted
        num_prompt_tokens += alone.usage["prompt_tokens"]
        assert alone.usage["completion_tokens"] == 20
    assert together.usage["prompt_tokens"] == num_prompt_tokens == 8 + 9 + 10 + 11
    assert together.usage["completion_tokens"] == 80


def test_js_205_scores_of_prompts_after_preemption(small_pool, reference) -> None:
    prompts = [ids(80, 14), ids(81, 17)]
    choices = answers(small_pool, prompts, 20, echo=True)
    for prompt, together in zip(prompts, choices, strict=True):
        (alone,) = answers(small_pool, prompt, 20, echo=True)
        one, other = alone["logprobs"], together["logprobs"]
        for key in ("tokens", "text_offset"):
            assert one[key] == other[key]
            assert len(one[key]) == len(prompt) + 20
        assert one["token_logprobs"][0] is other["token_logprobs"][0] is None
        text = [*prompt, *reference.greedy(prompt, 20)]
        wanted = reference.logprobs(text)[np.arange(len(text) - 1), text[1:]]
        for logprobs in (one, other):
            assert_close(logprobs["token_logprobs"][1:], wanted, num_tokens=len(text))
            assert len(logprobs["top_logprobs"]) == len(text)


@pytest.fixture(scope="module")
def long_server(serve, tmp_path_factory):
    """The same model with a longer context, in steps of up to 128 tokens."""
    folder = tmp_path_factory.mktemp("long") / "long"
    config = tiny_config(max_position_embeddings=2048)
    write_checkpoint(folder, config, tokenizer=full_backend())
    return serve(folder, num_blocks=140, max_num_batched_tokens=128)


def test_js_206_prompts_in_chunks_of_every_size(serve, rand, reference, long_server) -> None:
    prompts = [ids(100 + length, length) for length in (7, 8, 9, 63, 64, 65)]
    for server in (serve(rand, max_num_batched_tokens=8), long_server):
        for prompt in prompts:
            (choice,) = answers(server, prompt, 4)
            assert_right(reference, prompt, 4, choice)
        for prompt, choice in zip(prompts, answers(server, prompts, 4), strict=True):
            assert_right(reference, prompt, 4, choice)


def test_js_206_a_long_prompt_does_not_hold_up_a_stream(long_server) -> None:
    """It takes 16 steps, and the other request gets a token in each of them."""
    server = long_server.one_token_at_a_time()
    prompts = [ids(110, 8), ids(111, 2000)]
    streamed = server.stream(COMPLETIONS, body(prompts, 12))
    order = [choice["index"] for chunk in streamed.chunks for choice in chunk["choices"]]
    assert order == [0] * 12 + [1] * 12
    alone = server.stream(COMPLETIONS, body(prompts[1], 12))
    assert joined(alone, 0)["ids"] == joined(streamed, 1)["ids"]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> tuple[Path, Reference]:
    """A Mistral whose layers see 8 positions, and what it should say."""
    config = tiny_config("MistralForCausalLM", sliding_window=8)
    tensors = random_tensors(config)
    folder = tmp_path_factory.mktemp("mistral") / "mistral"
    write_checkpoint(folder, config, tensors, tokenizer=full_backend())
    return folder, Reference(tensors, windows=(8, 8))


def test_js_207_more_tokens_than_the_window_has(serve, windowed) -> None:
    """In chunks of 8 and of 4 blocks, each prompt alone, again, and all together."""
    folder, reference = windowed
    server = serve(folder, block_size=4, max_num_batched_tokens=8)
    prompts = [ids(120 + length, length) for length in range(6, 21)]
    for prompt in prompts[::4]:
        for _ in range(2):
            (choice,) = answers(server, prompt, 20)
            assert_right(reference, prompt, 20, choice)
    for prompt, choice in zip(prompts, answers(server, prompts, 20), strict=True):
        assert_right(reference, prompt, 20, choice)
    full = Reference(reference.tensors)
    assert full.greedy(prompts[-1], 20) != reference.greedy(prompts[-1], 20)


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
def test_js_208_windows_that_are_off_or_in_some_layers(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = tiny_config(f"{family}ForCausalLM", **changes)
    if changes.get("sliding_window") == "null":
        config["sliding_window"] = None
    tensors = random_tensors(config)
    folder = write_checkpoint(tmp_path / "x", config, tensors)
    text = ids(130, 24)
    wanted = Reference(tensors, windows=windows).logits(text)
    assert_close(logits_of(folder, text), wanted, num_tokens=len(text), config=config)
    other = (8, 8) if windows == (None, None) else (None, None)
    assert np.abs(Reference(tensors, windows=other).logits(text) - wanted).max() > 0.01


def test_js_208_a_window_of_no_size_is_refused(tmp_path: Path) -> None:
    config = tiny_config("MistralForCausalLM", layer_types=[FULL, WINDOW])
    folder = write_checkpoint(tmp_path / "x", {**config, "sliding_window": None})
    with pytest.raises(CheckpointError, match="no sliding_window"):
        logits_of(folder, ids(131, 4))


@pytest.fixture
def programs(caplog) -> Iterator[list[str]]:
    """The names of the programs that JAX compiles, in any thread, while the test runs."""
    names: list[str] = []

    class Names(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Compiling "):
                names.append(message.split()[1])

    handler = Names()
    logger = logging.getLogger("jax")
    jax.config.update("jax_log_compiles", True)
    logger.addHandler(handler)
    try:
        yield names
    finally:
        logger.removeHandler(handler)
        jax.config.update("jax_log_compiles", False)


WARM = [{}, {"top_k": 5, "temperature": 1}, {"seed": 3, "temperature": 1}]
RARE = [
    {"logprobs": 3},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"5": 4}},
    {"min_p": 0.1, "temperature": 1, "seed": 1},
]
SIZES = [1, 2, 3, 7, 8, 9, 31, 32, 33, 60]
"""Lengths of prompts, and among them the number of requests that come at the same time."""


def test_js_209_nothing_is_compiled_for_a_length(serve, rand, programs: list[str]) -> None:
    """Nothing at all for the common ways to sample; others once for each bucket they meet."""
    server = serve(rand, warmup=True)

    def ask(lengths: Sequence[int], batches: Sequence[int], sampling: dict[str, Any]) -> None:
        for length in lengths:
            server.complete(ids(length, length), **{"max_tokens": 3, "temperature": 0, **sampling})
        for size in batches:
            prompts = [ids(size * 10 + i, 3 + 7 * i) for i in range(size)]
            server.complete(prompts, **{"max_tokens": 5, "temperature": 0, **sampling})

    assert programs
    programs.clear()
    for sampling in WARM:
        ask(SIZES, range(1, 9), sampling)
    assert programs == []
    ask(SIZES[::2], range(1, 9), {})
    for sampling in RARE:
        ask((1, 20, 60), (1, 2, 4, 8), sampling)
    # Sizes of which each is in the same bucket as one before.
    programs.clear()
    compiled = server.metric("compilations_total")
    for sampling in RARE:
        ask(range(2, 64, 9), (3, 5, 6, 7), sampling)
    assert programs == []
    assert server.metric("compilations_total") == compiled

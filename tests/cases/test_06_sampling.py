"""Sampling parameters: their effects, their limits, and their independence of other requests."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.reference import Reference
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tiny_tokenizer import full_backend
from jaxserve.testing.tolerance import assert_close
from jaxserve.testing.waiting import wait_until

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
VOCAB_SIZE = 512
PROMPT = [7, 300, 41, 41, 9]


@pytest.fixture(scope="module")
def server(serve, random_checkpoint):
    return serve(random_checkpoint, max_num_seqs=8)


@pytest.fixture(scope="module")
def reference(random_checkpoint) -> Reference:
    return Reference(dict(open_checkpoint(str(random_checkpoint)).tensors()))


def body(count: int, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    """Returns a request for exactly ``count`` tokens."""
    return {
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def generate_all(server, count: int, prompt: Any = PROMPT, **more: Any) -> list[list[int]]:
    """Returns the token IDs of every choice, by index."""
    choices = server.complete(**body(count, prompt, **more))["choices"]
    return [c["token_ids"] for c in sorted(choices, key=lambda choice: choice["index"])]


def generate(server, count: int, prompt: Any = PROMPT, **more: Any) -> list[int]:
    (tokens,) = generate_all(server, count, prompt, **more)
    return tokens


class StartTogether:
    """An engine that starts requests in order of arrival, once ``count`` of them have arrived."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine = engine
        self._count = count
        self._all_arrived = asyncio.Event()
        self.num_arrived = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: Submit, *, on_ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self.num_arrived += 1
        if self.num_arrived == self._count:
            self._all_arrived.set()
        await self._all_arrived.wait()
        async with contextlib.aclosing(
            self._engine.generate(request, on_ended=on_ended)
        ) as outputs:
            async for output in outputs:
                yield output


def generate_together(server, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the token IDs of requests that run in the same steps, in rows in this order."""
    engine = server.text_engine.engine
    barrier = server.text_engine.engine = StartTogether(engine, len(bodies))
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            replies = []
            for request in bodies:
                replies.append(pool.submit(lambda r: server.complete(**r), request))
                wait_until(lambda: barrier.num_arrived == len(replies))
        return [reply.result()["choices"][0]["token_ids"] for reply in replies]
    finally:
        server.text_engine.engine = engine


@pytest.mark.parametrize("temperature", ["1e-3", "1e-4", "1e-5", "1e-6", "1e-12", "5e-324"])
def test_js_084_tiny_temperatures_are_greedy(serve, random_checkpoint, temperature) -> None:
    server = serve(random_checkpoint, dtype="bfloat16")
    prompts = [random.Random(i).choices(range(VOCAB_SIZE), k=5) for i in range(16)]
    greedy, tiny = (
        server.complete(**body(3, prompts, temperature=t, seed=1, logprobs=2))["choices"]
        for t in (0, float(temperature))
    )
    num_clear = 0
    for one, other in zip(greedy, tiny, strict=True):
        assert one["index"] == other["index"]
        assert all(np.isfinite(other["logprobs"]["token_logprobs"]))
        # If two tokens are almost equally likely, a low temperature may pick either.
        best = (sorted(t.values())[-2:] for t in one["logprobs"]["top_logprobs"])
        if min(high - low for low, high in best) > 0.1:
            num_clear += 1
            assert other["token_ids"] == one["token_ids"]
    assert num_clear >= 4


@pytest.mark.parametrize("num_rows", [8, 1, 3, 5, 7])
def test_js_085_each_row_uses_its_own_parameters(server, reference, num_rows) -> None:
    sampled = {"temperature": 1.5, "top_k": 3}
    prompts = [[20 + i, 30, 40] for i in range(num_rows)]
    for parity in (0, 1):
        kinds = [{"temperature": 0} if i % 2 == parity else sampled for i in range(num_rows)]
        bodies = [body(6, p, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        completions = generate_together(server, bodies)
        for prompt, kind, tokens in zip(prompts, kinds, completions, strict=True):
            logits = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            ranks = [(row > row[token]).sum() for row, token in zip(logits, tokens, strict=True)]
            assert max(ranks) <= (2 if kind is sampled else 0)


@pytest.mark.parametrize("top_k", [None, -1, 0, VOCAB_SIZE])
def test_js_086_without_top_k_all_tokens_can_be_sampled(server, reference, top_k) -> None:
    probabilities = np.exp(reference.logprobs(PROMPT)[-1])
    more = {} if top_k is None else {"top_k": top_k}
    counts = Counter(
        tokens[0]
        for seed in (1, 1000)
        for tokens in generate_all(server, 1, n=100, temperature=1, seed=seed, **more)
    )
    assert counts.total() == 200
    assert len(counts) > 50
    # Ten groups of tokens, from likely to rare, each with about a tenth of the probability.
    order = np.argsort(-probabilities)
    group = np.empty(VOCAB_SIZE, int)
    group[order] = np.minimum(10 * np.cumsum(probabilities[order]), 9.999)
    expected = 200 * np.bincount(group, probabilities, minlength=10)
    found = np.bincount(group[list(counts)], list(counts.values()), minlength=10)
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 27.9  # 9 degrees of freedom: exceeded once in 1000 times


@BOTH_ENDPOINTS
def test_js_087_top_k_accepts_large_values_and_refuses_invalid_ones(server, path) -> None:
    sampled = {"temperature": 1.3, "seed": 8}
    expected = generate(server, 8, **sampled)
    for top_k in (0, -1, VOCAB_SIZE + 1, 10**6, 2**31 - 1, 2**31, 2**62):
        assert generate(server, 8, top_k=top_k, **sampled) == expected
    messages = [{"role": "user", "content": "a"}]
    for top_k in (-2, 1.5, "3", True, -(2**40)):
        request = {"prompt": "a", "messages": messages, "top_k": top_k, "temperature": 1}
        assert server.refused(path, request)["param"] == "top_k"


@pytest.fixture(scope="module")
def checkpoint_with_defaults(tmp_path_factory):
    """``checkpoint_with_defaults(config)`` writes `random_checkpoint` with a generation config."""

    def write(generation_config):
        config = tiny_config()
        return write_checkpoint(
            tmp_path_factory.mktemp("defaults") / "rand",
            config,
            random_tensors(config),
            tokenizer=full_backend(config["vocab_size"]),
            generation_config=generation_config,
        )

    return write


def test_js_087_top_k_0_in_a_checkpoint_means_no_limit(
    server, serve, checkpoint_with_defaults
) -> None:
    other = serve(checkpoint_with_defaults({"top_k": 0, "do_sample": True}), max_num_seqs=8)
    assert generate(other, 8, seed=3) == generate(server, 8, seed=3)


@pytest.mark.parametrize("num_others", [1, 7])
def test_js_090_a_seed_determines_the_tokens_in_any_batch(server, num_others) -> None:
    request = body(16, seed=42, temperature=0.8)
    alone = generate(server, 16, seed=42, temperature=0.8)
    assert alone == generate(server, 16, seed=42, temperature=0.8)
    assert alone != generate(server, 16, seed=43, temperature=0.8)
    others: list[dict[str, Any]] = [{}, {"seed": 5}, {"temperature": 0}, {"top_p": 0.9}]
    for row in {0, num_others // 2, num_others}:
        bodies = [
            body(20 + i, [i, 11, 12], **{"temperature": 0.8, **others[i % 4]})
            for i in range(num_others)
        ]
        bodies.insert(row, request)
        assert generate_together(server, bodies)[row] == alone


SAMPLING_DEFAULTS = {"temperature": 0.5, "top_p": 0.75}


@pytest.fixture(scope="module")
def fresh_starts(serve_process, checkpoint_with_defaults):
    """Tokens of 8 equal prompts in one request, and the log, of each of two fresh processes."""
    path, results = checkpoint_with_defaults(SAMPLING_DEFAULTS), []
    for _ in range(2):
        with serve_process(path) as client:
            tokens = generate_all(client, 8, [PROMPT] * 8, temperature=1, top_p=1)
            results.append((tokens, client.process._log.read_text()))
    return results


def test_js_091_without_a_seed_all_completions_differ(fresh_starts) -> None:
    tokens = [tuple(completion) for completions, _ in fresh_starts for completion in completions]
    assert len(tokens) == 16
    assert len(set(tokens)) == 16


def test_js_091_choices_of_one_request_differ_without_a_seed(server) -> None:
    assert len(set(map(tuple, generate_all(server, 8, n=8, temperature=1)))) == 8


def test_js_092_seeds_have_64_bits(server) -> None:
    seeds = [-1, -(2**63), 7, 2**31, 2**31 + 7, 2**32 - 1, 2**32 + 7, 2**63 - 1]
    found = {seed: tuple(generate(server, 6, seed=seed)) for seed in seeds}
    assert len(set(found.values())) == len(seeds)
    for seed in seeds:
        assert tuple(generate(server, 6, seed=seed)) == found[seed]
    # The second choice uses the next seed.
    for seed in (2**63 - 1, -1):
        pair = generate_all(server, 6, seed=seed, n=2)
        assert tuple(pair[0]) == found[seed]
        assert pair[1] != pair[0]
        assert pair == generate_all(server, 6, seed=seed, n=2)
    assert generate(server, 6, seed=None) != generate(server, 6, seed=None)


@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63) - 1, 1.5, "7", True, [7]])
@BOTH_ENDPOINTS
def test_js_092_seeds_that_are_not_64_bit_integers_are_refused(server, path, seed) -> None:
    messages = [{"role": "user", "content": "a"}]
    error = server.refused(path, {"prompt": "a", "messages": messages, "seed": seed})
    assert error["param"] == "seed"


def test_js_093_greedy_completions_do_not_depend_on_other_requests(server, reference) -> None:
    expected = reference.greedy(PROMPT, 10)
    assert generate(server, 10, temperature=0) == expected
    for i in range(5):
        rng = random.Random(i)
        prompts = [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(15)]
        prompts.insert(3 * i, PROMPT)
        assert generate_all(server, 10, prompts, temperature=0)[3 * i] == expected


def greedy_with_penalty(
    reference: Reference, prompt: list[int], count: int, penalty: float, *, mode: str
):
    """Returns greedy tokens with a repetition penalty; all modes but ``each`` are known bugs."""
    tokens = list(prompt)
    for _ in range(count):
        logits = reference.logits(tokens)[-1]
        seen = {"each": tokens, "answer": tokens[len(prompt) :], "off": []}[mode]
        for token in set(seen):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalty", [1.3, 0.8, 3.0])
def test_js_094_repetition_penalty_counts_each_seen_token_once(server, reference, penalty) -> None:
    x, y = reference.greedy(PROMPT, 2)
    changes = 0
    for prompt in ([x, x, x, x, y], PROMPT, [5, y, x, y, x, 5], reference.greedy(PROMPT, 12)):
        expected = greedy_with_penalty(reference, prompt, 12, penalty, mode="each")
        for mode in ("off", "answer"):
            changes += expected != greedy_with_penalty(reference, prompt, 12, penalty, mode=mode)
        request = body(12, prompt, temperature=0, repetition_penalty=penalty, logprobs=1)
        (choice,) = server.complete(**request)["choices"]
        assert choice["token_ids"] == expected
        # The log probabilities are those of the model, without the penalty.
        logprobs = reference.logprobs([*prompt, *expected])[len(prompt) - 1 : -1]
        found, num_tokens = choice["logprobs"]["token_logprobs"], len(prompt) + 12
        assert_close(found, logprobs[range(12), expected], num_tokens=num_tokens)
    assert changes > 2, "the penalty has to make a difference"


SCRIPT_LOGIT = 5.0
"""The logit of the next token of a script; other tokens have 0."""


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("penalty", [2.0, 0.75, -1.5])
@pytest.mark.parametrize("bias", [3.4, 6.1])
def test_js_095_penalties_count_the_tokens_of_the_completion_only(
    serve, scripted_checkpoint, field, penalty, bias
) -> None:
    sharpness = SCRIPT_LOGIT / VOCAB_SIZE**0.5
    server = serve(
        scripted_checkpoint(rep=["t"], back=["u", "t"], options={"sharpness": sharpness})
    )
    t, u = (server.tokenizer.encode(text)[0] for text in "tu")
    start = server.tokenizer.encode("<rep>")
    expected: list[int] = []
    for _ in range(10):
        logits = np.zeros(VOCAB_SIZE)
        logits[u] = bias
        if not expected or expected[-1] in (t, u):
            logits[t] = SCRIPT_LOGIT
        for token, times in Counter(expected).items():
            logits[token] -= penalty * (times if field == "frequency_penalty" else 1)
        expected.append(int(logits.argmax()))
    request = {"temperature": 0, field: penalty, "logit_bias": {str(u): bias}}
    for prompt in (start, [t] * 20 + start, [u, t] * 10 + start):
        assert generate(server, 10, prompt, **request) == expected


@pytest.mark.parametrize("key", ["AI", "999999", "-1", "512", "1.0", "", "0x1", str(2**70)])
@BOTH_ENDPOINTS
def test_js_098_a_bias_for_an_unknown_token_is_refused(server, path, key) -> None:
    request = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for bias in ({key: -100}, {"5": 1, key: 5}):
        error = server.refused(path, {**request, "logit_bias": bias})
        assert error["param"].partition(".")[0] == "logit_bias"


@pytest.mark.parametrize(
    "bias",
    ['{"5": NaN}', '{"5": null}', '{"5": "5"}', "[[5, 1]]", "[5]", '"5"', "5", '{"5": [1]}']
    + ['{"5": 1e999}', '{"5": true}', '{"5": {}}', "true"],
)
@BOTH_ENDPOINTS
def test_js_099_a_bias_that_is_not_a_number_is_refused(server, path, bias) -> None:
    request = '{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "logit_bias": %s}'
    server.refused(path, request % bias)


def test_js_099_null_and_large_biases_are_accepted(server, reference) -> None:
    plain = generate(server, 6, temperature=0)
    for bias in ({}, None, {"5": 0}):
        assert generate(server, 6, temperature=0, logit_bias=bias) == plain
    # Biases beyond +-100 count as +-100, so the larger of two has no advantage.
    first, second = reference.logits(PROMPT)[-1][[5, 6]]
    expected = 5 if first > second else 6
    for value in (100, 101, 1e308):
        bias = {"5": 100, "6": 100, str(11 - expected): value}
        assert generate(server, 1, temperature=0, logit_bias=bias) == [expected]
    all_but_5 = {str(i): -1e308 for i in range(VOCAB_SIZE) if i != 5}
    assert generate(server, 4, temperature=1, logit_bias=all_but_5) == [5] * 4


def test_js_099_a_bias_may_name_every_token(serve, tmp_path, server) -> None:
    error = server.refused(COMPLETIONS, body(1, logit_bias={str(i): 1 for i in range(50_000)}))
    assert error["param"] == "logit_bias"
    config = tiny_config(vocab_size=50_000)
    path = write_checkpoint(tmp_path / "wide", config, tokenizer=full_backend(VOCAB_SIZE))
    wide_server = serve(path)
    bias = {str(i): -50 for i in range(50_000)}
    plain = generate(wide_server, 3, temperature=0)
    assert generate(wide_server, 3, temperature=0, logit_bias=bias) == plain
    bias["49999"] = 0
    assert generate(wide_server, 3, temperature=0, logit_bias=bias) == [49_999] * 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_js_100_a_bias_works_for_any_token(server, temperature) -> None:
    for token in (0, 5, VOCAB_SIZE - 1):
        bias = {str(token): 100}
        assert generate(server, 12, temperature=temperature, logit_bias=bias) == [token] * 12
    first = generate(server, 12, temperature=0)[0]
    bias = {str(first): -100}
    assert first not in generate(server, 12, temperature=temperature, seed=1, logit_bias=bias)
    banned = {str(token): -100 for token in range(VOCAB_SIZE // 2)}
    tokens = generate(server, 12, temperature=temperature, seed=1, logit_bias=banned)
    assert min(tokens) >= VOCAB_SIZE // 2


def test_js_101_checkpoint_defaults_apply_to_unset_parameters(
    server, serve, checkpoint_with_defaults
) -> None:
    path = checkpoint_with_defaults({"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3})
    using_defaults, ignoring_defaults = (
        serve(path, max_num_seqs=8, generation_config=g) for g in ("auto", "none")
    )
    default = generate(using_defaults, 8)
    assert default == generate(server, 8, temperature=0, repetition_penalty=1.3)
    assert default != generate(server, 8, temperature=0)
    assert (
        generate(using_defaults, 8, temperature=None, top_k=None, repetition_penalty=None)
        == default
    )
    # A value in the request wins, even one that turns the parameter off.
    off = {"temperature": 1.5, "top_k": -1, "repetition_penalty": 1.0, "seed": 4}
    assert generate(using_defaults, 8, **off) == generate(server, 8, **off)
    assert generate(using_defaults, 8, **{**off, "temperature": 0}) == generate(
        server, 8, temperature=0
    )
    # With generation_config=none, the defaults are ignored.
    assert generate(ignoring_defaults, 8, seed=4) == generate(server, 8, seed=4)
    shown = using_defaults.http.get("/server_info").json()["sampling_defaults"]["sampling"]
    assert shown == {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3}


def test_js_101_the_log_shows_the_checkpoint_defaults(fresh_starts) -> None:
    for _, log in fresh_starts:
        (line,) = [line for line in log.splitlines() if "generation_config.json" in line]
        assert "temperature 0.5" in line
        assert "top_p 0.75" in line


@pytest.mark.parametrize(
    ("generation_config", "more"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": None, "top_k": None, "top_p": None, "no_such_key": {"a": [1]}}, {}),
        ({}, {}),
    ],
)
def test_js_102_unusual_checkpoint_defaults_are_accepted(
    server, serve, checkpoint_with_defaults, generation_config, more
) -> None:
    """``do_sample`` has no effect."""
    other = serve(checkpoint_with_defaults(generation_config), max_num_seqs=8)
    assert generate(other, 8, seed=6) == generate(server, 8, seed=6, **more)
    assert generate(other, 8, temperature=0) == generate(server, 8, temperature=0)


@BOTH_ENDPOINTS
def test_js_103_greedy_choices_are_equal(server, path) -> None:
    request = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}]}
    request |= {"temperature": 0, "max_tokens": 4, "skip_special_tokens": False}
    choices = server.post(path, {**request, "n": 3}).json()["choices"]
    assert sorted(choice.pop("index") for choice in choices) == [0, 1, 2]
    (single,) = server.post(path, request).json()["choices"]
    del single["index"]
    assert choices == [single] * 3
    streamed = server.stream(path, {**request, "n": 3})
    text = single["text"] if path == COMPLETIONS else single["message"]["content"]
    assert [streamed.text(i) for i in range(3)] == [text] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_js_104_best_of_must_equal_n(server, stream) -> None:
    for more in ({"n": 2, "best_of": 1}, {"best_of": 3}, {"n": 2, "best_of": 3}, {"best_of": 0}):
        error = server.refused(COMPLETIONS, body(4, stream=stream, **more))
        assert error["param"] == "best_of"
    plain = generate(server, 4, temperature=0)
    for more in ({"best_of": 1}, {"best_of": None}, {"n": 1, "best_of": 1}):
        assert generate(server, 4, temperature=0, **more) == plain
    assert generate_all(server, 4, temperature=0, n=2, best_of=2) == [plain] * 2

"""How tokens are chosen: what the parameters do, and what they must not do to other requests."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
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

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
VOCAB_SIZE = 512
PROMPT = [7, 300, 41, 41, 9]


@pytest.fixture(scope="module")
def server(serve, rand):
    return serve(rand, max_num_seqs=8)


@pytest.fixture(scope="module")
def reference(rand) -> Reference:
    return Reference(dict(open_checkpoint(str(rand)).tensors()))


def body(count: int, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    """A request for so many tokens, whichever they are."""
    return {
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def answers(server, count: int, prompt: Any = PROMPT, **more: Any) -> list[list[int]]:
    """The tokens of every answer, by index."""
    choices = server.complete(**body(count, prompt, **more))["choices"]
    return [c["token_ids"] for c in sorted(choices, key=lambda choice: choice["index"])]


def answer(server, count: int, prompt: Any = PROMPT, **more: Any) -> list[int]:
    (tokens,) = answers(server, count, prompt, **more)
    return tokens


class Together:
    """An engine that begins when so many requests are there, in the order in which they came."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine = engine
        self._count = count
        self._complete = asyncio.Event()
        self.num_here = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Submit) -> AsyncGenerator[RequestOutput, None]:
        self.num_here += 1
        if self.num_here == self._count:
            self._complete.set()
        await self._complete.wait()
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                yield output


def together(server, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """The answers to requests that run in the same steps, in this order of rows."""
    engine = server.text_engine.engine
    gate = server.text_engine.engine = Together(engine, len(bodies))
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            replies = []
            for request in bodies:
                replies.append(pool.submit(lambda r: server.complete(**r), request))
                server.until(lambda: gate.num_here == len(replies))
        return [reply.result()["choices"][0]["token_ids"] for reply in replies]
    finally:
        server.text_engine.engine = engine


@pytest.mark.parametrize("temperature", ["1e-3", "1e-4", "1e-5", "1e-6", "1e-12", "5e-324"])
def test_js_084_tiny_temperatures_are_greedy(serve, rand, temperature) -> None:
    server = serve(rand, dtype="bfloat16")
    prompts = [random.Random(i).choices(range(VOCAB_SIZE), k=5) for i in range(16)]
    greedy, tiny = (
        server.complete(**body(3, prompts, temperature=t, seed=1, logprobs=2))["choices"]
        for t in (0, float(temperature))
    )
    num_clear = 0
    for one, other in zip(greedy, tiny, strict=True):
        assert one["index"] == other["index"]
        assert all(np.isfinite(other["logprobs"]["token_logprobs"]))
        # Where two tokens are about as likely, a low temperature may still choose.
        best = (sorted(t.values())[-2:] for t in one["logprobs"]["top_logprobs"])
        if min(high - low for low, high in best) > 0.1:
            num_clear += 1
            assert other["token_ids"] == one["token_ids"]
    assert num_clear >= 4


@pytest.mark.parametrize("num_rows", [8, 1, 3, 5, 7])
def test_js_085_rows_keep_their_own_parameters(server, reference, num_rows) -> None:
    sampled = {"temperature": 1.5, "top_k": 3}
    prompts = [[20 + i, 30, 40] for i in range(num_rows)]
    for first in (0, 1):
        kinds = [{"temperature": 0} if i % 2 == first else sampled for i in range(num_rows)]
        bodies = [body(6, p, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        got = together(server, bodies)
        for prompt, kind, tokens in zip(prompts, kinds, got, strict=True):
            logits = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            ranks = [(row > row[token]).sum() for row, token in zip(logits, tokens, strict=True)]
            assert max(ranks) <= (2 if kind is sampled else 0)


@pytest.mark.parametrize("top_k", [None, -1, 0, VOCAB_SIZE])
def test_js_086_no_top_k_is_all_tokens(server, reference, top_k) -> None:
    probabilities = np.exp(reference.logprobs(PROMPT)[-1])
    more = {} if top_k is None else {"top_k": top_k}
    counts = Counter(
        tokens[0]
        for seed in (1, 1000)
        for tokens in answers(server, 1, n=100, temperature=1, seed=seed, **more)
    )
    assert counts.total() == 200
    assert len(counts) > 50
    # In ten groups of tokens, as likely together as each other, from the likely ones to the rare.
    order = np.argsort(-probabilities)
    group = np.empty(VOCAB_SIZE, int)
    group[order] = np.minimum(10 * np.cumsum(probabilities[order]), 9.999)
    expected = 200 * np.bincount(group, probabilities, minlength=10)
    found = np.bincount(group[list(counts)], list(counts.values()), minlength=10)
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 27.9  # 9 degrees of freedom: exceeded once in 1000 times


@BOTH
def test_js_087_top_k_of_odd_values(server, path) -> None:
    sampled = {"temperature": 1.3, "seed": 8}
    expected = answer(server, 8, **sampled)
    for top_k in (0, -1, VOCAB_SIZE + 1, 10**6, 2**31 - 1, 2**31, 2**62):
        assert answer(server, 8, top_k=top_k, **sampled) == expected
    messages = [{"role": "user", "content": "a"}]
    for top_k in (-2, 1.5, "3", True, -(2**40)):
        request = {"prompt": "a", "messages": messages, "top_k": top_k, "temperature": 1}
        assert server.refused(path, request)["param"] == "top_k"


@pytest.fixture(scope="module")
def with_defaults(tmp_path_factory):
    """Writes the checkpoint of `rand` with a generation_config.json."""

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


def test_js_087_a_checkpoint_with_top_k_0(server, serve, with_defaults) -> None:
    other = serve(with_defaults({"top_k": 0, "do_sample": True}), max_num_seqs=8)
    assert answer(other, 8, seed=3) == answer(server, 8, seed=3)


@pytest.mark.parametrize("num_others", [1, 7])
def test_js_090_a_seed_is_enough(server, num_others) -> None:
    request = body(16, seed=42, temperature=0.8)
    alone = answer(server, 16, seed=42, temperature=0.8)
    assert alone == answer(server, 16, seed=42, temperature=0.8)
    assert alone != answer(server, 16, seed=43, temperature=0.8)
    others: list[dict[str, Any]] = [{}, {"seed": 5}, {"temperature": 0}, {"top_p": 0.9}]
    for row in {0, num_others // 2, num_others}:
        bodies = [
            body(20 + i, [i, 11, 12], **{"temperature": 0.8, **others[i % 4]})
            for i in range(num_others)
        ]
        bodies.insert(row, request)
        assert together(server, bodies)[row] == alone


SMALL = {"temperature": 0.5, "top_p": 0.75}


@pytest.fixture(scope="module")
def starts(serve_process, with_defaults):
    """Twice: 8 equal answers at once of a process that has just been started, and its output."""
    path, found = with_defaults(SMALL), []
    for _ in range(2):
        with serve_process(path) as client:
            tokens = answers(client, 8, [PROMPT] * 8, temperature=1, top_p=1)
            found.append((tokens, client.process._log.read_text()))
    return found


def test_js_091_without_a_seed_all_answers_differ(starts) -> None:
    tokens = [tuple(answer) for answers, _ in starts for answer in answers]
    assert len(tokens) == 16
    assert len(set(tokens)) == 16


def test_js_091_nor_does_n_share_a_key(server) -> None:
    assert len(set(map(tuple, answers(server, 8, n=8, temperature=1)))) == 8


def test_js_092_seeds_have_64_bits(server) -> None:
    seeds = [-1, -(2**63), 7, 2**31, 2**31 + 7, 2**32 - 1, 2**32 + 7, 2**63 - 1]
    found = {seed: tuple(answer(server, 6, seed=seed)) for seed in seeds}
    assert len(set(found.values())) == len(seeds)
    for seed in seeds:
        assert tuple(answer(server, 6, seed=seed)) == found[seed]
    # The seed of the second answer is one more.
    for seed in (2**63 - 1, -1):
        two = answers(server, 6, seed=seed, n=2)
        assert tuple(two[0]) == found[seed]
        assert two[1] != two[0]
        assert two == answers(server, 6, seed=seed, n=2)
    assert answer(server, 6, seed=None) != answer(server, 6, seed=None)


@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63) - 1, 1.5, "7", True, [7]])
@BOTH
def test_js_092_other_seeds_are_refused(server, path, seed) -> None:
    messages = [{"role": "user", "content": "a"}]
    error = server.refused(path, {"prompt": "a", "messages": messages, "seed": seed})
    assert error["param"] == "seed"


def test_js_093_greedy_answers_do_not_depend_on_company(server, reference) -> None:
    expected = reference.greedy(PROMPT, 10)
    assert answer(server, 10, temperature=0) == expected
    for i in range(5):
        rng = random.Random(i)
        prompts = [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(15)]
        prompts.insert(3 * i, PROMPT)
        assert answers(server, 10, prompts, temperature=0)[3 * i] == expected


def repeated(reference: Reference, prompt: list[int], count: int, penalty: float, *, mode: str):
    """Greedy tokens with a repetition penalty, right (``each``) or wrong in a known way."""
    tokens = list(prompt)
    for _ in range(count):
        logits = reference.logits(tokens)[-1]
        seen = {"each": tokens, "answer": tokens[len(prompt) :], "off": []}[mode]
        for token in set(seen):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalty", [1.3, 0.8, 3.0])
def test_js_094_repetition_counts_each_token_of_prompt_and_answer_once(
    server, reference, penalty
) -> None:
    x, y = reference.greedy(PROMPT, 2)
    changes = 0
    for prompt in ([x, x, x, x, y], PROMPT, [5, y, x, y, x, 5], reference.greedy(PROMPT, 12)):
        expected = repeated(reference, prompt, 12, penalty, mode="each")
        for mode in ("off", "answer"):
            changes += expected != repeated(reference, prompt, 12, penalty, mode=mode)
        request = body(12, prompt, temperature=0, repetition_penalty=penalty, logprobs=1)
        (choice,) = server.complete(**request)["choices"]
        assert choice["token_ids"] == expected
        # The numbers are of the model, without the penalty.
        logprobs = reference.logprobs([*prompt, *expected])[len(prompt) - 1 : -1]
        found, num_tokens = choice["logprobs"]["token_logprobs"], len(prompt) + 12
        assert_close(found, logprobs[range(12), expected], num_tokens=num_tokens)
    assert changes > 2, "the penalty has to make a difference"


LOGIT = 5.0
"""Of the token that a script goes on with; others have 0."""


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("size", [2.0, 0.75, -1.5])
@pytest.mark.parametrize("bias", [3.4, 6.1])
def test_js_095_penalties_count_the_answer_alone(serve, script, field, size, bias) -> None:
    sharpness = LOGIT / VOCAB_SIZE**0.5
    server = serve(script(rep=["t"], back=["u", "t"], options={"sharpness": sharpness}))
    t, u = (server.tokenizer.encode(text)[0] for text in "tu")
    start = server.tokenizer.encode("<rep>")
    expected: list[int] = []
    for _ in range(10):
        logits = np.zeros(VOCAB_SIZE)
        logits[u] = bias
        if not expected or expected[-1] in (t, u):
            logits[t] = LOGIT
        for token, times in Counter(expected).items():
            logits[token] -= size * (times if field == "frequency_penalty" else 1)
        expected.append(int(logits.argmax()))
    request = {"temperature": 0, field: size, "logit_bias": {str(u): bias}}
    for prompt in (start, [t] * 20 + start, [u, t] * 10 + start):
        assert answer(server, 10, prompt, **request) == expected


@pytest.mark.parametrize("key", ["AI", "999999", "-1", "512", "1.0", "", "0x1", str(2**70)])
@BOTH
def test_js_098_a_bias_for_no_token_is_refused(server, path, key) -> None:
    request = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for bias in ({key: -100}, {"5": 1, key: 5}):
        error = server.refused(path, {**request, "logit_bias": bias})
        assert error["param"].partition(".")[0] == "logit_bias"


@pytest.mark.parametrize(
    "bias",
    ['{"5": NaN}', '{"5": null}', '{"5": "5"}', "[[5, 1]]", "[5]", '"5"', "5", '{"5": [1]}']
    + ['{"5": 1e999}', '{"5": true}', '{"5": {}}', "true"],
)
@BOTH
def test_js_099_a_bias_that_is_no_number_is_refused(server, path, bias) -> None:
    request = '{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "logit_bias": %s}'
    server.refused(path, request % bias)


def test_js_099_biases_that_are_none_or_great(server, reference) -> None:
    plain = answer(server, 6, temperature=0)
    for bias in ({}, None, {"5": 0}):
        assert answer(server, 6, temperature=0, logit_bias=bias) == plain
    # Beyond +-100 they act like +-100, so neither of two wins by its size.
    first, second = reference.logits(PROMPT)[-1][[5, 6]]
    expected = 5 if first > second else 6
    for value in (100, 101, 1e308):
        bias = {"5": 100, "6": 100, str(11 - expected): value}
        assert answer(server, 1, temperature=0, logit_bias=bias) == [expected]
    all_but_5 = {str(i): -1e308 for i in range(VOCAB_SIZE) if i != 5}
    assert answer(server, 4, temperature=1, logit_bias=all_but_5) == [5] * 4


def test_js_099_a_bias_of_many_tokens(serve, tmp_path, server) -> None:
    error = server.refused(COMPLETIONS, body(1, logit_bias={str(i): 1 for i in range(50_000)}))
    assert error["param"] == "logit_bias"
    config = tiny_config(vocab_size=50_000)
    path = write_checkpoint(tmp_path / "wide", config, tokenizer=full_backend(VOCAB_SIZE))
    wide = serve(path)
    bias = {str(i): -50 for i in range(50_000)}
    plain = answer(wide, 3, temperature=0)
    assert answer(wide, 3, temperature=0, logit_bias=bias) == plain
    bias["49999"] = 0
    assert answer(wide, 3, temperature=0, logit_bias=bias) == [49_999] * 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_js_100_a_bias_works_on_every_token(server, temperature) -> None:
    for token in (0, 5, VOCAB_SIZE - 1):
        bias = {str(token): 100}
        assert answer(server, 12, temperature=temperature, logit_bias=bias) == [token] * 12
    first = answer(server, 12, temperature=0)[0]
    bias = {str(first): -100}
    assert first not in answer(server, 12, temperature=temperature, seed=1, logit_bias=bias)
    banned = {str(token): -100 for token in range(VOCAB_SIZE // 2)}
    got = answer(server, 12, temperature=temperature, seed=1, logit_bias=banned)
    assert min(got) >= VOCAB_SIZE // 2


def test_js_101_defaults_of_a_checkpoint_count_where_a_request_is_silent(
    server, serve, with_defaults
) -> None:
    path = with_defaults({"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3})
    own, without = (serve(path, max_num_seqs=8, generation_config=g) for g in ("auto", "none"))
    default = answer(own, 8)
    assert default == answer(server, 8, temperature=0, repetition_penalty=1.3)
    assert default != answer(server, 8, temperature=0)
    assert answer(own, 8, temperature=None, top_k=None, repetition_penalty=None) == default
    # What a request says wins, the value that turns a parameter off too.
    off = {"temperature": 1.5, "top_k": -1, "repetition_penalty": 1.0, "seed": 4}
    assert answer(own, 8, **off) == answer(server, 8, **off)
    assert answer(own, 8, **{**off, "temperature": 0}) == answer(server, 8, temperature=0)
    # The switch.
    assert answer(without, 8, seed=4) == answer(server, 8, seed=4)
    shown = own.http.get("/server_info").json()["sampling_defaults"]["sampling"]
    assert shown == {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3}


def test_js_101_they_are_shown_at_the_start(starts) -> None:
    for _, log in starts:
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
def test_js_102_odd_defaults(server, serve, with_defaults, generation_config, more) -> None:
    """``do_sample`` is not looked at."""
    other = serve(with_defaults(generation_config), max_num_seqs=8)
    assert answer(other, 8, seed=6) == answer(server, 8, seed=6, **more)
    assert answer(other, 8, temperature=0) == answer(server, 8, temperature=0)


@BOTH
def test_js_103_several_greedy_answers(server, path) -> None:
    request = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}]}
    request |= {"temperature": 0, "max_tokens": 4, "skip_special_tokens": False}
    choices = server.post(path, {**request, "n": 3}).json()["choices"]
    assert sorted(choice.pop("index") for choice in choices) == [0, 1, 2]
    (one,) = server.post(path, request).json()["choices"]
    del one["index"]
    assert choices == [one] * 3
    streamed = server.stream(path, {**request, "n": 3})
    text = one["text"] if path == COMPLETIONS else one["message"]["content"]
    assert [streamed.text(i) for i in range(3)] == [text] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_js_104_best_of_is_n_or_refused(server, stream) -> None:
    for more in ({"n": 2, "best_of": 1}, {"best_of": 3}, {"n": 2, "best_of": 3}, {"best_of": 0}):
        error = server.refused(COMPLETIONS, body(4, stream=stream, **more))
        assert error["param"] == "best_of"
    plain = answer(server, 4, temperature=0)
    for more in ({"best_of": 1}, {"best_of": None}, {"n": 1, "best_of": 1}):
        assert answer(server, 4, temperature=0, **more) == plain
    assert answers(server, 4, temperature=0, n=2, best_of=2) == [plain] * 2

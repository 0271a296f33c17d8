"""Constraints in a running engine: the mask of a token depends on the token before it."""

import json
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.constraint import GrammarCompiler
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

VOCAB = 300
SIZES = {"max_model_len": 96, "block_size": 4}
VARIANTS = {
    "plain": {},
    "overlapped": {"depth": 2},
    "chunked and overlapped": {"max_num_batched_tokens": 9, "depth": 2},
    "preempted and overlapped": {"num_blocks": 26, "depth": 2},
    "two at a time": {"max_num_seqs": 2, "depth": 2},
}


def allowed_after(token: int) -> np.ndarray:
    """Returns the tokens that `Chain` allows after a token."""
    return (token * np.arange(3, 9) + np.arange(6)) % VOCAB


class Chain:
    """A constraint that allows any first token, and then `allowed_after` of the last token."""

    error = None

    def __init__(self):
        self.tokens = []

    def fill_mask(self, mask):
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[allowed_after(self.tokens[-1]) if self.tokens else np.arange(VOCAB)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<u4")

    def accept(self, token_id):
        self.tokens.append(token_id)


def resolved(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


def run(runner, submits, compile_grammar, *, depth=1, **sizes):
    """Returns the outputs of each request and the number of preemptions."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 257, **SIZES}
    scheduler = Scheduler(**{**defaults, **sizes})
    core = EngineCore(scheduler, runner, depth=depth, compile_grammar=compile_grammar)
    for submit in submits:
        core.add(submit)
    outputs = {submit.request_id: [] for submit in submits}
    while core.has_work:
        for output in core.step(0.0):
            outputs[output.request_id].append(output)
    return outputs, core.stats().total_preemptions


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def make_requests(num: int, **constrained) -> list[Submit]:
    """Returns requests of which every second is constrained, and two of every four are greedy."""
    rng = np.random.default_rng(5)
    submits = []
    for i in range(num):
        options = {"temperature": 1.0 if i % 4 >= 2 else 0.0, "seed": i, "max_tokens": 14}
        if i % 2:
            options.update(constrained)
        prompt = rng.integers(0, 250, 5 + 7 * i % 40).tolist()
        submits.append(Submit(str(i), prompt, SamplingParams(**options), eos_token_id=299))
    return submits


GRAMMAR = Grammar("regex", "x")


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_token_is_allowed_after_the_token_before(runner, tiny_model, variant):
    submits = make_requests(8, grammar=GRAMMAR)
    outputs, preemptions = run(runner, submits, lambda _: resolved(Chain()), **VARIANTS[variant])
    assert (preemptions > 0) == ("preempted" in variant)
    alone = [run(runner, [s], lambda _: resolved(Chain()))[0][s.request_id] for s in submits]
    for submit, outputs_alone in zip(submits, alone, strict=True):
        tokens = tokens_of(outputs[submit.request_id])
        assert tokens == tokens_of(outputs_alone)
        if submit.params.grammar is None or not submit.params.is_greedy:
            continue
        expected = list(submit.prompt_token_ids)
        for i in range(14):
            logits = tiny_model.last_logits(expected)
            mask = (
                np.isin(np.arange(VOCAB), allowed_after(expected[-1]))
                if i
                else np.ones(VOCAB, bool)
            )
            expected.append(int(np.where(mask, logits, -np.inf).argmax()))
        assert tokens == expected[len(submit.prompt_token_ids) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_constrained_requests_do_not_change_the_tokens_of_others(runner, variant):
    submits = make_requests(8, grammar=GRAMMAR)
    outputs, _ = run(runner, submits, lambda _: resolved(Chain()), **VARIANTS[variant])
    for submit in submits[::2]:
        alone, _ = run(runner, [submit], None)
        assert tokens_of(outputs[submit.request_id]) == tokens_of(alone[submit.request_id])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_random_model_writes_valid_json(runner, depth):
    """Bias, bad words, penalties and min_tokens all work against the grammar."""
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["é🔥", "x"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    (brace,), (quote,) = tokenizer.encode("{"), tokenizer.encode('"')
    params = {
        "grammar": Grammar("json_schema", json.dumps(schema)),
        "max_tokens": 90,
        "logit_bias": {tokenizer.encode(" ")[0]: 100.0, tokenizer.eos_token_id: 90.0, 299: 95.0},
        "bad_words_token_ids": ((brace,), (quote, quote)),
        "frequency_penalty": 0.5,
        "min_tokens": 60,
    }
    prompt = [1, 2]
    submits = [
        Submit(
            str(i), prompt, SamplingParams(seed=i, temperature=t, **params),
            eos_token_id=tokenizer.eos_token_id,
        )
        for i, t in enumerate((0.0, 1.0, 2.0, 1.0, 0.5))
    ]  # fmt: skip
    outputs, _ = run(runner, submits, compiler.start, depth=depth)
    for request_outputs in outputs.values():
        assert request_outputs[-1].finish_reason == FinishReason.STOP
        value = json.loads(tokenizer.decode(tokens_of(request_outputs)))
        assert list(value) == ["a", "b"]
        assert value["a"] in ("é🔥", "x")


def test_a_failing_constraint_ends_only_its_own_request(runner):
    class Broken(Chain):
        def accept(self, token_id):
            super().accept(token_id)
            if len(self.tokens) < 3:
                return None
            self.error = "broken"
            return FinishReason.ERROR

    submits = make_requests(4, grammar=GRAMMAR)
    broken = submits[1].request_id
    outputs, _ = run(
        runner,
        submits,
        lambda submit: resolved(Broken() if submit.request_id == broken else Chain()),
        depth=2,
    )
    reasons = {name: request_outputs[-1].finish_reason for name, request_outputs in outputs.items()}
    assert reasons.pop(broken) == FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH}
    last = outputs[broken][-1]
    assert (last.error, last.is_user_error) == ("broken", True)
    assert len(tokens_of(outputs[broken])) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_constraint_never_sees_a_token_of_logits_that_are_not_finite(
    runner, build_runner, tiny_model, depth
):
    submits = make_requests(4, grammar=Grammar("regex", "x"))
    chains = {submit.request_id: Chain() for submit in submits}
    expected, _ = run(runner, submits, lambda s: resolved(Chain()))
    unseen = {t for s in submits for t in (*s.prompt_token_ids, *tokens_of(expected[s.request_id]))}
    bad = min(set(range(VOCAB)) - unseen)
    prompt = [*submits[1].prompt_token_ids[:-1], bad]
    submits[1] = msgspec.structs.replace(submits[1], prompt_token_ids=prompt)
    embed = tiny_model.params["embed"].at[bad].set(np.nan)
    damaged = build_runner({**tiny_model.params, "embed": embed})
    found, _ = run(damaged, submits, lambda s: resolved(chains[s.request_id]), depth=depth)
    (failed,) = found.pop("1")
    assert (failed.token_ids, failed.finish_reason) == ([], FinishReason.ERROR)
    assert chains["1"].tokens == []
    for name, outputs in found.items():
        assert tokens_of(outputs) == tokens_of(expected[name])

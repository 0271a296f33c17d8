"""Constraints follow grammars with llguidance, whatever tokens the model prefers."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.core.plan import Constraint
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output import constraint as grammars
from jaxserve.structured_output.constraint import MAX_EXTRA_TIME_S, TOKEN_TIME_S, GrammarCompiler
from jaxserve.structured_output.grammar import check_grammar
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_output.worker import GrammarWorker
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
VOCAB = 330
"""Width of the logits; more than the number of tokens."""


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB)


@pytest.fixture
def make_constraint(compiler):
    """Returns ``make_constraint(grammar)``, whose constraints are in their initial state."""

    def start(grammar, *, eos=EOS, prior=(), **params) -> Constraint:
        params = SamplingParams(seed=0, grammar=grammar, **params)
        submit = Submit("a", [1, *prior], params, eos_token_id=eos, num_prior_tokens=len(prior))
        return compiler.start(submit).result()

    return start


def allowed(constraint: Constraint) -> list[int]:
    mask = np.full(-(-VOCAB // 32), 0xABCDEF01, np.uint32)
    constraint.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def follow(constraint: Constraint, choose, limit: int = 400):
    """Accepts the tokens that ``choose`` picks; returns the text and the finish reason or None."""
    tokens: list[int] = []
    for _ in range(limit):
        ids = allowed(constraint)
        assert ids
        assert max(ids) < TOKENIZER.vocab_size, "an ID is not a token"
        tokens.append(choose(ids))
        reason = constraint.accept(tokens[-1])
        if reason is not None:
            return TOKENIZER.decode(tokens), reason
    return TOKENIZER.decode(tokens), None


def at_random(seed: int):
    rng = np.random.default_rng(seed)
    return lambda ids: int(rng.choice(ids))


def preferring(*texts: bytes, seed: int = 0):
    """Returns a function that picks the first of these texts that is allowed, or any token."""
    ids_of = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    wanted, fallback = [ids_of[text] for text in texts], at_random(seed)
    return lambda ids: next((i for i in wanted if i in ids), None) or fallback(ids)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["é", "\U0001f525", 'a"b', "\u2028"]},
        "größe": {"type": "integer", "minimum": 0, "maximum": 250},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"const": "x\\y/z"}, "maxItems": 3},
    },
    "required": ["name", "größe", "ok", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_form_json_of_the_schema(make_constraint, seed):
    text, reason = follow(
        make_constraint(Grammar("json_schema", json.dumps(PERSON))), at_random(seed)
    )
    assert reason is FinishReason.STOP
    value = json.loads(text)
    assert list(value) == list(PERSON["properties"])
    assert value["name"] in PERSON["properties"]["name"]["enum"]
    assert 0 <= value["größe"] <= 250
    assert isinstance(value["ok"], bool)
    assert set(value["tags"]) <= {"x\\y/z"}


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (
            Grammar("choice", '["yes", "yellow", "né🔥", "a\\"\\n/"]'),
            {"yes", "yellow", "né🔥", 'a"\n/'},
        ),
        (Grammar("regex", "(a/b|[cd]{2})é?"), None),
        (Grammar("grammar", 'start: "x" B+\nB: "y" | "z"'), None),
        (Grammar("json_schema", '{"enum": ["é", "\\ud83d\\udd25", 1]}'), {'"é"', '"🔥"', "1"}),
    ],
)
def test_random_tokens_form_texts_of_every_kind_of_grammar(make_constraint, grammar, texts):
    patterns = {"regex": "(a/b|[cd]{2})é?", "grammar": "x[yz]+"}
    found = {follow(make_constraint(grammar), at_random(seed))[0] for seed in range(30)}
    assert len(found) > 1
    if texts is not None:
        assert found <= texts
    else:
        assert all(re.fullmatch(patterns[grammar.kind], text) for text in found)


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json_object"), Grammar("json_schema", json.dumps(PERSON))],
)
def test_whitespace_between_values_is_limited(make_constraint, grammar):
    for spaces in ((b" ", b"\n"), (b"\n", b" "), (b"\t", b"\n", b"\t"), (b"\n", b"\t")):
        choose = preferring(*spaces, b'"', b":", b"0", b"]")
        text, reason = follow(make_constraint(grammar), choose, limit=300)
        assert reason is FinishReason.STOP
        json.loads(text)


def test_whitespace_in_strings_is_limited(make_constraint):
    constraint = make_constraint(Grammar("json_object"))
    text, _ = follow(constraint, preferring(b"{"), limit=1)
    assert text == "{"
    text, _ = follow(constraint, preferring(b'"'), limit=1)
    spaces, _ = follow(constraint, preferring(b" "), limit=100)
    assert "  " in spaces
    assert max(map(len, re.findall(" +", spaces))) <= 33


def test_the_end_token_is_allowed_only_where_the_text_may_end(make_constraint):
    prefer_the_end = preferring(TOKENIZER.token_bytes(EOS))
    text, reason = follow(
        make_constraint(Grammar("json_schema", json.dumps(PERSON))), prefer_the_end
    )
    assert reason is FinishReason.STOP
    json.loads(text)
    assert follow(make_constraint(Grammar("regex", "a{3,9}")), prefer_the_end) == (
        "aaa",
        FinishReason.STOP,
    )


def test_a_text_that_cannot_continue_ends_at_once(make_constraint):
    """No end token is needed, so min_tokens and ignore_eos cannot delay the end."""
    hello = TOKENIZER.encode("hello")
    for options in ({}, {"eos": None}, {"min_tokens": 9}):
        constraint = make_constraint(Grammar("choice", '["hello"]'), **options)
        reasons = [constraint.accept(token) for token in hello]
        assert reasons == [*[None] * (len(hello) - 1), FinishReason.STOP]


def test_without_an_end_token_a_text_continues_as_long_as_it_can(make_constraint):
    text, reason = follow(make_constraint(Grammar("regex", "a{3,9}"), eos=None), at_random(0))
    assert (text, reason) == ("a" * 9, FinishReason.STOP)


def test_further_end_tokens_are_allowed_where_the_text_may_end(make_constraint):
    other = next(i for i in TOKENIZER.special_ids if i != EOS)
    constraint = make_constraint(Grammar("regex", "a{2,9}"), stop_token_ids=(other, 5))
    (a,) = TOKENIZER.encode("a")
    constraint.accept(a)
    assert other not in allowed(constraint)
    constraint.accept(a)
    ids = allowed(constraint)
    assert {other, EOS, a} <= set(ids)
    assert 5 not in ids, "the grammar decides about a stop ID that has text"
    assert constraint.accept(other) is FinishReason.STOP


def test_an_empty_text_can_only_end(make_constraint):
    assert allowed(make_constraint(Grammar("regex", ""))) == [EOS]
    assert make_constraint(Grammar("regex", "")).accept(EOS) is FinishReason.STOP


def test_a_token_that_is_not_allowed_ends_only_its_request(make_constraint):
    one, other = make_constraint(Grammar("regex", "a+")), make_constraint(Grammar("regex", "a+"))
    (a,) = TOKENIZER.encode("a")
    (b,) = TOKENIZER.encode("b")
    assert one.error is None
    assert one.accept(b) is FinishReason.ERROR
    assert one.error.startswith("the completion can no longer follow its grammar: token ")
    assert len(allowed(one)) == -(-VOCAB // 32) * 32, "every token, since the result is dropped"
    assert one.accept(a) is FinishReason.ERROR
    assert a in allowed(other)
    assert other.error is None
    assert other.accept(a) is None


def test_a_grammar_that_matches_no_text_ends_with_an_error(make_constraint):
    constraint = make_constraint(Grammar("regex", r"[^\s\S]"))
    assert len(allowed(constraint)) == -(-VOCAB // 32) * 32
    assert constraint.accept(0) is FinishReason.ERROR


def test_a_constraint_continues_after_the_tokens_of_a_dead_engine(make_constraint):
    prior = TOKENIZER.encode('{"hello')
    constraint = make_constraint(Grammar("json_object"), prior=prior)
    assert TOKENIZER.encode("{")[0] in allowed(constraint), "within the string"
    for text in ('"', ":", "1"):
        assert constraint.accept(TOKENIZER.encode(text)[0]) is None
    assert constraint.accept(TOKENIZER.encode("}")[0]) is FinishReason.STOP


def test_a_grammar_that_does_not_compile_is_an_invalid_request(make_constraint):
    with pytest.raises(InvalidRequestError, match="unclosed"):
        make_constraint(Grammar("regex", "(a"))


AMBIGUOUS_PATTERN = "(a|aa)*" * 300 + "$"


def with_patterns(num_fields):
    fields = {f"p{i}": f"^{f'(a|a{i}|aa)*' * 300}$" for i in range(num_fields)}
    properties = {name: {"type": "string", "pattern": pattern} for name, pattern in fields.items()}
    return Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))


@pytest.fixture(scope="module")
def checked_and_compiled(smollm2):
    """Returns a function that tries to check and compile a grammar with a real vocabulary."""
    tokenizer = open_checkpoint(str(smollm2)).tokenizer()
    worker = GrammarWorker(tokenizer, tokenizer.vocab_size)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def succeeds(work):
        try:
            work()
        except InvalidRequestError:
            return False
        return True

    def check_and_compile(grammar):
        submit = Submit("a", [1], SamplingParams(seed=0, grammar=grammar))
        compiled = succeeds(lambda: compiler.start(submit).result())
        return succeeds(lambda: worker.check(grammar)), compiled

    return check_and_compile


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("regex", AMBIGUOUS_PATTERN), False),
        (Grammar("regex", AMBIGUOUS_PATTERN[: 7 * 100]), True),
        (Grammar("regex", "(aa){1,300}|(aaa){1,300}|(a{5}){1,300}|(a{7}){1,300}"), True),
        (Grammar("regex", r"((a{0,100}){0,100}){0,100}"), True),
        (with_patterns(20), False),
        (with_patterns(3), True),
        (Grammar("grammar", f"start: /{AMBIGUOUS_PATTERN[:-1]}/"), False),
        (Grammar("choice", json.dumps(["a" * i for i in range(1, 600)])), True),
        (Grammar("choice", json.dumps([str(i) * 60 for i in range(1000)])), True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_compiles_exactly_if_its_check_passes(checked_and_compiled, grammar, expected):
    """The work for a grammar grows with the vocabulary, so both must use the same one."""
    assert checked_and_compiled(grammar) == (expected, expected)


def test_the_check_refuses_a_grammar_that_compiles_and_then_fails(checked_and_compiled):
    schema = json.dumps({"type": "string", "pattern": AMBIGUOUS_PATTERN})
    assert checked_and_compiled(Grammar("json_schema", schema)) == (False, True)


def test_the_tokens_are_read_once_and_only_when_needed(monkeypatch):
    calls = []

    def vocabulary(*args):
        calls.append(args)
        return Vocabulary(*args)

    monkeypatch.setattr(grammars, "Vocabulary", vocabulary)
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    assert not calls
    params = SamplingParams(seed=0, grammar=Grammar("regex", "a+"))
    futures = [compiler.start(Submit(str(i), [1], params)) for i in range(20)]
    constraints = [future.result() for future in futures]
    assert calls == [(TOKENIZER, VOCAB)]
    assert len({id(c) for c in constraints}) == 20
    # Each constraint has its own state, although the grammar was compiled once.
    (a,) = TOKENIZER.encode("a")
    constraints[0].accept(a)
    assert EOS not in allowed(constraints[1])


def ambiguous(num_words):
    """Returns a grammar that can split each text into words in very many ways."""
    words = range(num_words)
    rules = [f"a{i}: W{i} start?\nW{i}: /[a-z ]{{1,{i + 1}}}/" for i in words]
    return Grammar("grammar", "\n".join([f"start: {' | '.join(f'a{i}' for i in words)}", *rules]))


def test_the_work_for_one_token_is_limited(make_constraint, monkeypatch):
    """The work grows with the cube of the number of words; 800 words would take minutes."""
    monkeypatch.setattr(grammars, "MAX_EXTRA_TIME_S", math.inf)
    for num_words, is_too_much in ((20, False), (600, True)):
        constraint = make_constraint(ambiguous(num_words))
        reasons = [constraint.accept(token) for token in TOKENIZER.encode("a") * 3]
        assert (FinishReason.ERROR in reasons) == is_too_much


def test_many_slow_tokens_end_a_request(make_constraint, monkeypatch):
    """One slow token is allowed, many are not."""
    clock = itertools.count(step=TOKEN_TIME_S + MAX_EXTRA_TIME_S / 10)
    constraint = make_constraint(Grammar("regex", "a+"))
    monkeypatch.setattr(grammars.time, "thread_time", clock.__next__)
    (a,) = TOKENIZER.encode("a")
    reasons = [constraint.accept(a) for _ in range(12)]
    assert reasons[:9] == [None] * 9
    assert reasons[11] is FinishReason.ERROR
    assert len(allowed(constraint)) == -(-VOCAB // 32) * 32


def test_a_dead_end_names_the_reason(make_constraint, monkeypatch):
    """After the comma no name is left. Without the rewriting of schemas, llguidance allows it."""
    monkeypatch.setattr("jaxserve.structured_output.grammar.prepared", lambda schema: schema)
    pattern = {"patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **pattern}
    constraint = make_constraint(Grammar("json_schema", json.dumps(schema)))
    for token in TOKENIZER.encode('{"a":1, '):
        assert constraint.accept(token) is None
    assert constraint.error is None
    assert len(allowed(constraint)) == -(-VOCAB // 32) * 32
    assert constraint.error.endswith("nothing can follow part of a text")
    assert constraint.accept(0) is FinishReason.ERROR


def test_the_check_finds_a_dead_end(monkeypatch):
    monkeypatch.setattr("jaxserve.structured_output.grammar.prepared", lambda schema: schema)
    pattern = {"patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = Grammar("json_schema", json.dumps({**schema, **pattern}))
    with pytest.raises(InvalidRequestError, match="nothing can follow part of a text"):
        check_grammar(grammar, Vocabulary(TOKENIZER, VOCAB))

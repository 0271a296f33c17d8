"""Declared stages: the rows that they change, the arrays that they get, random numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.sampling import top_n_sigma
from jaxserve.sampling.declaration import (
    ALL_TOKENS,
    LARGEST_LOGIT,
    NO_TOKEN,
    Parameter,
    Stage,
    apply_stage,
    check_function,
)
from jaxserve.sampling.draw import row_keys
from jaxserve.sampling_params import SamplingParams

V = 300
NO_TOKENS = jnp.zeros(8, jnp.int32)


@pytest.fixture
def logits() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(4, V)) * 3).astype(np.float32)


def rows_of(stage: Stage, num_rows: int, *, num_tokens: int = 0, **fields):
    """Rows that all use the stage, with these fields and arrays."""
    rows = stage.empty_rows(num_rows, num_tokens)
    arrays = {**rows.arrays, **{k: fields.pop(k) for k in list(fields) if k in rows.arrays}}
    on = np.ones(num_rows, np.int32)
    rows = dataclasses.replace(rows, **{"is_on": on, "arrays": arrays, **fields})
    return jax.tree.map(jnp.asarray, rows)


def test_a_stage_changes_only_rows_that_use_it(logits):
    stage = Stage(name="plus", apply=lambda logits, rows: logits + 1)
    rows = rows_of(stage, 4, is_on=np.array([1, 0, 0, 1], np.int32))
    changed = np.asarray(apply_stage(stage, jnp.asarray(logits), NO_TOKENS, rows))
    np.testing.assert_array_equal(changed[[1, 2]], logits[[1, 2]])
    np.testing.assert_array_equal(changed[[0, 3]], logits[[0, 3]] + 1)


def test_a_removed_token_stays_removed_and_one_token_is_always_left(logits):
    logits[0, :10] = -np.inf
    force = Stage(name="force", apply=lambda logits, rows: jnp.zeros_like(logits))
    changed = np.asarray(apply_stage(force, jnp.asarray(logits), NO_TOKENS, rows_of(force, 4)))
    np.testing.assert_array_equal(changed == -np.inf, logits == -np.inf)
    one_nan = np.where(np.arange(logits.shape[1]) == 200, np.nan, 0).astype(np.float32)
    for value in (-np.inf, np.nan, one_nan):
        bad = Stage(name="bad", apply=lambda logits, rows, value=value: logits * 0 + value)
        changed = apply_stage(bad, jnp.asarray(logits), NO_TOKENS, rows_of(bad, 4))
        np.testing.assert_array_equal(changed, logits)


def test_infinite_logits_stay_finite(logits):
    stage = Stage(name="up", apply=lambda logits, rows: logits.at[:, 7].set(jnp.inf))
    changed = np.asarray(apply_stage(stage, jnp.asarray(logits), NO_TOKENS, rows_of(stage, 4)))
    assert (changed[:, 7] == np.float32(LARGEST_LOGIT)).all()


@pytest.mark.parametrize(
    ("apply", "got"),
    [
        (lambda logits, rows: logits[:1], r"float32\[1, 300\]"),
        (lambda logits, rows: logits[:, :1], r"float32\[4, 1\]"),
        (lambda logits, rows: logits.astype(jnp.bfloat16), r"bfloat16\[4, 300\]"),
        (lambda logits, rows: None, "NoneType"),
    ],
)
def test_a_function_must_return_logits(logits, apply, got):
    """Not only arrays that can be broadcast to the logits."""
    stage = Stage(name="s", apply=apply)
    message = rf"the stage s must return logits float32\[4, 300\], got {got}"
    with pytest.raises(ConfigError, match=message):
        apply_stage(stage, jnp.asarray(logits), NO_TOKENS, rows_of(stage, 4))


def test_a_function_is_traced_for_all_shapes():
    seen = []

    def apply(logits, rows):
        seen.append((*logits.shape, rows.tokens.shape[1]))
        if logits.shape[0] == 16:
            raise RuntimeError("sixteen")
        return logits

    stage = Stage(name="s", apply=apply, num_tokens=ALL_TOKENS)
    check_function(stage, V, [(1, 0), (4, 256)])
    assert seen == [(1, V, 0), (4, V, 256)]
    message = r"the stage s failed on logits float32\[16, 300\] with 9 tokens .*RuntimeError: six"
    with pytest.raises(ConfigError, match=message):
        check_function(stage, V, [(4, 9), (16, 9)])


def test_tokens_end_with_the_token_that_only_the_device_knows(logits):
    seen = []
    stage = Stage(name="see", apply=lambda logits, rows: seen.append(rows.tokens) or logits)
    tokens = np.full((4, 3), NO_TOKEN, np.int32)
    tokens[0] = [1, 2, 3]
    tokens[1, :2] = [4, 5]
    rows = rows_of(stage, 4, tokens=tokens, pending_row=np.array([-1, 6, -1, 2], np.int32))
    last_tokens = jnp.array([0, 0, 9, 0, 0, 0, 8, 0], jnp.int32)
    apply_stage(stage, jnp.asarray(logits), last_tokens, rows)
    expected = [[1, 2, 3], [4, 5, 8], [NO_TOKEN] * 3, [NO_TOKEN, NO_TOKEN, 9]]
    np.testing.assert_array_equal(seen[0], expected)


def test_keys_depend_on_seed_position_and_stage_only():
    one, other = (Stage(name=name, apply=lambda logits, rows: logits) for name in "ab")
    seeds = np.array([[1, 0], [1, 0], [2, 0], [1, 0]], np.uint32)
    positions = np.array([5, 6, 5, 5], np.int32)
    rows = rows_of(one, 4, seeds=seeds, positions=positions)
    data = jax.random.key_data(rows.keys())
    assert (data[0] == data[3]).all()
    assert (data[0] != data[1]).any()
    assert (data[0] != data[2]).any()
    mine = rows_of(other, 4, seeds=seeds, positions=positions).keys()
    draws = row_keys(jnp.asarray(seeds), jnp.asarray(positions))
    for keys in (mine, draws):
        assert (jax.random.key_data(keys)[0] != data[0]).any()


NUMBER, LIST = Parameter("number", "float", 0.5), Parameter("ids", "token", [], most=4)


def params(temperature: float = 0.0, **extra_args) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=0, extra_args=extra_args or None)


def test_a_request_uses_a_stage_if_a_value_differs_from_its_default():
    stage = Stage(name="s", apply=lambda logits, rows: logits, parameters=(NUMBER, LIST))
    assert not stage.is_used_by(params())
    assert not stage.is_used_by(params(number=0.5, ids=[], other=1))
    assert stage.is_used_by(params(number=0.6))
    assert stage.is_used_by(params(ids=[1]))
    always = dataclasses.replace(stage, is_on=lambda values: values["number"] > 0)
    assert always.is_used_by(params())
    assert not always.is_used_by(params(number=0.0))
    assert Stage(name="s", apply=lambda logits, rows: logits).is_used_by(params())


def test_greedy_requests_use_no_filter():
    stage = Stage(name="s", apply=lambda logits, rows: logits, parameters=(NUMBER,), is_filter=True)
    assert stage.is_used_by(params(1.0, number=1.0))
    assert not stage.is_used_by(params(0.0, number=1.0))


def test_numbers_have_arrays_by_default_and_other_values_by_function():
    several = (NUMBER, LIST, Parameter("on", "bool", True), Parameter("how", "str", "x"))
    stage = Stage(name="s", apply=lambda logits, rows: logits, parameters=several)
    entries = stage.entries(stage.values(params(number=2.0, ids=[3])))
    assert {name: (e.dtype, e.tolist()) for name, e in entries.items()} == {
        "number": (np.float32, 2.0),
        "on": (np.int32, 1),
    }

    def counted(values):
        counts = np.zeros(5)
        counts[values["ids"]] = 1
        return {"counts": counts}

    listed = dataclasses.replace(stage, arrays=counted)
    assert listed.entries(listed.values(params(ids=[3])))["counts"].tolist() == [0, 0, 0, 1, 0]
    rows = listed.empty_rows(2, 0)
    assert rows.arrays["counts"].shape == (2, 5)
    assert rows.arrays["counts"].dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": ALL_TOKENS - 1}, "at least 0, or -1 for all tokens, got -2"),
        ({"num_tokens": -10}, "of the stage s must be an integer of at least 0, .* got -10"),
        ({"num_tokens": "3"}, "an integer of at least 0, .* got '3'"),
        ({"num_tokens": 2.5}, "an integer of at least 0, .* got 2.5"),
        ({"num_tokens": True}, "an integer of at least 0, .* got True"),
        ({"name": ""}, "a stage must have a string as name, not empty, got ''"),
        ({"name": 3}, "a stage must have a string as name, not empty, got 3"),
        ({"parameters": NUMBER}, r"of the stage s must be a tuple of .*, got Parameter\(name="),
        ({"parameters": [NUMBER]}, r"must be a tuple of Parameter objects, got \[Parameter"),
        ({"parameters": ("number",)}, r"must be a tuple of Parameter objects, got \('number',\)"),
        (
            {"parameters": (NUMBER, LIST, Parameter("number", "int", 0))},
            "the stage s declares the parameter 'number' 2 times",
        ),
    ],
)
def test_refuses_declarations_that_are_no_stage(fields, message):
    # Under pytest, `Stage(...)` checks the types of its arguments first.
    stage = object.__new__(Stage)
    for name, value in {"name": "s", "apply": lambda logits, rows: logits, **fields}.items():
        object.__setattr__(stage, name, value)
    with pytest.raises(ConfigError, match=message):
        stage.__post_init__()


def test_the_arrays_of_the_default_parameters_are_computed_once():
    seen = []

    def arrays(values):
        seen.append(values)
        return {"number": values["number"]}

    stage = Stage(name="s", apply=lambda x, rows: x, parameters=(NUMBER,), arrays=arrays)
    for num_rows in (2, 3):
        assert stage.empty_rows(num_rows, 0).arrays["number"].tolist() == [0.5] * num_rows
    assert seen == [{"number": 0.5}]


def test_top_n_sigma_keeps_tokens_near_the_largest_logit(logits):
    logits[1, 5:200] = -np.inf
    sigmas = np.array([0.5, 1.0, 2.5, 1e6], np.float32)
    rows = rows_of(top_n_sigma.stage, 4, top_n_sigma=sigmas)
    changed = np.asarray(apply_stage(top_n_sigma.stage, jnp.asarray(logits), NO_TOKENS, rows))
    for i, sigma in enumerate(sigmas):
        values = logits[i].astype(np.float64)
        least = values.max() - sigma * values[np.isfinite(values)].std()
        np.testing.assert_array_equal(
            changed[i], np.where(values >= least, logits[i], -np.inf).astype(np.float32)
        )

"""The accuracy of 8-bit KV caches, with the default model."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_tokenizer

TEXT = """A server keeps the keys and values of every token that it has read, so that no token is
computed twice. This memory limits how many requests can run at the same time: with half the bytes
for each token, twice as many fit. The question is how much the answers change."""


@pytest.fixture
def accuracy():
    return importlib.import_module("kv_cache_accuracy")


def test_8_bit_caches_hardly_change_the_distributions(smollm2, accuracy):
    tokens = open_tokenizer(str(smollm2)).encode(TEXT)
    found = accuracy.measure(str(smollm2), tokens, cache_dtypes=("int8", "float8_e4m3fn"))
    assert found["plain"].mean_kl == 0
    # A few times the figures of docs/performance.md, which are means over many more tokens.
    assert 0 < found["int8"].mean_kl < 0.003
    assert 0 < found["float8_e4m3fn"].mean_kl < 0.03
    assert found["int8"].agreement > 0.85
    assert found["float8_e4m3fn"].agreement > 0.8


def test_drift_is_the_divergence_from_the_plain_distribution(accuracy):
    plain = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]) + 3
    other = np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    found = accuracy.drift(other, plain, [0, 1])
    assert found.largest_kl == pytest.approx(0.25 * math.log(2))
    assert found.mean_kl == pytest.approx(0.125 * math.log(2))
    assert found.agreement == 0.5
    assert found.loss == pytest.approx(-math.log(0.5))

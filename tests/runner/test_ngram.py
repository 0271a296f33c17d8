"""N-gram drafts equal a plain Python reference."""

import jax
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.runner import ngram, proposer
from jaxserve.runner.ngram import propose
from jaxserve.testing import ngram_reference

LENGTH = 40
on_device = jax.jit(propose, static_argnames="num_drafts")


def run(sequences, num_drafts):
    """Returns the drafts of each sequence; garbage follows the sequences in the array."""
    tokens = np.random.default_rng(0).integers(0, 3, (len(sequences), LENGTH)).astype(np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    num_tokens = np.array([len(sequence) for sequence in sequences], np.int32)
    drafts, counts = on_device(tokens, num_tokens, num_drafts=num_drafts)
    assert drafts.shape == (len(sequences), num_drafts)
    return [row[:count].tolist() for row, count in zip(np.asarray(drafts), counts, strict=True)]


def test_the_reference_has_the_same_limits():
    limits = (ngram_reference.LONGEST_MATCH, ngram_reference.SHORTEST_MATCH)
    assert limits == (ngram.LONGEST_MATCH, ngram.SHORTEST_MATCH)


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_random_sequences_equal_the_reference(vocab, num_drafts):
    rng = np.random.default_rng()
    sequences = [rng.integers(0, vocab, rng.integers(0, LENGTH + 1)).tolist() for _ in range(64)]
    expected = [ngram_reference.propose(sequence, num_drafts) for sequence in sequences]
    assert run(sequences, num_drafts) == expected
    if vocab == 2:
        assert any(expected)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),  # what followed the last two tokens
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest place, and what follows repeats
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # a longer match before a later one
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4, 2], []),  # one equal token is chance
        ([1, 1], []),
        ([1], []),
        ([], []),
    ],
)
def test_drafts_follow_the_best_earlier_match(tokens, drafts):
    assert run([tokens], 4) == [drafts]
    assert ngram_reference.propose(tokens, 4) == drafts


def test_an_unknown_proposer_is_refused():
    assert proposer.load("ngram") is propose
    with pytest.raises(ConfigError, match="--speculative must be one of ngram, got 'eagle'"):
        proposer.load("eagle")

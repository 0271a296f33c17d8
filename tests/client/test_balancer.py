"""The load of engines, and the choice of the engine for a request."""

import random
from collections import Counter

import pytest

from jaxserve.client.balancer import Balancer, Load


def test_a_waiting_request_weighs_more_than_a_running_one():
    a = Load(num_waiting=2, num_running=10)
    b = Load(num_waiting=0, num_running=14)
    assert (a.score, b.score) == (18, 14)
    assert Balancer().pick({0: a, 1: b}) == 1


def test_requests_just_sent_count_as_waiting():
    assert Load(1, 3, num_sent=2).score == Load(3, 3).score
    assert Balancer().pick({0: Load(0, 0, num_sent=1), 1: Load(0, 3)}) == 1
    assert Balancer().pick({0: Load(0, 0, num_sent=1), 1: Load(0, 5)}) == 0


def test_engines_with_equal_scores_take_turns():
    balancer = Balancer()
    loads = {engine: Load(0, 2) for engine in (0, 1, 2)}
    assert [balancer.pick(loads) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_fronts_begin_with_different_engines():
    loads = {engine: Load(0, 2) for engine in (0, 1, 2)}
    turns = {first: Balancer(first=first) for first in (0, 1, 2)}
    picks = {first: [turn.pick(loads) for _ in range(3)] for first, turn in turns.items()}
    assert picks == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}


def test_engines_with_equal_scores_take_turns_after_one_is_gone():
    balancer = Balancer()
    loads = {engine: Load(0, 0) for engine in (0, 1, 2)}
    assert balancer.pick(loads) == 0
    del loads[1]
    assert [balancer.pick(loads) for _ in range(4)] == [2, 0, 2, 0]


def test_a_burst_is_spread_evenly():
    balancer, sent = Balancer(), Counter()
    for _ in range(64):
        sent[balancer.pick({e: Load(0, 0, num_sent=sent[e]) for e in range(4)})] += 1
    assert sent == {0: 16, 1: 16, 2: 16, 3: 16}


@pytest.mark.parametrize("seed", range(20))
def test_the_pick_has_the_smallest_score(seed):
    rng = random.Random(seed)
    balancer = Balancer()
    for _ in range(50):
        counts = {e: [rng.randrange(4) for _ in range(3)] for e in range(rng.randint(1, 5))}
        picked = balancer.pick({e: Load(w, r, num_sent=s) for e, (w, r, s) in counts.items()})
        scores = {e: 4 * w + 4 * s + r for e, (w, r, s) in counts.items()}
        assert scores[picked] == min(scores.values())

"""Scheduling policies: the order of requests."""

import itertools

from jaxserve.core.policy import POLICIES
from jaxserve.core.request import Request
from jaxserve.ipc.messages import Submit
from jaxserve.sampling_params import SamplingParams


def make_request(order, *, priority, arrival_s):
    submit = Submit(str(order), [1], SamplingParams(seed=0), priority=priority, arrival_s=arrival_s)
    return Request.from_submit(submit, order=order, context_length=10)


def test_fcfs_sorts_by_arrival_and_ignores_priority():
    requests = [make_request(i, priority=-i, arrival_s=float(-i)) for i in range(5)]
    for shuffled in itertools.permutations(requests):
        assert sorted(shuffled, key=POLICIES["fcfs"]) == requests


def test_priority_sorts_by_priority_then_arrival_time_then_order():
    requests = [
        make_request(4, priority=-1, arrival_s=9.0),
        make_request(1, priority=0, arrival_s=1.0),
        make_request(2, priority=0, arrival_s=1.0),
        make_request(0, priority=0, arrival_s=2.0),
        make_request(3, priority=5, arrival_s=0.0),
    ]
    for shuffled in itertools.permutations(requests):
        assert sorted(shuffled, key=POLICIES["priority"]) == requests

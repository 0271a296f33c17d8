"""The size of JSON values, and their text."""

import json
from typing import Any

import msgspec
import pytest

from jaxserve.text import json_size
from jaxserve.text.json_size import dumps, size_of


class Body(msgspec.Struct):
    a: Any = None
    b: Any = None


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, 1),
        ("abc", 4),
        ([1, 2, 3], 4),
        ({"key": "abc"}, 9),
        ([[], [], {}], 4),
        (Body(), 1),
        (Body(a="abc"), 5),
        (Body(a=[1, Body(b=2)]), 5),
    ],
)
def test_a_size_counts_values_and_characters(value, size) -> None:
    assert size_of(value, 1000) == size


@pytest.mark.parametrize(
    "value", ["x" * 10**6, [1] * 10**6, [[]] * 10**6, {str(i): 1 for i in range(10**5)}]
)
def test_a_size_beyond_the_limit_stays_beyond_it(value) -> None:
    assert size_of(value, 1000) > 1000
    assert size_of(Body(a=[1, value]), 1000) > 1000


def test_deep_values_do_not_exhaust_the_stack() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    assert size_of(deep, 10**6) == 100_001


@pytest.mark.parametrize(
    "options", [{}, {"ensure_ascii": False, "sort_keys": True}, {"indent": 2}], ids=str
)
def test_large_values_become_the_same_text_as_small_ones(monkeypatch, options) -> None:
    value = {"b": ["é", 1, 2.5, None, {"deep": [[], {}]}], "a": True}
    assert dumps(value, **options) == json.dumps(value, **options)
    monkeypatch.setattr(json_size, "MAX_AT_ONCE", 1)
    assert dumps(value, **options) == json.dumps(value, **options)

"""Parameters of stages: the values that they allow, and the errors for all others."""

import math
from typing import Any

import msgspec
import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.ipc.parameters import MAX_CHARS, Parameter, checked_arguments

V = 300
NUMBER = Parameter("number", "float", 0.0, low=0.0, high=2.0)
COUNT = Parameter("count", "int", 0, low=-5)
FLAG = Parameter("flag", "bool", False)
NAME = Parameter("name", "str", "a", choices=("a", "b"))
TEXT = Parameter("text", "str", "")
TOKEN = Parameter("token", "token", 0)
TOKENS = Parameter("tokens", "token", [], most=3)
WEIGHTS = Parameter("weights", "float", [1.0], most=2, high=1.0)
ALL = (NUMBER, COUNT, FLAG, NAME, TEXT, TOKEN, TOKENS, WEIGHTS)


def check(**given: Any) -> dict[str, Any] | None:
    return checked_arguments(given, ALL, V, field="vllm_xargs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 2.0),
        ("count", -5),
        ("count", 2**31 - 1),
        ("flag", True),
        ("name", "b"),
        ("text", "x" * MAX_CHARS),
        ("token", V - 1),
        ("tokens", [0, 5, V - 1]),
        ("weights", [0.5, -1e38]),
    ],
)
def test_returns_valid_values(name: str, value: Any) -> None:
    assert check(**{name: value}) == {name: value}


@pytest.mark.parametrize("parameter", ALL, ids=lambda parameter: parameter.name)
def test_a_default_and_null_are_the_same_as_no_value(parameter: Parameter) -> None:
    assert check(**{parameter.name: parameter.default}) is None
    assert check(**{parameter.name: None}) is None
    given = {"token": 5, "count": 7, parameter.name: parameter.default}
    left = {name: value for name, value in given.items() if name != parameter.name}
    assert check(**given) == left
    assert check(number=0, weights=[1], unknown=None) is None  # integers for a "float"


def test_integers_become_floats_for_a_float() -> None:
    assert repr(check(number=1, weights=[1, 0])) == repr({"number": 1.0, "weights": [1.0, 0.0]})


def test_a_default_has_the_form_of_a_checked_value() -> None:
    assert repr(Parameter("x", "float", 1).default) == "1.0"
    assert repr(Parameter("x", "float", (1, 2), most=2).default) == "[1.0, 2.0]"
    same = Parameter("x", "float", 1.0)
    assert Parameter("x", "float", 1) == same
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(same), type=Parameter) == same


@pytest.mark.parametrize("given", [None, {}])
def test_no_values_are_none(given: Any) -> None:
    assert checked_arguments(given, ALL, V, field="vllm_xargs") is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("number", -0.1, r"must be a number between 0\.0 and 2\.0, got -0\.1"),
        ("number", "1", r"must be a number between .*, got '1'"),
        ("number", True, "must be a number .*, got True"),
        ("number", math.nan, "got nan"),
        ("number", [1.0], r"got \[1\.0\]"),
        ("weights", [None], r"got \[None\]"),
        ("count", 1.0, "must be an integer between -5 and 2147483647, got 1.0"),
        ("count", 2**31, "between -5 and 2147483647, got 2147483648"),
        ("count", 10**4000, "got 1000"),
        ("flag", 1, "must be true or false, got 1"),
        ("name", "c", "must be a string, one of 'a', 'b', got 'c'"),
        ("text", "x" * (MAX_CHARS + 1), f"a string of at most {MAX_CHARS} characters, got 'xxx"),
        ("token", V, f"must be a token ID between 0 and {V - 1}, got {V}"),
        ("token", -1, "got -1"),
        ("tokens", 5, "must be a list of at most 3 token IDs between 0 and 299, got 5"),
        ("tokens", [1, 2, 3, 4], r"got \[1, 2, 3, 4\]"),
        ("tokens", [1, -1], r"got \[1, -1\]"),
        ("weights", [2.0], "must be a list of at most 2 numbers of at most 1.0, got"),
        ("weights", [-math.inf], "got"),
    ],
)
def test_refuses_invalid_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check(**{name: value})
    assert caught.value.param == f"vllm_xargs.{name}"
    assert len(str(caught.value)) < 300


def test_refuses_unknown_names_and_lists_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="no stage .* expected one of number, count"):
        check(unknown=1)
    with pytest.raises(InvalidRequestError, match="expected none") as caught:
        checked_arguments({"x" * 10**6: 1}, (), V, field="extra_args")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("a-b", "float", 0.0), "an identifier as name, got 'a-b'"),
        ((5, "float", 0.0), "an identifier as name, got 5"),
        (("", "float", 0.0), "an identifier as name, got ''"),
        (("a", "float", 0.0, "x"), "low and high of parameter a must be numbers, .* got 'x' and"),
        (("a", "float", [], 2.0, 1.0, (), 3), r"low at most high, got 2\.0 and 1\.0"),
        (("a", "float", 0.0, math.nan), "low at most high, got nan and inf"),
        (("a", "float", 0.0, 0.0, True), "must be numbers, .* got 0.0 and True"),
        (("a", "int", 1, 0, 3, (1, 2)), r"choices of parameter a .* got \(1, 2\) for 'int'"),
        (("a", "int", 1, 0, 3, ("b",)), r"only a parameter of kind \"str\" may .* for 'int'"),
        (("a", "str", "b", 0, 3, ("b", 2)), r"must be a tuple of strings, .* got \('b', 2\)"),
        (("a", "str", "b", 0, 3, "bc"), "must be a tuple of strings, .* got 'bc'"),
        (("a", "int", [], 0, 3, (), -1), "most of parameter a must be None or an .* got -1"),
        (("a", "int", [], 0, 3, (), "3"), "most of parameter a must be None or an .* got '3'"),
        (("a", "double", 0.0), "must be one of float, int, bool, str, token, got 'double'"),
        (("a", "float", None), "parameter a: its default must be a number, got None"),
        (("a", "float", 3.0, 0.0, 1.0), "its default must be a number between 0.0 and 1.0"),
        (("a", "str", "c", 0.0, 0.0, ("a",)), "its default must be a string, one of 'a', got 'c'"),
    ],
)
def test_refuses_declarations_that_contradict_themselves(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Parameter(*fields)


def test_parameters_survive_the_way_to_the_front() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ALL), type=tuple[Parameter, ...]) == ALL

"""Stages that the user names: how they are imported, and errors for other objects."""

import dataclasses
import importlib.metadata
import sys
import types

import numpy as np
import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.sampling import registry
from jaxserve.sampling.declaration import Parameter, Stage
from jaxserve.sampling.registry import STAGES, check_params, load_stages
from jaxserve.sampling_params import SamplingParams

V = 300
NUMBER = Parameter("number", "float", 0.0)
STAGE = Stage(name="mine", apply=lambda logits, rows: logits, parameters=(NUMBER,))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_stages")
    monkeypatch.setitem(sys.modules, "my_stages", module)
    module.mine = STAGE  # type: ignore[attr-defined]
    return module


def test_loads_named_stages_after_those_of_the_tree(module) -> None:
    module.inner = types.SimpleNamespace(
        other=dataclasses.replace(STAGE, name="other", parameters=())
    )
    third = dataclasses.replace(STAGE, name="third", parameters=())
    stages = load_stages(["my_stages:mine", third, "my_stages:inner.other"], V)
    assert [stage.name for stage in stages[len(STAGES) :]] == ["mine", "third", "other"]
    assert load_stages((), V) == stages[: len(STAGES)]


def test_loads_an_entry_point_by_its_name(module, monkeypatch) -> None:
    point = importlib.metadata.EntryPoint("short", "my_stages:mine", registry.ENTRY_POINTS)

    def entry_points(*, group: str, name: str):
        found = group == registry.ENTRY_POINTS and name == "short"
        return importlib.metadata.EntryPoints([point] if found else [])

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert load_stages(["short"], V)[-1] is STAGE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_name", "--logits-processor no_such_name: expected module:name, .* got 'no_such"),
        ("no_such_module:stage", "cannot be imported: ModuleNotFoundError: No module named"),
        ("my_stages:missing", "cannot be imported: AttributeError: .*'missing'"),
        (":mine", "--logits-processor :mine: it cannot be imported"),
        ("my_stages:number", "expected an object of type .*Stage, got int"),
    ],
)
def test_refuses_names_of_anything_else(module, name: str, message: str) -> None:
    module.number = 5
    with pytest.raises(ConfigError, match=message):
        load_stages([name], V)


def test_refuses_objects_that_are_no_stages() -> None:
    with pytest.raises(
        ConfigError, match="must have Stage objects or names, got .* type Parameter"
    ):
        load_stages([NUMBER], V)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "top_n_sigma", "parameters": ()}, "two stages have the name 'top_n_sigma'"),
        (
            {"parameters": (Parameter("top_n_sigma", "float", 0.0),)},
            "top_n_sigma and mine both declare the parameter 'top_n_sigma'",
        ),
        (
            {"parameters": (Parameter("top_p", "float", 0.0),)},
            "declares 'top_p', which is a field of SamplingParams",
        ),
        (
            {"apply": lambda logits, rows: logits[:1]},
            r"must return logits float32\[2, 300\], got float32\[1, 300\]",
        ),
        ({"apply": lambda logits, rows: logits > 0}, r"got bool\[2, 300\]"),
        ({"apply": lambda logits, rows: rows["x"]}, "mine failed on logits .*: KeyError: 'x'"),
        (
            {"arrays": lambda values: {"a": "text"}},
            "mine failed on the default parameters: ValueError",
        ),
        (
            {"is_on": lambda values: values["x"]},
            "mine failed on the default parameters: KeyError: 'x'",
        ),
        (
            {"is_on": lambda values: values["x"], "is_filter": True},
            "mine failed on the default parameters: KeyError: 'x'",
        ),
        (
            {"parameters": (Parameter("t", "token", V),)},
            f"parameter t of the stage mine: its default must be a token ID .* {V - 1}, got {V}",
        ),
    ],
)
def test_refuses_stages_that_cannot_run(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_stages([dataclasses.replace(STAGE, **changes)], V)


def test_an_error_in_the_code_of_a_stage_is_an_error_of_the_request() -> None:
    def arrays(values):
        assert values["number"] < 5, "too large"
        return {"a": np.zeros(3 if values["number"] == 4 else 2)}

    stages = load_stages([dataclasses.replace(STAGE, arrays=arrays)], V)
    check_params(stages, SamplingParams())
    check_params(stages, SamplingParams(extra_args={"number": 1.0}))
    whole = dataclasses.replace(STAGE, parameters=(Parameter("number", "float", 0),))
    check_params([whole], SamplingParams(extra_args={"number": 0.5}))
    for number, message in [(5.0, "AssertionError: too large"), (4.0, r"arrays must be .*\[2\].*")]:
        params = SamplingParams(extra_args={"number": number})
        with pytest.raises(InvalidRequestError, match=f"the stage mine failed: .*{message}"):
            check_params(stages, params)

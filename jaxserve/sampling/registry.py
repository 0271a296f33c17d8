"""The declared stages of an engine: those of jaxserve, and those that the user names."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.sampling.declaration import ALL_TOKENS, Stage, check_function
from jaxserve.sampling_params import SamplingParams

STAGES: tuple[str, ...] = ("jaxserve.sampling.top_n_sigma:stage",)
"""The stages of every engine, as ``module:name``, in the order in which they run."""

ENTRY_POINTS = "jaxserve.logits_processors"
"""The group of entry points in which an installed package can give names to its stages."""


def load_stages(named: Sequence[Any], vocab_size: int) -> tuple[Stage, ...]:
    """Returns the stages of an engine in the order in which they run.

    Args:
      named: the stages that the user adds: `Stage` objects, ``module:name``, or names of
        `ENTRY_POINTS`. Naming a module runs its code in this process.
      vocab_size: V.

    Raises:
      ConfigError: a stage cannot be imported, an object is no stage, the code of a stage fails on
        the default parameters, its function does not return logits, or two stages have a name or a
        parameter in common.
    """
    stages = tuple(_load(each) if isinstance(each, str) else each for each in (*STAGES, *named))
    for stage in stages:
        if not isinstance(stage, Stage):
            raise ConfigError(
                "logits_processors must have Stage objects or names, got an object of type "
                f"{type(stage).__name__}"
            )
    _check_names(stages)
    for stage in stages:
        _check_defaults(stage, vocab_size)
        num_tokens = 1 if stage.num_tokens == ALL_TOKENS else stage.num_tokens
        # The runner checks the shapes of its programs later. This finds most errors before the
        # weights are loaded.
        check_function(stage, vocab_size, [(2, num_tokens)])
    return stages


def check_params(stages: Sequence[Stage], params: SamplingParams) -> None:
    """Raises InvalidRequestError if a stage fails on the parameters of a request.

    The front has checked the values against the declared parameters. This check keeps an error in
    the code of a stage from ending the engine.
    """
    for stage in stages:
        try:
            if stage.is_used_by(params):
                forms = _forms(stage.entries(stage.values(params)))
                expected = _forms(stage.default_entries)
                if forms != expected:
                    raise ValueError(f"arrays must be {expected}, got {forms}")
        except Exception as error:
            kind = type(error).__name__
            raise InvalidRequestError(f"the stage {stage.name} failed: {kind}: {error}") from error


def _load(name: str) -> Stage:
    """Imports the stage that ``module:name``, or the name of an entry point, points to."""
    where = f"--logits-processor {name}"
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        else:
            points = entry_points(group=ENTRY_POINTS, name=name)
            if not points:
                raise ConfigError(
                    f"{where}: expected module:name, or a name that an installed package gives in "
                    f"the entry points {ENTRY_POINTS}, got {name!r}"
                )
            found = next(iter(points)).load()
    except ConfigError:
        raise
    except Exception as error:  # of the code of the module, too
        kind = type(error).__name__
        raise ConfigError(f"{where}: it cannot be imported: {kind}: {error}") from error
    if not isinstance(found, Stage):
        raise ConfigError(
            f"{where}: expected an object of type jaxserve.sampling.declaration.Stage, got "
            f"{type(found).__name__}"
        )
    return found


def _check_names(stages: Sequence[Stage]) -> None:
    """Raises ConfigError unless stages and parameters have names of their own."""
    for a, b in itertools.combinations(stages, 2):
        if a.name == b.name:
            raise ConfigError(f"two stages have the name {a.name!r}; each must have its own")
    owners: dict[str, str] = {}
    for stage in stages:
        for parameter in stage.parameters:
            name = parameter.name
            if name in SamplingParams.__struct_fields__:
                raise ConfigError(
                    f"the stage {stage.name} declares {name!r}, which is a field of SamplingParams"
                )
            if name in owners:
                raise ConfigError(
                    f"the stages {owners[name]} and {stage.name} both declare the parameter "
                    f"{name!r}; each must have its own"
                )
            owners[name] = stage.name


def _check_defaults(stage: Stage, vocab_size: int) -> None:
    """Raises ConfigError unless a request can leave out all parameters of a stage."""
    for parameter in stage.parameters:
        try:
            parameter.checked(parameter.default, vocab_size, field="its default")
        except InvalidRequestError as error:
            where = f"parameter {parameter.name} of the stage {stage.name}"
            raise ConfigError(f"{where}: {error}") from error
    try:
        stage.is_used_by(SamplingParams(temperature=1.0))
        _ = stage.default_entries
    except Exception as error:
        raise ConfigError(
            f"the stage {stage.name} failed on the default parameters: "
            f"{type(error).__name__}: {error}"
        ) from error


def _forms(entries: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{entry.dtype}{list(entry.shape)}" for name, entry in sorted(entries.items())}

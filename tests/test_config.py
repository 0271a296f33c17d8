"""Settings that are checked when they are made."""

import dataclasses
import math
import re
import typing

import pytest

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    LogprobsConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from jaxserve.errors import ConfigError
from jaxserve.setting import Range, at_least, between
from server.settings import ApiSettings, ServerSettings


def numbers() -> list[tuple[type, dataclasses.Field]]:
    """Returns the group and the field of every setting that is a number."""
    groups = [*typing.get_type_hints(EngineConfig).values(), ApiSettings, ServerSettings]
    return [
        (group, field)
        for group in groups
        for field in dataclasses.fields(group)
        if {int, float} & {hint := typing.get_type_hints(group)[field.name], *typing.get_args(hint)}
    ]


def test_a_range_has_its_ends_and_nothing_that_is_not_finite() -> None:
    values = [-math.inf, -1, 0, 1e-300, 1, 3, 10**400, math.inf, math.nan, "1", None]
    assert [v for v in values if v in at_least(0)] == [0, 1e-300, 1, 3, 10**400]
    assert [v for v in values if v in between(0, 1)] == [0, 1e-300, 1]
    assert [v for v in values if v in Range("", 0, 1, above_low=True)] == [1e-300, 1]
    with_infinity = Range("", 1, has_infinity=True)
    assert [v for v in values if v in with_infinity] == [1, 3, 10**400, math.inf]


@pytest.mark.parametrize(("group", "field"), numbers(), ids=lambda each: getattr(each, "name", ""))
def test_every_number_has_a_range(group: type, field: dataclasses.Field) -> None:
    allowed = field.metadata["range"]
    flag = "--" + field.name.replace("_", "-")
    wrong = [math.nan, -math.inf, allowed.low - 1, "many"]
    wrong += [] if allowed.has_infinity else [math.inf, allowed.high + 1]
    wrong += [allowed.low] if allowed.above_low else []
    for value in wrong:
        message = (
            f"{flag} must be {allowed.text}{' and finite' * (value == math.inf)}, got {value!r}"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            group(**{field.name: value})


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (ModelConfig, {"max_model_len": 0}, "--max-model-len must be at least 1, got 0"),
        (CacheConfig, {"num_blocks": 1}, "--num-blocks must be at least 2 (block 0 is never used)"),
        (CacheConfig, {"memory_fraction": 1.1}, "--memory-fraction must be in (0, 1], got 1.1"),
        (SpeculationConfig, {"num_speculative_tokens": 65}, "must be between 1 and 64, got 65"),
        (CompileConfig, {"compilation_cache_mib": 0}, "an empty --compilation-cache-dir keeps no"),
        (
            ServerSettings,
            {"write_timeout": math.nan},
            "--write-timeout must be more than 0, got nan",
        ),
        (ServerSettings, {"port": 65536}, "--port must be between 0 and 65535, got 65536"),
        (ServerSettings, {"log_stats_interval": math.inf}, "at least 0 and finite, got inf"),
    ],
)
def test_a_message_says_what_a_number_must_be(group: type, values, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        group(**values)


def test_max_logprobs_of_minus_1_allows_the_whole_vocabulary() -> None:
    limits = [LogprobsConfig(max_logprobs=most).limit(300) for most in (-1, 0, 20, 1000)]
    assert limits == [300, 0, 20, 1000]
    with pytest.raises(ConfigError, match="--max-logprobs must be at least 0, or -1 .* got -2"):
        LogprobsConfig(max_logprobs=-2)


def test_an_engine_has_at_least_one_device() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at least 1, got 0"):
        ParallelConfig(tensor_parallel_size=0)


@pytest.mark.parametrize(
    ("replicas", "each"), [(1, 1_000_000), (1025, 1), (33, 32), (10**9, 10**9)]
)
def test_engines_have_at_most_1024_devices(replicas: int, each: int) -> None:
    ParallelConfig(data_parallel_size=32, tensor_parallel_size=32)
    message = f"--tensor-parallel-size {each} need {replicas * each} devices, .* at most 1024"
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=each)

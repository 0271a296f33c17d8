"""Settings that are checked when they are made."""

import pytest

from jaxserve.config import LogprobsConfig, ParallelConfig
from jaxserve.errors import ConfigError


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

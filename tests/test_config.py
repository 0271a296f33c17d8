import pytest

from jaxserve.config import LogprobsConfig
from jaxserve.errors import ConfigError


def test_the_whole_vocabulary_is_a_limit_of_log_probabilities() -> None:
    limits = [LogprobsConfig(max_logprobs=most).limit(300) for most in (-1, 0, 20, 1000)]
    assert limits == [300, 0, 20, 1000]
    with pytest.raises(ConfigError, match="--max-logprobs must be at least 0, or -1 .* got -2"):
        LogprobsConfig(max_logprobs=-2)

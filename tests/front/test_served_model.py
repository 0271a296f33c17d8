"""The files of a checkpoint that the front reads."""

import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.front.served_model import ModelFiles


def test_sampling_defaults_can_be_overridden(front_checkpoint) -> None:
    config = ModelConfig(str(front_checkpoint), override_generation_config='{"top_k": 3}')
    assert ModelFiles.open(config).defaults.sampling == {"top_k": 3}


@pytest.mark.parametrize("text", ["{", "[1]", "5", '"x"', "null"])
def test_overrides_must_be_an_object(front_checkpoint, text) -> None:
    config = ModelConfig(str(front_checkpoint), override_generation_config=text)
    with pytest.raises(ConfigError, match="--override-generation-config"):
        ModelFiles.open(config)

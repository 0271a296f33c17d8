"""The settings of `LLM`, and what they ask of jax through the environment."""

import os
import sys
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM, settings
from jaxserve.llm.settings import ask_for_memory, engine_config

MEMORY = "XLA_CLIENT_MEM_FRACTION"
FAKE = {"factory": "jaxserve.testing.fake_engine:build", "show_progress": False}


def test_engine_config_assigns_settings_to_groups() -> None:
    config = engine_config({"model": "m", "num_blocks": 9, "policy": "priority", "warmup": False})
    assert config.model.model == "m"
    assert config.cache.num_blocks == 9
    assert config.scheduler.policy == "priority"
    assert not config.compile.warmup


def test_rejects_an_unknown_setting() -> None:
    with pytest.raises(ConfigError, match="unknown setting max_model_length.*max_model_len"):
        engine_config({"max_model_length": 5})


def test_sets_the_share_of_gpu_memory_for_jax(front_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setenv(MEMORY, "")
    monkeypatch.delenv(MEMORY)
    LLM(str(front_checkpoint), **FAKE, memory_fraction=0.6).close()
    assert os.environ[MEMORY] == "0.800"


def test_sets_the_flag_that_captures_sums_over_devices(front_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=9")
    LLM(str(front_checkpoint), **FAKE).close()
    assert os.environ["XLA_FLAGS"] == "--xla_one=9"
    LLM(str(front_checkpoint), **FAKE, capture_collectives=True).close()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_command_buffer=+COLLECTIVES --xla_one=9"


@pytest.mark.parametrize(
    ("environment", "has_gpu", "has_jax", "warns"),
    [
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({MEMORY: "0.5"}, True, True, False),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, True, True, False),
    ],
)
def test_warns_if_jax_is_loaded_before_the_share_is_set(
    tmp_path, monkeypatch, caplog, environment, has_gpu, has_jax, warns
) -> None:
    monkeypatch.setattr(settings, "NVIDIA_DRIVER", tmp_path if has_gpu else tmp_path / "none")
    modules = {**sys.modules, "jax": None} if has_jax else {"sys": sys}
    monkeypatch.setattr(sys, "modules", modules)
    given = dict(environment)
    ask_for_memory(EngineConfig(), environment)
    assert environment == (given or {MEMORY: "0.950"})
    assert [MEMORY in record.getMessage() for record in caplog.records] == [True] * warns

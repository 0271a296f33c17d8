"""The launch of an engine process: its environment, its exit code and its end."""

import subprocess
import threading

import msgspec
import psutil
import pytest

from jaxserve.client import launcher
from jaxserve.client.launcher import EngineProcess
from jaxserve.config import CompileConfig, EngineConfig, ModelConfig, ParallelConfig
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.ipc.launch import Launch


def launch(
    engine=0, *, folder="/nowhere", factory="jaxserve.testing.fake_engine:build", **parallel: int
):
    return Launch(
        engine=engine,
        factory=factory,
        requests_address=f"ipc://{folder}/requests-{engine}",
        events_address=f"ipc://{folder}/events",
        config=EngineConfig(model=ModelConfig(model="fake"), parallel=ParallelConfig(**parallel)),
    )


def child_environment(launch, inherited, *, has_gpus=True):
    return launcher.child_environment(launch, inherited, has_gpus=has_gpus)


def test_variables_of_the_front_override_the_defaults():
    assert child_environment(launch(), {})["TF_CPP_MIN_LOG_LEVEL"] == "2"
    inherited = {"TF_CPP_MIN_LOG_LEVEL": "0", "XLA_FLAGS": "--xla_one=9"}
    env = child_environment(launch(), inherited)
    assert {name: env[name] for name in inherited} == inherited


def test_sums_over_devices_are_captured_in_graphs_only_on_request():
    flag = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
    assert "XLA_FLAGS" not in child_environment(launch(), {})
    config = EngineConfig(compile=CompileConfig(capture_collectives=True))
    asked = msgspec.structs.replace(launch(), config=config)
    assert child_environment(asked, {})["XLA_FLAGS"] == flag
    # XLA takes the last of equal flags.
    env = child_environment(asked, {"XLA_FLAGS": "--xla_one=9"})
    assert env["XLA_FLAGS"] == f"{flag} --xla_one=9"


def test_jax_gets_the_requested_memory_and_half_of_the_rest():
    new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert child_environment(launch(), {})[new] == "0.950"
    assert child_environment(launch(), {new: "0.5"})[new] == "0.5"
    env = child_environment(launch(), {old: "0.5"})
    assert (env[old], new in env) == ("0.5", False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1"]),
        ("3,5,7", ["3", "5"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
        ("", ["", ""]),
    ],
)
def test_each_of_several_engines_has_its_own_gpu(visible, expected):
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    launches = [launch(i, data_parallel_size=2) for i in range(2)]
    environments = [child_environment(each, inherited) for each in launches]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == expected


@pytest.mark.parametrize(
    ("num_engines", "visible", "expected"),
    [
        (1, None, ["0,1,2"]),
        (2, None, ["0,1,2", "3,4,5"]),
        (2, "7, 6,5,4,3,2,1", ["7,6,5", "4,3,2"]),
        (2, "", ["", ""]),
    ],
)
def test_each_engine_sees_the_gpus_that_its_model_is_cut_across(num_engines, visible, expected):
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    sizes = {"data_parallel_size": num_engines, "tensor_parallel_size": 3}
    environments = [child_environment(launch(i, **sizes), inherited) for i in range(num_engines)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == expected


def test_a_single_engine_on_one_device_sees_every_gpu():
    assert "CUDA_VISIBLE_DEVICES" not in child_environment(launch(), {})
    env = child_environment(launch(), {"CUDA_VISIBLE_DEVICES": "3,5"})
    assert env["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_too_few_gpus_are_an_error():
    sizes = {"data_parallel_size": 3, "tensor_parallel_size": 2}
    message = "--data-parallel-size 3 and --tensor-parallel-size 2 need 6 GPUs.* has 2: 0,1"
    with pytest.raises(ConfigError, match=message):
        child_environment(launch(2, **sizes), {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("sizes", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize(
    ("visible", "has_gpus", "platforms"),
    [
        ("-1", True, None),
        (" -1", True, None),
        ("-1,0,1", True, None),
        ("", True, None),
        ("0", False, None),
        ("-1", False, None),
        ("0", True, "cpu"),
        ("0", True, "cpu,cuda"),
    ],
)
def test_devices_are_simulated_where_jax_uses_the_cpu(visible, has_gpus, platforms, sizes):
    inherited = {"CUDA_VISIBLE_DEVICES": visible}
    if platforms is not None:
        inherited["JAX_PLATFORMS"] = platforms
    env = child_environment(launch(0, **sizes), inherited, has_gpus=has_gpus)
    assert env["CUDA_VISIBLE_DEVICES"] == visible


def test_gpus_after_an_invalid_entry_do_not_count():
    """CUDA does not show them."""
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES has 1: 0,-1,1"):
        child_environment(launch(tensor_parallel_size=2), {"CUDA_VISIBLE_DEVICES": "0,-1,1"})


def test_another_platform_than_the_cpu_needs_the_gpus():
    inherited = {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}
    with pytest.raises(ConfigError, match="need 2 GPUs"):
        child_environment(launch(tensor_parallel_size=2), inherited)


@pytest.mark.parametrize("missing", ["process", "thread"])
async def test_a_process_that_the_system_refuses_is_an_error(monkeypatch, missing):
    before = set(psutil.Process().children())

    def refuse(*_args, **_options):
        raise OSError("no room") if missing == "process" else RuntimeError("no room")

    target = (subprocess, "Popen") if missing == "process" else (threading.Thread, "start")
    monkeypatch.setattr(*target, refuse)
    with pytest.raises(EngineDeadError, match="process of engine 3 cannot be started: no room"):
        EngineProcess(launch(3))
    assert set(psutil.Process().children()) == before

"""Device: platform, free memory, the features of the CPU, and the number of devices."""

from types import SimpleNamespace

import jax
import pytest

from jaxserve.errors import ConfigError
from jaxserve.runner import device
from jaxserve.runner.device import current_device, engine_devices
from jaxserve.runner.host_memory import FreeMemory

CPU_INFO = """processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu {flag} sse
bugs\t\t:

processor\t: 1
model name\t: Another
"""


def test_current_device_is_a_cpu_with_free_memory():
    found = current_device()
    assert found.platform == "cpu"
    assert found.kind
    assert found.free_bytes > 0


def test_bf16_is_read_from_the_flags_of_the_cpu(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(device, "CPU_INFO", path)
    for flag, expected in [("avx512_bf16", True), ("amx_bf16", True), ("avx512f", False)]:
        path.write_text(CPU_INFO.format(flag=flag))
        found = current_device()
        assert found.has_native_bf16 is expected
        assert found.kind == "Some CPU @ 2 GHz"


def test_a_system_without_cpuinfo_still_has_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "missing")
    found = current_device()
    assert (found.kind, found.has_native_bf16) == ("CPU", False)


def gpu(compute_capability: str, *, in_use: int = 300) -> SimpleNamespace:
    return SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        compute_capability=compute_capability,
        core_count=132,
        memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": in_use},
    )


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("7.0", False), ("7.5", False), ("8.0", True), ("9.0", True), ("gfx942", True)],
)
def test_gpus_before_ampere_have_no_bf16(monkeypatch, capability, expected):
    monkeypatch.setattr(device.jax, "devices", lambda: [gpu(capability)])
    assert current_device().has_native_bf16 is expected


def test_free_memory_of_a_gpu_is_the_unused_part_of_the_jax_pool(monkeypatch):
    monkeypatch.setattr(device.jax, "devices", lambda: [gpu("9.0")])
    found = current_device(pool_part=0.9)
    assert (found.free_bytes, found.compute_capability, found.num_cores) == (600, (9, 0), 132)
    assert current_device(pool_part=0.2).free_bytes == 0


def test_free_memory_is_that_of_the_fullest_gpu_of_the_engine(monkeypatch):
    gpus = [gpu("9.0"), gpu("9.0", in_use=500), gpu("9.0", in_use=700)]
    monkeypatch.setattr(device.jax, "devices", lambda: gpus)
    found = [current_device(count=n, pool_part=0.8) for n in (1, 2, 3)]
    assert [each.free_bytes for each in found] == [500, 300, 100]
    assert [each.most_bytes for each in found] == [700, 500, 300]


def test_simulated_devices_share_the_memory_of_the_cpu(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: FreeMemory(1000, "a limit", 1 << 40))
    found = [current_device(count=n) for n in (1, 4)]
    assert [each.free_bytes for each in found] == [1000, 250]
    assert [each.limited_by for each in found] == ["a limit", "a limit"]


def test_an_engine_takes_the_first_devices_of_jax():
    assert engine_devices(1) == jax.devices()[:1]
    assert engine_devices(4) == jax.devices()[:4]


def test_too_few_devices_are_an_error_that_names_them():
    jax.devices()  # from now on, jax cannot simulate more
    with pytest.raises(ConfigError, match="--tensor-parallel-size 64 needs 64 devices.*sees 4: "):
        engine_devices(64)

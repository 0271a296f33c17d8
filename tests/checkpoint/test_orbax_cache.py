"""Cache of converted weights: exact restores, names of entries, and damage."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.checkpoint.orbax_cache import WeightsCache, entry_name
from jaxserve.models.layout import Layout
from jaxserve.models.loading import abstract_params, load_params
from jaxserve.models.registry import read_spec
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint, write_weights

LAYOUT = Layout("float32", "scan")


@pytest.fixture
def checkpoint(tmp_path: Path, rng: np.random.Generator):
    write_checkpoint(tmp_path / "tiny")
    seed = int(rng.integers(2**32))
    write_weights(tmp_path / "tiny", random_tensors(tiny_config(), seed=seed))
    return open_checkpoint(str(tmp_path / "tiny"))


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "kept" / "here")


def name_of(checkpoint, layout: Layout = LAYOUT) -> str:
    return entry_name(checkpoint, dataclasses.asdict(layout))


def convert(checkpoint, **layout: Any) -> Any:
    spec = read_spec(checkpoint.config)
    return load_params(checkpoint, spec, dataclasses.replace(LAYOUT, **layout))[1]


def restore(cache: WeightsCache, checkpoint, **layout: Any) -> Any:
    wanted = dataclasses.replace(LAYOUT, **layout)
    like = abstract_params(read_spec(checkpoint.config), wanted)[1]
    return cache.restore(name_of(checkpoint, wanted), like)


def save_entry(cache: WeightsCache, checkpoint, **layout: Any) -> Path:
    """Saves converted weights in a cache and returns the folder of the entry."""
    name = name_of(checkpoint, dataclasses.replace(LAYOUT, **layout))
    cache.save(name, convert(checkpoint, **layout))
    return cache._folder / name


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_restores_weights_bit_by_bit(checkpoint, cache, caplog, dtype, loop, weights) -> None:
    layout = {"dtype": dtype, "loop": loop, "weights": weights}
    assert restore(cache, checkpoint, **layout) is None
    entry = save_entry(cache, checkpoint, **layout)
    assert_same_bits(restore(cache, checkpoint, **layout), convert(checkpoint, **layout))
    assert [path.name for path in cache._folder.iterdir()] == [entry.name]
    assert cache._folder.stat().st_mode & 0o077 == 0
    assert not [record for record in caplog.records if record.name == "jaxserve"]


def test_abstract_params_match_loaded_params(checkpoint) -> None:
    spec = read_spec(checkpoint.config)
    for loop in ("scan", "unroll"):
        layout = Layout("bfloat16", loop)
        graphdef, like = abstract_params(spec, layout)
        loaded_def, loaded = load_params(checkpoint, spec, layout)
        assert graphdef == loaded_def
        assert jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), loaded) == like


def test_entry_name_changes_with_everything_that_changes_the_weights(checkpoint) -> None:
    folder = checkpoint.path
    file = next(folder.glob("*.safetensors"))
    names = [name_of(checkpoint)]
    assert name_of(open_checkpoint(str(folder))) == names[0]
    names += [
        name_of(checkpoint, Layout(*each))
        for each in (("bfloat16", "scan"), ("float32", "unroll"), ("float32", "scan", "int8"))
    ]
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    names.append(name_of(checkpoint))
    with file.open("ab") as end:
        end.write(b"\0")
    names.append(name_of(checkpoint))
    checkpoint.config["rope_theta"] = 123.0
    names.append(name_of(checkpoint))
    file.rename(file.with_name("model-00001-of-00001.safetensors"))
    names.append(name_of(checkpoint))
    assert len(set(names)) == len(names) == 8


def test_entry_name_of_a_gguf_file_depends_only_on_that_file(tmp_path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    gguf: Any = SimpleNamespace(path=file, config={"architectures": ["LlamaForCausalLM"]})
    before = name_of(gguf)
    (tmp_path / "other.gguf").write_bytes(b"1")
    assert name_of(gguf) == before
    file.write_bytes(b"22")
    assert name_of(gguf) != before
    moved: Any = SimpleNamespace(path=tmp_path / "other.gguf", config=gguf.config)
    assert name_of(moved) != before


def files_of(entry: Path) -> list[Path]:
    return sorted(path for path in entry.rglob("*") if path.is_file())


def truncate_largest_file(entry: Path) -> None:
    largest = max(files_of(entry), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def delete_largest_file(entry: Path) -> None:
    max(files_of(entry), key=lambda path: path.stat().st_size).unlink()


def delete_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def corrupt_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def corrupt_metadata(entry: Path) -> None:
    """Overwrites metadata files with nonsense of the same size."""
    for path in files_of(entry):
        if path.name in ("manifest.ocdbt", "_METADATA"):
            path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        truncate_largest_file,
        delete_largest_file,
        delete_manifest,
        corrupt_manifest,
        corrupt_metadata,
    ],
)
def test_deletes_a_damaged_entry_and_saves_it_again(
    checkpoint, cache, caplog, damage: Callable[[Path], None]
) -> None:
    entry = save_entry(cache, checkpoint)
    damage(entry)
    assert restore(cache, checkpoint) is None
    assert not entry.exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "jaxserve"]
    assert "is damaged; converting the weights again" in warning
    save_entry(cache, checkpoint)
    assert_same_bits(restore(cache, checkpoint), convert(checkpoint))


def test_does_not_restore_weights_of_other_shapes(checkpoint, cache, caplog) -> None:
    name = name_of(checkpoint)
    cache.save(name, convert(checkpoint))
    other = dataclasses.replace(
        read_spec(checkpoint.config),
        vocab_size=read_spec(checkpoint.config).vocab_size + 1,
    )
    assert cache.restore(name, abstract_params(other, LAYOUT)[1]) is None
    assert "is damaged" in caplog.text


def test_warns_if_the_folder_cannot_be_created(checkpoint, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    cache = WeightsCache(tmp_path / "file" / "kept")
    save_entry(cache, checkpoint)
    assert "cannot cache converted weights" in caplog.text
    assert restore(cache, checkpoint) is None


def test_never_restores_partial_entries_and_the_next_save_deletes_them(
    checkpoint, cache, monkeypatch
) -> None:
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    name = name_of(checkpoint)
    abandoned, in_progress = (
        cache._folder / f"{name}.{pid}.tmp" for pid in (exited.pid, os.getppid())
    )
    for path in (abandoned, in_progress):
        path.mkdir(parents=True)
        (path / "weights").touch()
    assert restore(cache, checkpoint) is None
    save_entry(cache, checkpoint)
    assert not abandoned.exists()
    assert in_progress.exists()  # its process still runs
    assert restore(cache, checkpoint) is not None

    def fail(path: Path, params: Any) -> None:
        path.mkdir(parents=True)
        raise OSError("no space left on device")

    monkeypatch.setattr("jaxserve.checkpoint.orbax_cache._write", fail)
    before = set(cache._folder.iterdir())
    save_entry(cache, checkpoint, dtype="float16")
    assert set(cache._folder.iterdir()) == before


def test_saving_an_entry_twice_changes_nothing(checkpoint, cache) -> None:
    entry = save_entry(cache, checkpoint)
    before = {path: path.stat().st_mtime_ns for path in files_of(entry)}
    save_entry(cache, checkpoint)
    assert {path: path.stat().st_mtime_ns for path in files_of(entry)} == before

"""Cached weights come back bit by bit, and damaged entries are converted again."""

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
from jaxserve.models.hf_config import read_spec
from jaxserve.models.loading import abstract_params, load_params
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint, write_weights

FORMS = {"dtype": "float32", "loop": "scan"}


@pytest.fixture
def checkpoint(tmp_path: Path, rng: np.random.Generator):
    write_checkpoint(tmp_path / "tiny")
    seed = int(rng.integers(2**32))
    write_weights(tmp_path / "tiny", random_tensors(tiny_config(), seed=seed))
    return open_checkpoint(str(tmp_path / "tiny"))


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "kept" / "here")


def convert(checkpoint, **forms: Any) -> Any:
    spec = read_spec(checkpoint.config)
    return load_params(checkpoint, spec, **{**FORMS, **forms})[1]


def restore(cache: WeightsCache, checkpoint, **forms: Any) -> Any:
    forms = {**FORMS, **forms}
    spec = read_spec(checkpoint.config)
    return cache.restore(entry_name(checkpoint, **forms), abstract_params(spec, **forms)[1])


def keep(cache: WeightsCache, checkpoint, **forms: Any) -> Path:
    """Saves converted weights in a cache and returns the folder of the entry."""
    name = entry_name(checkpoint, **{**FORMS, **forms})
    cache.save(name, convert(checkpoint, **forms))
    return cache._folder / name


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_weights_come_back_bit_by_bit(checkpoint, cache, caplog, dtype, loop) -> None:
    forms = {"dtype": dtype, "loop": loop}
    assert restore(cache, checkpoint, **forms) is None
    entry = keep(cache, checkpoint, **forms)
    assert_same_bits(restore(cache, checkpoint, **forms), convert(checkpoint, **forms))
    assert [path.name for path in cache._folder.iterdir()] == [entry.name]
    assert cache._folder.stat().st_mode & 0o077 == 0
    assert not [record for record in caplog.records if record.name == "jaxserve"]


def test_what_an_abstract_model_promises_is_what_is_loaded(checkpoint) -> None:
    spec = read_spec(checkpoint.config)
    for loop in ("scan", "unroll"):
        graphdef, like = abstract_params(spec, dtype="bfloat16", loop=loop)
        loaded_def, loaded = load_params(checkpoint, spec, dtype="bfloat16", loop=loop)
        assert graphdef == loaded_def
        assert jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), loaded) == like


def test_names_tell_apart_whatever_changes_the_weights(checkpoint) -> None:
    folder = checkpoint.path
    file = next(folder.glob("*.safetensors"))
    names = [entry_name(checkpoint, **FORMS)]
    assert entry_name(open_checkpoint(str(folder)), **FORMS) == names[0]
    names += [
        entry_name(checkpoint, dtype=d, loop=x)
        for d, x in (("bfloat16", "scan"), ("float32", "unroll"))
    ]
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    names.append(entry_name(checkpoint, **FORMS))
    with file.open("ab") as end:
        end.write(b"\0")
    names.append(entry_name(checkpoint, **FORMS))
    checkpoint.config["rope_theta"] = 123.0
    names.append(entry_name(checkpoint, **FORMS))
    file.rename(file.with_name("model-00001-of-00001.safetensors"))
    names.append(entry_name(checkpoint, **FORMS))
    assert len(set(names)) == len(names) == 7


def test_the_name_for_a_single_file_depends_on_that_file(tmp_path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    gguf: Any = SimpleNamespace(path=file, config={"architectures": ["LlamaForCausalLM"]})
    before = entry_name(gguf, **FORMS)
    (tmp_path / "other.gguf").write_bytes(b"1")
    assert entry_name(gguf, **FORMS) == before
    file.write_bytes(b"22")
    assert entry_name(gguf, **FORMS) != before
    moved: Any = SimpleNamespace(path=tmp_path / "other.gguf", config=gguf.config)
    assert entry_name(moved, **FORMS) != before


def files_of(entry: Path) -> list[Path]:
    return sorted(path for path in entry.rglob("*") if path.is_file())


def cut_off(entry: Path) -> None:
    largest = max(files_of(entry), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def lose_a_file(entry: Path) -> None:
    max(files_of(entry), key=lambda path: path.stat().st_size).unlink()


def lose_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def scribble_in_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def scribble_in_the_metadata(entry: Path) -> None:
    """Overwrites metadata files with nonsense of the same size."""
    for path in files_of(entry):
        if path.name in ("manifest.ocdbt", "_METADATA"):
            path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [cut_off, lose_a_file, lose_the_manifest, scribble_in_the_manifest, scribble_in_the_metadata],
)
def test_what_is_damaged_is_thrown_away_and_can_be_kept_anew(
    checkpoint, cache, caplog, damage: Callable[[Path], None]
) -> None:
    entry = keep(cache, checkpoint)
    damage(entry)
    assert restore(cache, checkpoint) is None
    assert not entry.exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "jaxserve"]
    assert "is damaged; converting the weights again" in warning
    keep(cache, checkpoint)
    assert_same_bits(restore(cache, checkpoint), convert(checkpoint))


def test_weights_of_other_shapes_are_not_taken(checkpoint, cache, caplog) -> None:
    name = entry_name(checkpoint, **FORMS)
    cache.save(name, convert(checkpoint))
    other = dataclasses.replace(
        read_spec(checkpoint.config),
        vocab_size=read_spec(checkpoint.config).vocab_size + 1,
    )
    assert cache.restore(name, abstract_params(other, **FORMS)[1]) is None
    assert "is damaged" in caplog.text


def test_a_folder_that_cannot_be_made_is_done_without(checkpoint, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    cache = WeightsCache(tmp_path / "file" / "kept")
    keep(cache, checkpoint)
    assert "cannot cache converted weights" in caplog.text
    assert restore(cache, checkpoint) is None


def test_half_written_weights_are_never_found_and_are_removed_by_the_next(
    checkpoint, cache, monkeypatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    name = entry_name(checkpoint, **FORMS)
    left, busy = (cache._folder / f"{name}.{pid}.tmp" for pid in (gone.pid, os.getppid()))
    for path in (left, busy):
        path.mkdir(parents=True)
        (path / "weights").touch()
    assert restore(cache, checkpoint) is None
    keep(cache, checkpoint)
    assert not left.exists()
    assert busy.exists()  # its process still runs
    assert restore(cache, checkpoint) is not None

    def breaks_off(path: Path, params: Any) -> None:
        path.mkdir(parents=True)
        raise OSError("no space left on device")

    monkeypatch.setattr("jaxserve.checkpoint.orbax_cache._write", breaks_off)
    before = set(cache._folder.iterdir())
    keep(cache, checkpoint, dtype="float16")
    assert set(cache._folder.iterdir()) == before


def test_the_second_of_two_that_keep_the_same_changes_nothing(checkpoint, cache) -> None:
    entry = keep(cache, checkpoint)
    before = {path: path.stat().st_mtime_ns for path in files_of(entry)}
    keep(cache, checkpoint)
    assert {path: path.stat().st_mtime_ns for path in files_of(entry)} == before

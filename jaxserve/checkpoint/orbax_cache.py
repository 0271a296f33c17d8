"""Caches converted weights on disk, so that later starts need not convert them again.

Each entry is a folder with an Orbax checkpoint and a manifest of its files. Entries are written
atomically, and damaged entries are deleted. An engine starts even if the cache fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import psutil

from jaxserve import __version__
from jaxserve.checkpoint.checkpoint import Checkpoint

logger = logging.getLogger("jaxserve")

FORMAT = 2
"""Version of the conversion. Raise it when the same checkpoint gives different weights."""

WEIGHTS, MANIFEST = "weights", "manifest.json"

Params = dict[str, Any]


def entry_name(checkpoint: Checkpoint, layout: Mapping[str, Any]) -> str:
    """Returns the name of the cache entry for the converted weights of a checkpoint.

    The name is a hash of the checkpoint's path, config, file sizes and modification times, of the
    layout of the weights, and of the version of jaxserve.

    Args:
      checkpoint: where the weights come from.
      layout: the fields of `models.layout.Layout`; ``cut`` is empty, since entries hold whole
        arrays.
    """
    path = checkpoint.path.resolve()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in files]
    facts = [
        *(FORMAT, __version__, str(path), dict(layout), checkpoint.config),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


class WeightsCache:
    """Converted weights in a folder that only its owner can read.

    Args:
      folder: created when the first weights are saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restore(self, name: str, like: Params) -> Params | None:
        """Loads an entry to its devices; returns None if it is absent or damaged.

        Args:
          name: see `entry_name`.
          like: the tree of parameters with a ShapeDtypeStruct for each array. Arrays without a
            sharding go to the default device of JAX.
        """
        entry = self._folder / name
        if not entry.exists():
            return None
        try:
            _check_manifest(entry, like)
            return _read(entry / WEIGHTS, like)
        except Exception as error:  # every layer of Orbax raises its own types
            reason = str(error).partition("\n")[0][:200]
            logger.warning("%s is damaged; converting the weights again: %s", entry, reason)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def save(self, name: str, params: Params) -> None:
        """Writes weights to an entry. A failure is logged as a warning."""
        scratch = self._folder / f"{name}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_leftovers()
            _write(scratch / WEIGHTS, params)
            _write_manifest(scratch, params)
            if not (self._folder / name).exists():  # another engine may have written it
                scratch.rename(self._folder / name)
        except Exception as error:
            reason = str(error).partition("\n")[0][:200]
            logger.warning("cannot cache converted weights in %s: %s", self._folder, reason)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Removes unfinished entries of processes that no longer exist."""
        for path in self._folder.glob("*.tmp"):
            pid = path.name.split(".")[-2]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, params: Params) -> None:
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(params))


def _read(path: Path, like: Params) -> Params:
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)

    target = jax.tree.map(on_device, like)
    args = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
    )
    with ocp.Checkpointer(_handler()) as checkpointer:
        return checkpointer.restore(path.absolute(), args=args)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress, and decompressing would take longer than converting them.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _write_manifest(entry: Path, params: Params) -> None:
    """Writes the manifest of an entry and flushes all its files to disk."""
    facts = _facts(entry, params)
    with (entry / MANIFEST).open("w") as manifest:
        json.dump(facts, manifest)
    for path in entry.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _check_manifest(entry: Path, like: Params) -> None:
    """Raises ValueError unless files and arrays match the manifest."""
    noted, found = json.loads((entry / MANIFEST).read_text()), _facts(entry, like)
    wrong = sorted(n for n in noted.keys() | found.keys() if noted.get(n) != found.get(n))
    if wrong:
        raise ValueError(f"{wrong[0]} differs from the manifest")


def _facts(entry: Path, params: Params) -> dict[str, Any]:
    """Returns the sizes of the files of an entry, and shapes and dtypes of its arrays."""
    files = (path for path in entry.rglob("*") if path.is_file() and path != entry / MANIFEST)
    facts: dict[str, Any] = {str(p.relative_to(entry)): p.stat().st_size for p in files}
    for path, leaf in jax.tree.leaves_with_path(params):
        facts[jax.tree_util.keystr(path)] = [list(leaf.shape), leaf.dtype.name]
    return facts

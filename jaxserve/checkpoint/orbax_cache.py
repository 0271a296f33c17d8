"""Converted weights on disk, so that later starts need not convert them again.

Each entry is a folder: a checkpoint of Orbax, and a manifest of its files. It appears whole or not
at all, and one that is damaged is thrown away: a cache never keeps an engine from starting.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import psutil

from jaxserve import __version__
from jaxserve.checkpoint.checkpoint import Checkpoint

logger = logging.getLogger("jaxserve")

FORMAT = 1
"""Goes up whenever the same checkpoint becomes other weights than before."""

WEIGHTS, MANIFEST = "weights", "manifest.json"

Params = dict[str, Any]


def entry_name(checkpoint: Checkpoint, *, dtype: str, loop: str) -> str:
    """Names the weights that a checkpoint becomes.

    The name changes when a file of the checkpoint is replaced or written to, with its config, with
    the type and the layout of the weights, and with the version of jaxserve.
    """
    path = checkpoint.path.resolve()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in files]
    facts = [
        *(FORMAT, __version__, str(path), dtype, loop, checkpoint.config),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


class WeightsCache:
    """Weights that have been converted, in a folder that only its owner can read.

    Args:
      folder: is made when the first weights are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restore(self, name: str, like: Params) -> Params | None:
        """The weights of that name on the default device of jax, or None if there are none.

        ``like`` has a ShapeDtypeStruct in the place of each array.
        """
        entry = self._folder / name
        if not entry.exists():
            return None
        try:
            _check_manifest(entry, like)
            return _read(entry / WEIGHTS, like)
        except Exception as error:  # each layer below has errors of its own
            reason = str(error).partition("\n")[0][:200]
            logger.warning("%s is damaged, so weights are converted again: %s", entry, reason)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def save(self, name: str, params: Params) -> None:
        """Keeps weights under that name. What goes wrong is a warning."""
        scratch = self._folder / f"{name}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_leftovers()
            _write(scratch / WEIGHTS, params)
            _write_manifest(scratch, params)
            if not (self._folder / name).exists():  # another engine may have been faster
                scratch.rename(self._folder / name)
        except Exception as error:
            reason = str(error).partition("\n")[0][:200]
            logger.warning("converted weights cannot be kept in %s: %s", self._folder, reason)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Removes what processes that are gone have left half-written."""
        for path in self._folder.glob("*.tmp"):
            pid = path.name.split(".")[-2]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, params: Params) -> None:
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(params))


def _read(path: Path, like: Params) -> Params:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    target = jax.tree.map(on_device, like)
    args = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
    )
    with ocp.Checkpointer(_handler()) as checkpointer:
        return checkpointer.restore(path.absolute(), args=args)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress, and unpacking them would take longer than converting them.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _write_manifest(entry: Path, params: Params) -> None:
    """Notes what is in an entry, and sees to it that all of it is on the disk."""
    facts = _facts(entry, params)
    with (entry / MANIFEST).open("w") as manifest:
        json.dump(facts, manifest)
    for path in entry.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _check_manifest(entry: Path, like: Params) -> None:
    """Raises ValueError if a file is missing, cut off or new, or the arrays are not those."""
    noted, found = json.loads((entry / MANIFEST).read_text()), _facts(entry, like)
    wrong = sorted(n for n in noted.keys() | found.keys() if noted.get(n) != found.get(n))
    if wrong:
        raise ValueError(f"{wrong[0]} is not as it was written")


def _facts(entry: Path, params: Params) -> dict[str, Any]:
    """The sizes of the files of an entry, and the shapes and types of the arrays in it."""
    files = (path for path in entry.rglob("*") if path.is_file() and path != entry / MANIFEST)
    facts: dict[str, Any] = {str(p.relative_to(entry)): p.stat().st_size for p in files}
    for path, leaf in jax.tree.leaves_with_path(params):
        facts[jax.tree_util.keystr(path)] = [list(leaf.shape), leaf.dtype.name]
    return facts

"""Tells whether the files of a model have changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = frozenset({".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt"})
"""The endings of the files that a model is read from."""

FILES_HAVE_CHANGED = (
    "the files of the model have changed since the server started; restart the server"
)
"""The message of a process that was restarted and finds another fingerprint."""


def fingerprint(path: Path) -> str:
    """Returns a digest of the names, sizes and times of the files of a model.

    Args:
      path: the folder or the file of the model, which has been read before.
    """
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, *_size_and_time(file)) for file in paths if file.suffix in SUFFIXES]
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _size_and_time(file: Path) -> tuple[int, ...]:
    """Returns the size and the time of the last change; nothing for a link that leads nowhere."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns

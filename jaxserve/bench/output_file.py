"""Writes the results of a long measurement, whole or not at all."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_output(path: Path) -> None:
    """Raises OSError if no file can be written at ``path``. Changes nothing.

    Call it before a measurement, which may take hours.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the name of a file")
    if not path.exists() or path.is_file():
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a new file, which takes the place of ``path`` if the block succeeds.

    An existing pipe or device is yielded as it is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()  # what a link points to is replaced, not the link
    new = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield new
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)

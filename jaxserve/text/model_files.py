"""Reads the small files of a model. A name can stand for anything: a folder, a pipe, a device."""

from __future__ import annotations

import stat
from pathlib import Path

from jaxserve.errors import CheckpointError, ConfigError


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
      CheckpointError: it is not a file or cannot be read; see `check_file`.
      FileNotFoundError: it does not exist.
      UnicodeDecodeError: it is not UTF-8.
    """
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error


def check_file(path: Path) -> None:
    """Refuses what is not a file before it is opened: a pipe would block, a device never end.

    Raises:
      CheckpointError: it is not a file, or cannot be looked at.
      FileNotFoundError: it does not exist.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise CheckpointError(f"{path} must be a file, but it is {kind}")


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Returns the error for a file of a model that the system refuses to read."""
    return CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}")


def expand_home(path: str) -> Path:
    """Returns a path, with the home folder for ``~``.

    Raises:
      ConfigError: this user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path} is in a home folder that does not exist: set HOME, or give another path"
        ) from error

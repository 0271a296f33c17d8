"""Keeps compiled programs on disk for the next process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import jax
from jax._src import compilation_cache

from jaxserve.ipc.messages import Decision
from jaxserve.runner.program_folder import ProgramFolder


def keep_compiled_programs(folder: str, *, max_bytes: int) -> Decision:
    """Makes jax store every compiled program in a folder, and search the folder before it compiles.

    Programs are loaded as code, so the folder is created with permissions for its owner only.
    Programs are not kept if ``folder`` is empty, or does not exist and cannot be made. They are
    only read if it cannot be written to.

    Args:
      folder: the path of the folder; ``~`` is the home folder.
      max_bytes: the largest size of the folder; see `ProgramFolder`.

    Returns:
      Whether programs are kept and why, shown to the user.
    """
    what = "compiled programs"
    if not folder:
        return Decision(what, "not kept", "as asked")
    try:
        path = Path(folder).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except RuntimeError:
        return Decision(what, "not kept", f"{folder} is in the home folder, and this user has none")
    except OSError as error:
        return Decision(what, "not kept", f"cannot make {path}: {error.strerror}")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With line numbers in it, the key of a kernel would change with every edit of its source file.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # jax looks for the folder at its first compilation only, which may already have happened. There
    # is no public way to replace the cache itself.
    compilation_cache.reset_cache()
    compilation_cache._cache = cast(Any, ProgramFolder(path, max_bytes=max_bytes))
    if not os.access(path, os.W_OK):
        return Decision(what, f"read from {path}", "new ones are not kept: it cannot be written to")
    return Decision(what, f"kept in {path}", "makes the next start faster")

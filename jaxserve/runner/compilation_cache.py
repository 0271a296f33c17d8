"""Keeps compiled programs on disk for the next process."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.ipc.messages import Decision


def keep_compiled_programs(folder: str) -> Decision:
    """Makes jax store every compiled program in a folder, and search the folder before it compiles.

    Programs are loaded as code, so the folder is created with permissions for its owner only.
    Programs are not kept if ``folder`` is empty or cannot be written to.

    Returns:
      Whether programs are kept and why, shown to the user.
    """
    what = "compiled programs"
    if not folder:
        return Decision(what, "not kept", "as asked")
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return Decision(what, "not kept", f"cannot make {path}: {error.strerror}")
    if not os.access(path, os.W_OK):
        return Decision(what, "not kept", f"cannot write to {path}")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # With line numbers in it, the key of a kernel would change with every edit of its source file.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # jax looks for the folder at its first compilation only, which may already have happened.
    compilation_cache.reset_cache()
    return Decision(what, f"kept in {path}", "makes the next start faster")

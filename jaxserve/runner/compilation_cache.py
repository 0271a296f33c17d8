"""Compiled programs that outlive the process."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.ipc.messages import Decision


def keep_compiled_programs(folder: str) -> Decision:
    """Has jax keep every program that this process compiles in a folder, and look there first.

    Programs are loaded as code, so the folder is made for its owner only. An empty name, or a
    folder that cannot be written, means that programs are not kept.

    Returns what was settled.
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
    # Line numbers of our sources are part of what a kernel is known by, unless they are left out.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # jax decides at its first compilation whether there is a folder; there may have been one.
    compilation_cache.reset_cache()
    return Decision(what, f"kept in {path}", "makes the next start faster")

"""Shapes and dtypes of arrays are checked under pytest, and not outside."""

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from jaxserve.ops.attention import AttentionMeta

ROOT = Path(__file__).parents[1]
CHECKED = (
    "jaxserve/ops",
    "jaxserve/models",
    "jaxserve/sampling",
    "jaxserve/runner",
    "pallas_kernels",
)
ARRAY = re.compile(r"\b(Array|Leaf|ndarray)\b")

WRONG_SHAPE = """
import numpy as np
from jaxserve.ops.attention import AttentionMeta
n = np.zeros(3, np.int32)
AttentionMeta(positions=n, slots=n[:2], block_tables=n[None], seq_lens=n[:1], query_start=n[:2])
"""


def test_a_wrong_shape_and_a_wrong_dtype_fail_under_pytest() -> None:
    n = np.zeros(3, np.int32)
    right = {"slots": n, "block_tables": n[None], "seq_lens": n[:1], "query_start": n[:2]}
    AttentionMeta(positions=n, **right)
    with pytest.raises(jaxtyping.TypeCheckError, match="slots"):
        AttentionMeta(positions=n, **right | {"slots": n[:2]})
    with pytest.raises(jaxtyping.TypeCheckError, match="positions"):
        AttentionMeta(positions=n.astype(np.float32), **right)


def test_nothing_is_checked_outside_pytest() -> None:
    command = [sys.executable, "-c", WRONG_SHAPE]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in CHECKED
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py"
    ],
)
def test_every_annotation_can_be_evaluated(module: str) -> None:
    """An array annotation that cannot be evaluated would count as Any and check nothing."""
    for function in functions(import_module(module)):
        unwrapped = inspect.unwrap(function)
        if any(ARRAY.search(str(hint)) for hint in unwrapped.__annotations__.values()):
            typing.get_type_hints(unwrapped, include_extras=True)


def functions(module: object) -> Iterator[Callable]:
    """Yields the functions and methods that a module defines."""
    name = module.__name__
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == name:
            members = (m.fget if isinstance(m, property) else m for m in vars(value).values())
            yield from (m for m in members if inspect.isfunction(m) and m.__module__ == name)
        elif inspect.isfunction(value) and value.__module__ == name:
            yield value

"""The comparison of logits with `transformers`, run with a reference that needs no torch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.testing import one_step
from jaxserve.testing.tiny import write_checkpoint

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")
CONFIGS = json.loads(str(GOLDEN["configs"]))


@pytest.mark.parametrize(("model", "shift"), [("gemma2", 0.0), ("llama", 0.25)])
def test_prints_the_largest_difference_of_each_dtype_and_file(
    model, shift, tmp_path, monkeypatch, capsys
):
    """Logits of safetensors in float32, moved by ``shift``, stand for the reference."""

    def logits_of(config, tensors, prompt, *, dtype="float32"):
        path = write_checkpoint(tmp_path / "reference", config, tensors)
        return one_step.logits_of(path, prompt.tolist()) + shift

    make_golden = SimpleNamespace(CONFIGS=CONFIGS, logits_of=logits_of)
    monkeypatch.setitem(sys.modules, "make_golden", make_golden)
    compare = importlib.import_module("compare_logits")
    status = compare.main(["--models", model, "--seeds", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [model, dtype, kind]
        for dtype in ("float32", "bfloat16")
        for kind in ("safetensors", "GGUF")
    ]
    differences = [float(row[4]) for row in rows]
    if shift:
        assert status == 1
        assert differences[:2] == [0.25, 0.25]
    else:
        assert status == 0
        assert differences[0] == 0 <= differences[1] < 1e-5 < differences[2]

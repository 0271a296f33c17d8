#!/usr/bin/env python3
"""Compares a format of the weights with dense ones: how far logits move, and how long a step takes.

    python scripts/compare_formats.py [--model MODEL] [--quantization int8] [--text FILE ...]

The first table compares the distribution of the next token after every token of the text with that
of the dense model in float32. The text is cut into windows of 512 tokens, which run in steps of 512
or of 64 tokens (rows).

- KL: the Kullback-Leibler divergence from float32, in nats: its mean, and the 99th percentile
- agreement: the part of the tokens after which the most likely token is the same
- perplexity: of the text itself

The second table has the median time of decode steps of the whole model, over a context of 256
tokens each. Steps of both formats alternate, so that other programs slow down both.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.config import ModelConfig
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.layout import Layout
from jaxserve.models.loading import Params, load_params
from jaxserve.models.registry import gguf_names, read_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.ops import xla_attention
from jaxserve.ops.attention import KVCache, StepMeta
from jaxserve.ops.linear import FORMATS
from jaxserve.runner.device import current_device

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 512
BLOCK_SIZE = 16
CONTEXT = 256
ROWS = (2, 16, 64)

Graph = nnx.GraphDef[CausalLM]
Load = Callable[[Layout], tuple[Graph, Params]]
"""Loads the weights of the model in a layout."""


def run_model(
    graphdef: Graph, params: Params, kv: KVCache, tokens: jax.Array, meta: StepMeta
) -> tuple[jax.Array, KVCache]:
    """Returns the logits f32[T, V] of a step with tokens i32[T], and the cache."""
    model = nnx.merge(graphdef, params)
    hidden, kv = model(tokens, kv, meta, attention=xla_attention.backend(current_device()))
    return model.logits(hidden), kv


def empty_cache(spec: ModelSpec, num_blocks: int, dtype: str) -> KVCache:
    """Returns a cache of zeros."""
    shape = (spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def window_meta(start: int, size: int) -> StepMeta:
    """Returns a step of one request, with ``size`` tokens of a window."""
    positions = np.arange(start, start + size, dtype=np.int32)
    return StepMeta(
        positions=positions,
        slots=positions[None] + BLOCK_SIZE,
        block_tables=np.arange(1, 1 + WINDOW // BLOCK_SIZE, dtype=np.int32)[None, None],
        seq_lens=np.array([start + size], np.int32),
        query_start=np.array([0, size], np.int32),
    )


def decode_meta(rows: int) -> StepMeta:
    """Returns a step of one token for each of ``rows`` requests."""
    width = CONTEXT // BLOCK_SIZE
    tables = np.arange(1, 1 + rows * width, dtype=np.int32).reshape(rows, width)
    return StepMeta(
        positions=np.full(rows, CONTEXT - 1, np.int32),
        slots=tables[None, :, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        block_tables=tables[None],
        seq_lens=np.full(rows, CONTEXT, np.int32),
        query_start=np.arange(rows + 1, dtype=np.int32),
        decode_only=True,
    )


def log_probabilities(
    load: Load,
    spec: ModelSpec,
    layout: Layout,
    windows: np.ndarray,
    *,
    size: int = WINDOW,
) -> np.ndarray:
    """Returns the log probabilities f32[W, T, V] after every token of windows [W, T].

    Steps have ``size`` tokens, since a format may multiply large and small steps differently.
    """
    graphdef, params = load(layout)
    step = jax.jit(functools.partial(run_model, graphdef), donate_argnums=1)
    kv, found = empty_cache(spec, 1 + WINDOW // BLOCK_SIZE, layout.dtype), []
    for window in windows:
        for start in range(0, WINDOW, size):
            part, meta = window[start : start + size], window_meta(start, size)
            logits, kv = step(params, kv, part, meta)
            found.append(np.asarray(jax.nn.log_softmax(logits)))
    return np.reshape(found, (*windows.shape, -1))


def accuracy(windows: np.ndarray, reference: np.ndarray, tested: np.ndarray) -> str:
    """Returns a line of the first table."""
    kl = [(np.exp(p) * (p - q)).sum(-1) for p, q in zip(reference, tested, strict=True)]
    same = np.mean(reference.argmax(-1) == tested.argmax(-1))
    next_tokens = np.take_along_axis(tested[:, :-1], windows[:, 1:, None], axis=-1)
    perplexity = np.exp(-next_tokens.mean(dtype=np.float64))
    return f"{np.mean(kl):10.4f} {np.quantile(kl, 0.99):10.4f} {same:10.4f} {perplexity:10.3f}"


def step_times(
    load: Load,
    spec: ModelSpec,
    layouts: Sequence[Layout],
    rows: int,
    repeats: int,
) -> np.ndarray:
    """Returns the seconds [layout, repeat] of decode steps; the layouts alternate."""
    runs = []
    for layout in layouts:
        graphdef, params = load(layout)
        step = jax.jit(functools.partial(decode, graphdef), donate_argnums=1)
        num_blocks = 1 + rows * CONTEXT // BLOCK_SIZE
        runs.append([step, params, empty_cache(spec, num_blocks, layout.dtype)])
    tokens, meta, seconds = np.arange(rows, dtype=np.int32), decode_meta(rows), []
    for _ in range(repeats + 1):
        for run in runs:
            step, params, kv = run
            start = time.perf_counter()
            best, run[2] = jax.block_until_ready(step(params, kv, tokens, meta))
            seconds.append(time.perf_counter() - start)
            del best, kv
    return np.reshape(seconds, (repeats + 1, len(layouts))).T[:, 1:]  # the first one compiles


def decode(
    graphdef: Graph, params: Params, kv: KVCache, tokens: jax.Array, meta: StepMeta
) -> tuple[jax.Array, KVCache]:
    """Returns the most likely tokens i32[T] of a step, and the cache."""
    logits, kv = run_model(graphdef, params, kv, tokens, meta)
    return logits.argmax(-1), kv


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model, help="as for the server")
    parser.add_argument(
        "--quantization", choices=list(FORMATS), default="int8", help="format to compare with dense"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of activations and of dense weights"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files to read (default: the documents of jaxserve)"
    )
    parser.add_argument("--windows", type=int, default=8, help="largest number of windows")
    parser.add_argument("--repeats", type=int, default=40, help="steps of each kind; 0: no times")
    options = parser.parse_args(arguments)

    checkpoint = open_checkpoint(options.model, names_of=gguf_names)
    spec = read_spec(checkpoint.config)
    load = functools.partial(load_params, checkpoint, spec)
    files = options.text or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    tokens = [t for file in files for t in checkpoint.tokenizer().encode(file.read_text())]
    count = min(options.windows, len(tokens) // WINDOW)
    if not count:
        parser.error(f"the text must have at least {WINDOW} tokens, got {len(tokens)}")
    windows = np.array(tokens[: count * WINDOW], np.int32).reshape(count, WINDOW)

    print(f"{count} windows of {WINDOW} tokens of {', '.join(file.name for file in files)}")
    print(f"{'':28s} {'mean KL':>10s} {'p99 KL':>10s} {'agreement':>10s} {'perplexity':>10s}")
    reference = log_probabilities(load, spec, Layout("float32", "scan"), windows)
    dense, tested = (Layout(options.dtype, "scan", f) for f in ("dense", options.quantization))
    exact = Layout("float32", "scan", options.quantization)
    print(f"{'dense float32':28s} {accuracy(windows, reference, reference)}", flush=True)
    for layout, size in ((dense, WINDOW), (exact, WINDOW), (tested, WINDOW), (tested, ROWS[-1])):
        found = log_probabilities(load, spec, layout, windows, size=size)
        name = f"{layout.weights} {layout.dtype}, {size} rows"
        print(f"{name:28s} {accuracy(windows, reference, found)}", flush=True)

    for rows in ROWS if options.repeats else ():
        seconds = step_times(load, spec, (dense, tested), rows, options.repeats)
        ratio = np.median(seconds[1] / seconds[0])
        medians = [f"{1e3 * np.median(each):7.1f} ms" for each in seconds]
        names = f"{dense.weights} {medians[0]}, {tested.weights} {medians[1]}"
        print(f"step of {rows:3d} rows: {names}, ratio {ratio:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A tiny transformer with plain attention, and fixtures that run it in an engine core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.plan import Sizes
from jaxserve.core.scheduler import Scheduler
from jaxserve.core.speculation import Speculation
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import RequestOutput, Submit
from jaxserve.ops.attention import AttentionBackend, AttentionMeta, KVCache
from jaxserve.runner.kv_cache import abstract
from jaxserve.runner.proposer import ProposeFn
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling.declaration import Stage
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import tolerance

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 300, 2, 4, 2, 8
WIDTH = HEADS * HEAD_DIM
SIZES = Sizes(
    max_model_len=96, block_size=4, num_blocks=257, max_num_seqs=4, max_num_batched_tokens=32
)
TABLE_WIDTHS = (8, 24)
GAIN = 16.0
"""The growth of a small random change of the embedding up to the last layer, in root mean square;
measured in float64. The weights are three times as large as those that would keep its size."""


def write(kv: KVCache, layer: int, k: jax.Array, v: jax.Array, meta: AttentionMeta) -> KVCache:
    def into(cache: jax.Array, new: jax.Array) -> jax.Array:
        flat = cache.reshape(LAYERS, -1, KV_HEADS, HEAD_DIM)
        return flat.at[layer, meta.slots].set(new, mode="drop").reshape(cache.shape)

    return KVCache(into(kv.k, k), into(kv.v, v))


def attend(q, kv, layer, meta, *, scale, window=None, soft_cap=None):
    """Attends from each query to the whole block table of its request."""
    owner = jnp.searchsorted(meta.query_start[1:], jnp.arange(len(q)), side="right")
    tables = meta.block_tables[jnp.minimum(owner, len(meta.block_tables) - 1)]
    k, v = (c[layer][tables].reshape(len(q), -1, KV_HEADS, HEAD_DIM) for c in (kv.k, kv.v))
    grouped = q.reshape(len(q), KV_HEADS, -1, HEAD_DIM)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, k) * scale
    seen = jnp.arange(k.shape[1]) <= meta.positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), -1)
    values = jnp.where(seen[:, :, None, None], v, 0.0)
    return jnp.einsum("tkgs,tskd->tkgd", weights, values).reshape(q.shape)


BACKEND = AttentionBackend("readable", write, attend)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """Two layers of attention and one matrix each; ``params`` is a dict of arrays."""

    params: dict[str, jax.Array]

    @staticmethod
    def random_params(seed: int = 0) -> dict[str, jax.Array]:
        rng = np.random.default_rng(seed)
        shapes = {
            "embed": (VOCAB, WIDTH),
            "qkv": (LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "mix": (LAYERS, WIDTH, WIDTH),
            "head": (WIDTH, VOCAB),
        }
        scale = jnp.asarray(rng.uniform(0.5, 1.5, WIDTH), jnp.float32)
        return {"scale": scale} | {
            name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32) * 3
            for name, shape in shapes.items()
        }

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[:, None] / 10 ** (jnp.arange(WIDTH // 2) / 8)
        where = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return self.params["embed"][tokens] + where

    def _qkv(self, x: jax.Array, layer: int) -> list[jax.Array]:
        flat = (x @ self.params["qkv"][layer]).reshape(len(x), -1, HEAD_DIM)
        return jnp.split(flat, [HEADS, HEADS + KV_HEADS], 1)

    def _finish(self, x: jax.Array, attended: jax.Array, layer: int) -> jax.Array:
        return jnp.tanh(x + attended.reshape(x.shape) @ self.params["mix"][layer])

    def __call__(self, tokens, kv, meta, *, attention):
        x, meta = self._embed(tokens, meta.positions), meta.of(0)
        for layer in range(LAYERS):
            q, k, v = self._qkv(x, layer)
            kv = attention.write(kv, layer, k, v, meta)
            x = self._finish(x, attention.attend(q, kv, layer, meta, scale=0.3), layer)
        return x, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.final(hidden) @ self.params["head"]

    def final(self, hidden: jax.Array) -> jax.Array:
        return hidden * self.params["scale"]

    def tolerance(self, num_tokens: int, *, of: Literal["final", "logits"]) -> float:
        """Returns the largest difference allowed between two float32 evaluations of a sequence.

        It covers the sums of each layer and, for pooling, a mean. Hidden states are at most 1, and
        `final` scales them by at most 1.5. A logit is a sum over WIDTH of their products with
        numbers of standard deviation 3 / sqrt(WIDTH).
        """
        num_terms = LAYERS * (WIDTH + HEAD_DIM + num_tokens + WIDTH) + num_tokens
        if of == "final":
            return tolerance.rounding("float32", num_terms, scale=1.5 * GAIN)
        return tolerance.rounding("float32", num_terms + WIDTH, scale=3 * 1.5 * GAIN)

    def last_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the logits f32[V] after a sequence, computed without a cache."""
        return np.array(self.logits(self.hidden(tokens)[-1]))

    def hidden(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the hidden states f32[T, D] of a sequence, computed without a cache."""
        # Attention is causal, so padding to one length changes nothing.
        padded = np.zeros(SIZES.max_model_len, np.int32)
        padded[: len(tokens)] = tokens
        return np.array(_hidden(self.params, padded))[: len(tokens)]


@jax.jit
def _hidden(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    model = TinyModel(params)
    x = model._embed(tokens, jnp.arange(len(tokens)))
    causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
    for layer in range(LAYERS):
        q, k, v = model._qkv(x, layer)
        k, v = (jnp.repeat(a, HEADS // KV_HEADS, 1) for a in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) * 0.3
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1)
        x = model._finish(x, jnp.einsum("hts,shd->thd", weights, v), layer)
    return x


def make_runner(
    params: dict[str, jax.Array] | None = None,
    *,
    sizes: Sizes = SIZES,
    stages: Sequence[Stage] = (),
    propose: ProposeFn | None = None,
    checks_finite: bool = True,
) -> ModelRunner:
    cache = abstract(
        num_layers=LAYERS,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
    )
    # Slots that were never written may hold anything.
    kv = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), cache)
    return ModelRunner(
        TinyModel,
        params or TinyModel.random_params(),
        kv,
        attention=BACKEND,
        sizes=sizes,
        vocab_size=VOCAB,
        table_widths=TABLE_WIDTHS,
        stages=stages,
        propose=propose,
        checks_finite=checks_finite,
    )


@pytest.fixture(scope="session")
def runner() -> ModelRunner:
    """Compiled once for all tests. The block pool of a scheduler may be smaller than its cache."""
    return make_runner()


@pytest.fixture(scope="session")
def new_runner() -> Callable[..., ModelRunner]:
    """``new_runner(stages=...)`` returns a runner of its own."""
    return make_runner


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    return TinyModel(TinyModel.random_params())


Generate = Callable[..., dict[str, list[RequestOutput]]]


@pytest.fixture(scope="session")
def generate(runner: ModelRunner) -> Generate:
    """``generate(requests, depth=, max_num_seqs=, max_num_batched_tokens=, num_blocks=)``.

    ``requests``: ID -> (prompt, params). Returns the outputs by ID. ``stagger`` is the number of
    steps from one arrival to the next.
    """

    def run(
        requests: dict[str, tuple[list[int], SamplingParams]],
        *,
        depth: int = 1,
        stagger: int = 0,
        runner: ModelRunner = runner,
        speculation: Speculation | None = None,
        **sizes: int,
    ) -> dict[str, list[RequestOutput]]:
        names = ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks"]
        defaults = {name: getattr(SIZES, name) for name in [*names, "block_size"]}
        scheduler = Scheduler(**{**defaults, **sizes}, speculation=speculation)
        core = EngineCore(scheduler, runner, depth=depth)
        waiting = [Submit(name, prompt, params) for name, (prompt, params) in requests.items()]
        outputs: dict[str, list[RequestOutput]] = {name: [] for name in requests}
        step = 0
        while waiting or core.has_work:
            while waiting and (not stagger or step % stagger == 0):
                core.add(waiting.pop(0))
                if stagger:
                    break
            for output in core.step(float(step)):
                outputs[output.request_id].append(output)
            step += 1
        run.preemptions = core.stats().total_preemptions  # type: ignore[attr-defined]
        run.stats = core.stats()  # type: ignore[attr-defined]
        return outputs

    return run


@pytest.fixture(scope="session")
def build_runner() -> Callable[..., ModelRunner]:
    """See `make_runner`."""
    return make_runner


@pytest.fixture(scope="session")
def tiny_sizes() -> Sizes:
    return SIZES

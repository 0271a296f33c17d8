"""The examples of docs/extending.md work as described."""

import re
import sys
import types
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import server.app
from jaxserve.core import policy
from jaxserve.core.scheduler import Scheduler
from jaxserve.device import Device
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import Submit
from jaxserve.models import registry
from jaxserve.models.loading import load_params
from jaxserve.models.registry import Family, read_spec
from jaxserve.ops import attention
from jaxserve.ops.attention import AttentionMeta, KVCache
from jaxserve.runner import proposer
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel
from jaxserve.testing.fake_runner import FakeRunner
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.tiny import random_tensors, tiny_config
from jaxserve.testing.tolerance import rounding
from server.state import ServerState

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
CPU = Device("cpu", "a CPU", free_bytes=2**30, has_native_bf16=False)


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The code block under the heading that the test names, as a module named ``example``."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (text,) = [s for s in section if s.startswith(request.param)]
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(code, f"docs/extending.md: {request.param}", "exec"), module.__dict__)
    return module


def example_of(section: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [section], indirect=True)


class InMemory:
    """A checkpoint of the given tensors."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.tensor_names = list(weights)

    def tensors(self):
        yield from self.weights.items()


@example_of("A model")
def test_model_loads_the_same_weights_as_llama(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.MODELS, "ExampleForCausalLM", Family("example:ExampleForCausalLM"))
    config = tiny_config()
    weights = random_tensors(config)
    renamed = {n.replace("model.", "transformer."): t for n, t in weights.items()}

    def load(architecture: str, tensors: dict[str, np.ndarray]):
        spec = read_spec({**config, "architectures": [architecture]})
        return load_params(InMemory(tensors), spec, dtype="float32", loop="scan")[1]

    llama, same = load("LlamaForCausalLM", weights), load("ExampleForCausalLM", renamed)
    jax.tree.map(np.testing.assert_array_equal, llama, same)


@example_of("An attention backend")
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (4, None), (None, 5.0)])
def test_attention_backend_equals_xla(example, monkeypatch, window, soft_cap) -> None:
    """Runs a request of 20 tokens with one new token, and a request of 5 new tokens."""
    monkeypatch.setitem(attention.BACKENDS, "example", "example")
    rng = np.random.default_rng(0)
    shape = (1, 8, 16, 2, 4)
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    tables = np.array([[3, 5], [2, 99]], np.int32)
    for x in (k, v):
        x[0, 5, 4:] = np.nan
        x[0, 2, 5:] = np.nan
    meta = AttentionMeta(
        positions=jnp.array([19, 0, 1, 2, 3, 4]),
        slots=jnp.array([84, 32, 33, 34, 35, 36]),
        block_tables=jnp.array(tables),
        seq_lens=jnp.array([20, 5]),
        query_start=jnp.array([0, 1, 6]),
    )
    q = jnp.asarray(rng.standard_normal((6, 4, 4), np.float32))
    kv = KVCache(jnp.asarray(k), jnp.asarray(v))
    found, expected = (
        attention.load(name, CPU).attend(
            q, kv, 0, meta, scale=0.5, window=window, soft_cap=soft_cap
        )
        for name in ("example", "xla")
    )
    # Scores of four products and means of up to twenty values, all of them standard normal.
    atol = rounding("float32", 4 + 20, scale=5)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@example_of("A sampler stage")
def test_sampler_stage_drops_unlikely_tokens(example: types.ModuleType) -> None:
    probabilities = jnp.array([[0.5, 0.4999, 0.9e-4, 1e-5]])
    kept = example.drop_unlikely(jnp.log(probabilities) + 3.0, None)
    assert np.isfinite(kept).tolist() == [[True, True, False, False]]


@example_of("A scheduling policy")
def test_policy_runs_short_prompts_first(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy.POLICIES, "short_first", example.short_first)
    sizes = {"num_blocks": 32, "block_size": 16}
    scheduler = Scheduler(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, policy="short_first", **sizes
    )
    core = EngineCore(scheduler, FakeRunner(FakeModel(), **sizes), depth=2)
    params = SamplingParams(temperature=0, max_tokens=2, seed=0)
    for length in (30, 10, 20):
        core.add(Submit(f"{length}", [1] * length, params))
    finished = []
    while core.has_work:
        finished += [o.request_id for o in core.step(0.0) if o.finish_reason is not None]
    assert finished == ["10", "20", "30"]


@example_of("A proposer of drafts")
def test_proposer_repeats_the_last_token(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(proposer.PROPOSERS, "repeat", "example")
    tokens = jnp.array([[7, 5, 5, 9], [1, 2, 9, 9], [4, 9, 9, 9], [0, 0, 9, 9]])
    drafts, counts = proposer.load("repeat")(tokens, jnp.array([3, 2, 1, 0]), num_drafts=2)
    assert counts.tolist() == [2, 0, 0, 0]
    assert drafts[0].tolist() == [5, 5]


@example_of("An endpoint")
async def test_endpoint_counts_tokens(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.app, "ROUTES", [*server.app.ROUTES, *example.routes])
    app = server.app.create_app(ServerState(scripted_text_engine("hello")))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post("/count", json={"text": "hello world"})
        assert reply.json() == {"tokens": 2}
        assert (await client.post("/count", json={"text": 5})).status_code == 400

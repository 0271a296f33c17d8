"""The examples of docs/extending.md work as described."""

import math
import re
import sys
import types
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import server.app
from jaxserve import models
from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.core import policy
from jaxserve.core.scheduler import Scheduler
from jaxserve.device import Device
from jaxserve.engine.core import EngineCore
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import Submit
from jaxserve.llm import LLM
from jaxserve.models import registry
from jaxserve.models.layout import Layout, Loop
from jaxserve.models.loading import load_params
from jaxserve.models.registry import read_spec
from jaxserve.ops import attention
from jaxserve.ops.attention import AttentionMeta, KVCache, StepMeta
from jaxserve.ops.linear import FORMATS
from jaxserve.parsing.events import ContentDelta, ToolCallArguments
from jaxserve.parsing.registry import TOOL_PARSERS, tool_parser
from jaxserve.runner import proposer
from jaxserve.sampling import registry as registry_of_stages
from jaxserve.sampling.registry import STAGES
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing.fake_model import FakeModel
from jaxserve.testing.fake_runner import FakeRunner
from jaxserve.testing.reference import Reference
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.tiny import random_tensors, tiny_config, write_checkpoint
from jaxserve.testing.tolerance import assert_close, rounding
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


def test_the_table_states_the_lines_of_each_example() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    stated = dict(re.findall(r"^\| (an? [^|]+) \|.* (\d+) lines \|$", sections[0], re.MULTILINE))
    counted = {}
    for section in sections[1:]:
        (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
        counted[section.splitlines()[0].replace("A", "a", 1)] = str(len(code.splitlines()))
    assert stated == counted


class InMemory:
    """A checkpoint of the given tensors."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.tensor_names = list(weights)

    def tensors(self):
        yield from self.weights.items()


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def example_logits(tensors: dict[str, np.ndarray], num_layers: int, token: int) -> np.ndarray:
    """Computes the model of the example in float64 for a prompt of one token.

    Such a token attends to itself only, so every head of a group returns the value of the group.
    """
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    x = t["transformer.wte.weight"][token]
    for i in range(num_layers):
        at = f"transformer.h.{i}."
        y = normed(x, t[at + "ln.weight"])
        values = (t[at + "attn.v.weight"] @ y).reshape(2, 16)
        attended = t[at + "attn.out.weight"] @ np.repeat(values, 2, axis=0).ravel()
        gate, up = (t[at + f"mlp.{part}.weight"] @ y for part in ("gate", "up"))
        x = x + attended + t[at + "mlp.down.weight"] @ (gelu(gate) * up)
    return t["transformer.wte.weight"] @ normed(x, t["transformer.ln_f.weight"])


@example_of("A model")
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_model_computes_what_it_describes(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    models.register("ExampleForCausalLM", "example:ExampleForCausalLM")
    config = tiny_config("ExampleForCausalLM")
    spec = read_spec(config)
    tensors = random_tensors(config)
    graphdef, params = load_params(InMemory(tensors), spec, Layout("float32", loop))
    model = nnx.merge(graphdef, params)
    kv = KVCache(*(jnp.zeros((spec.num_layers, 2, 16, 2, 16)) for _ in range(2)))
    meta = StepMeta(
        positions=jnp.array([0, 0]),
        slots=jnp.array([[16, 32]]),
        block_tables=jnp.array([[[1]]]),
        seq_lens=jnp.array([1]),
        query_start=jnp.array([0, 1]),
    )
    backend = attention.load("xla", CPU)
    hidden, _ = model(jnp.array([7, 0]), kv, meta, attention=backend)
    expected = example_logits(tensors, spec.num_layers, 7)
    assert_close(model.logits(hidden)[0], expected, num_tokens=1, config=config)


@example_of("A weight format")
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_weight_format_stores_a_model_in_float8(example, monkeypatch, loop) -> None:
    monkeypatch.setitem(FORMATS, "float8", "example:Float8")
    config = tiny_config()
    spec, weights = read_spec(config), InMemory(random_tensors(config))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)), jnp.float32)
    found = []
    for name in ("dense", "float8"):
        graphdef, params = load_params(weights, spec, Layout("float32", loop, name))
        model = nnx.merge(graphdef, params)
        vectors = model.embed(jnp.array([1, 2, 500]))
        found.append((np.asarray(vectors), np.asarray(model.logits(x))))
        stored = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    assert stored == {"float8_e4m3fn", "float32"}
    # A float of 8 bits has three bits after the first: it is rounded by a sixteenth at most.
    (vectors, logits), (vectors8, logits8) = found
    np.testing.assert_allclose(vectors8, vectors, rtol=1 / 16, atol=1e-3)
    correlation = np.corrcoef(logits.ravel(), logits8.ravel())[0, 1]
    assert 0.99 < correlation < 1


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.usefixtures("compile_quickly")
@example_of("A sampler stage")
@pytest.mark.parametrize("where", ["in the tree", "by its name", "as an object"])
def test_sampler_stage_lowers_recent_tokens(example, monkeypatch, checkpoint, where) -> None:
    """One file, and one line in the tree or one argument."""
    added = {"by its name": ["example:stage"], "as an object": [example.stage]}.get(where, [])
    if not added:
        monkeypatch.setattr(registry_of_stages, "STAGES", (*STAGES, "example:stage"))
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    quiet = {"warmup": False, "compilation_cache_dir": "", "show_progress": False}
    penalties = [0.0, 0.3, 1000.0]
    prompt, count = [5, 6, 7], 80
    params = [
        SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, extra_args={"recent_penalty": penalty}
        )
        for penalty in penalties
    ]
    with LLM(str(checkpoint), logits_processors=added, **settings, **quiet) as llm:
        outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="recent_penalty must be a number between"):
            llm.generate([prompt], SamplingParams(extra_args={"recent_penalty": -1.0}))
    reference = Reference(dict(open_checkpoint(str(checkpoint)).tensors()))
    for penalty, output in zip(penalties, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        assert len(tokens) == len(prompt) + count
        logits = reference.logits(tokens)
        expected = []
        for length in range(len(prompt), len(tokens)):
            logits[length - 1][np.unique(tokens[max(0, length - 64) : length])] -= penalty
            expected.append(int(logits[length - 1].argmax()))
        assert tokens[len(prompt) :] == expected
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


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


@example_of("A format of tool calls")
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_format_of_tool_calls_reads_calls_between_content(example, monkeypatch, cut: int) -> None:
    monkeypatch.setitem(TOOL_PARSERS, "example", "example:example")
    parser = tool_parser("example", {"add": {}})
    text = 'Sum: CALL add {"a": [1, "}"]}; and CALL home {"now": 1}; or CALL add {};'
    events = [e for at in range(0, len(text), cut) for e in parser.push(text[at : at + cut])]
    events += parser.finish()
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    # White space before a call is dropped.
    assert content == 'Sum: and CALL home {"now": 1}; or'
    calls = [""] * parser.num_calls
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index] += event.text
    assert calls == ['{"a": [1, "}"]}', "{}"]
    assert parser.num_complete_calls == 2

"""Checks, admission and the streams of completions."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from jaxserve.client.in_process import InProcessEngine
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    UnknownModelError,
)
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.front.outputs import MAX_DELTA_TOKENS, Delta
from jaxserve.front.requests import GenerateRequest
from jaxserve.front.served_model import ServedModel
from jaxserve.front.text_engine import TextEngine
from jaxserve.ipc.messages import FinishReason, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.scripted_engine import READY
from jaxserve.testing.scripted_text_engine import scripted_text_engine
from jaxserve.testing.waiting import until

GREEDY = SamplingParams(temperature=0)


def make_request(prompts, params: SamplingParams, **options) -> GenerateRequest:
    return GenerateRequest(prompts=prompts, params=params, **options)


async def collect(deltas) -> list[Delta]:
    async with aclosing(deltas):
        return [delta async for delta in deltas]


async def complete(text_engine: TextEngine, params: SamplingParams = GREEDY, prompt=(1, 2, 3)):
    deltas = await collect(text_engine.generate(make_request([list(prompt)], params)))
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return "".join(d.text for d in deltas), deltas[-1]


async def test_the_end_token_is_counted_but_not_shown() -> None:
    text_engine = scripted_text_engine("hello world")
    deltas = await collect(text_engine.generate(make_request([[1, 2]], GREEDY)))
    assert "".join(d.text for d in deltas) == "hello world"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert sum(len(d.token_ids) for d in deltas) == 3
    assert text_engine.num_in_flight == 0
    assert text_engine.engine.aborted == []


@pytest.mark.parametrize("tokens_per_output", [1, 2, 7])
@pytest.mark.parametrize(
    ("params", "text", "num_tokens", "stop_reason"),
    [
        ({"stop": ("in the",)}, "hello ", 4, "in the"),
        ({"stop": ("n th", "lo i")}, "hel", 3, "lo i"),
        ({"stop": ("in",), "include_stop_str_in_output": True}, "hello in", 3, "in"),
        ({"stop": ("in!",)}, "hello in the world", 6, None),
        ({"stop_token_ids": (267,)}, "hello in", 4, 267),
        ({"stop": ("hello", "world"), "min_tokens": 2}, "hello in the ", 5, "world"),
    ],
)
async def test_stop_strings_and_stop_ids_end_the_text(
    params, text, num_tokens, stop_reason, tokens_per_output
) -> None:
    """The tokens are "hello", " ", "in", " the", " world" and the end token."""
    text_engine = scripted_text_engine("hello in the world", tokens_per_output=tokens_per_output)
    request = make_request([[1, 2, 3]], SamplingParams(temperature=0, **params))
    *deltas, last = await collect(text_engine.generate(request))
    assert "".join(d.text for d in [*deltas, last]) == text
    assert sum(len(d.token_ids) for d in [*deltas, last]) == num_tokens
    assert [d.finish_reason for d in deltas] == [None] * len(deltas)
    assert (last.finish_reason, last.stop_reason) == ("stop", stop_reason)
    # A stop string aborts the request in the engine, unless the engine has ended it already.
    num_sent = -(-num_tokens // tokens_per_output) * tokens_per_output
    is_aborted = isinstance(stop_reason, str) and num_sent < 6
    assert len(text_engine.engine.aborted) == is_aborted


async def test_a_stop_string_in_the_last_token_outranks_the_length() -> None:
    text_engine = scripted_text_engine("hello world")
    two = SamplingParams(temperature=0, max_tokens=2)
    assert (await complete(text_engine, two))[1].finish_reason == "length"
    stop = msgspec.structs.replace(two, stop=("world",))
    text, last = await complete(text_engine, stop)
    assert (text, last.finish_reason, last.stop_reason) == ("hello ", "stop", "world")


async def test_characters_of_several_tokens_stay_whole_and_all_tokens_count() -> None:
    text_engine = scripted_text_engine("é🔥 ok")
    deltas = await collect(text_engine.generate(make_request([[1]], GREEDY)))
    assert "".join(d.text for d in deltas) == "é🔥 ok"
    assert all("\ufffd" not in d.text for d in deltas)
    assert (
        sum(len(d.token_ids) for d in deltas)
        == len(text_engine.model.tokenizer.encode("é🔥 ok")) + 1
    )


async def test_further_end_tokens_end_a_completion_unless_ignored() -> None:
    defaults = GenerationDefaults(eos_token_ids=(269, 267))
    text_engine = scripted_text_engine("hello in the world", defaults=defaults)
    text, last = await complete(text_engine)
    assert (text, last.finish_reason, last.stop_reason) == ("hello in", "stop", 267)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
    _, last = await complete(text_engine, params)
    assert last.finish_reason == "length"
    submit = text_engine.engine.submitted[-1]
    assert submit.eos_token_id is None
    assert submit.params.stop_token_ids == ()


@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_n_completions_have_their_own_index_and_text(tokens_per_output) -> None:
    texts = ["hello", "world in the", "é"]
    text_engine = scripted_text_engine(*texts, tokens_per_output=tokens_per_output)
    params = SamplingParams(n=3)
    deltas = await collect(text_engine.generate(make_request([[1]], params)))
    for index, text in enumerate(texts):
        deltas_of_index = [d for d in deltas if d.index == index]
        assert "".join(d.text for d in deltas_of_index) == text
        assert [d.finish_reason for d in deltas_of_index if d.finish_reason] == ["stop"]


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_stream_aborts_every_completion_at_once(n) -> None:
    text_engine = scripted_text_engine("hello world")
    params = SamplingParams(n=n, ignore_eos=True, max_tokens=200)
    deltas = text_engine.generate(make_request([[1]], params))
    await anext(deltas)
    assert text_engine.num_in_flight == n
    await deltas.aclose()
    assert len(text_engine.engine.aborted) == n
    assert text_engine.num_in_flight == 0
    assert text_engine.metrics.finished == {"abort": n}


async def test_cancelling_a_reader_aborts_the_request() -> None:
    text_engine = scripted_text_engine("hello world")
    text_engine.engine.stall_after = 1
    params = SamplingParams(n=2, max_tokens=100)
    reader = asyncio.create_task(collect(text_engine.generate(make_request([[1]], params))))
    await until(lambda: len(text_engine.engine.submitted) == 2)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert len(text_engine.engine.aborted) == 2
    assert text_engine.num_in_flight == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_a_failing_engine_breaks_its_streams_but_not_later_ones(n) -> None:
    text_engine = scripted_text_engine("hello world")
    text_engine.engine.fail_after = 1
    deltas = text_engine.generate(make_request([[1]], SamplingParams(n=n)))
    with pytest.raises(EngineDeadError):
        await collect(deltas)
    assert text_engine.num_in_flight == 0
    assert text_engine.metrics.finished["error"] >= 1
    text_engine.engine.fail_after = None
    assert (await complete(text_engine))[0] == "hello world"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param", "words"),
    [
        ([], {}, InvalidRequestError, "prompt", "is empty"),
        ([300], {}, InvalidRequestError, "prompt", "out of vocabulary"),
        ([1, -1], {}, InvalidRequestError, "prompt", "[-1]"),
        ([1] * 256, {}, ContextLengthError, "prompt", "maximum context length is 256"),
        ([1] * 300, {"max_tokens": 3}, ContextLengthError, "prompt", "300 tokens"),
        ([1] * 250, {"max_tokens": 7}, ContextLengthError, "max_tokens", "7 for the output"),
        ([1], {"stop_token_ids": (300,)}, InvalidRequestError, "stop_token_ids", "300"),
        ([1], {"max_tokens": 10**12}, ContextLengthError, "max_tokens", "256"),
        ([1], {"min_tokens": 256}, InvalidRequestError, "min_tokens", "at most"),
    ],
)
async def test_rejects_invalid_requests_before_they_reach_the_engine(
    prompt, params, error, param, words
) -> None:
    text_engine = scripted_text_engine("hello")
    with pytest.raises(error) as caught:
        text_engine.generate(make_request([[5], prompt], SamplingParams(**params)))
    assert caught.value.param == param
    assert words in str(caught.value)
    assert text_engine.engine.submitted == []
    assert text_engine.num_in_flight == 0
    assert (await complete(text_engine))[0] == "hello"


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
async def test_rejects_a_priority_that_does_not_fit_in_a_message(priority) -> None:
    text_engine = scripted_text_engine("hello")
    with pytest.raises(InvalidRequestError, match="priority must be between") as caught:
        text_engine.generate(make_request([[5]], SamplingParams(), priority=priority))
    assert caught.value.param == "priority"


async def test_the_context_is_filled_to_the_last_token() -> None:
    text_engine = scripted_text_engine("hello")
    for prompt_len in (255, 250):
        params = SamplingParams(temperature=0, ignore_eos=True)
        deltas = await collect(text_engine.generate(make_request([[1] * prompt_len], params)))
        assert sum(len(d.token_ids) for d in deltas) == 256 - prompt_len
        assert deltas[-1].finish_reason == "length"
    fitting = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
    await collect(text_engine.generate(make_request([[1] * 250], fitting)))


async def test_the_default_length_is_cut_to_what_fits() -> None:
    text_engine = scripted_text_engine("hello", defaults=GenerationDefaults(max_tokens=20))
    for prompt_len, expected in ((10, 20), (250, 6)):
        await collect(text_engine.generate(make_request([[1] * prompt_len], GREEDY)))
        assert text_engine.engine.submitted[-1].params.max_tokens == expected


async def test_rejects_strings_that_can_never_fit_without_encoding_them(monkeypatch) -> None:
    text_engine = scripted_text_engine("hello")
    await text_engine.encode("hello " * 100)
    monkeypatch.setattr(text_engine.model.tokenizer, "encode", None)
    with pytest.raises(ContextLengthError, match="maximum context length is 256") as caught:
        await text_engine.encode("x" * 10_000, param="messages")
    assert caught.value.param == "messages"


async def test_completions_above_the_admission_limit_are_refused_until_others_end() -> None:
    text_engine = scripted_text_engine("hello world", max_in_flight=3)
    first = text_engine.generate(make_request([[1]], SamplingParams(n=2)))
    with pytest.raises(QueueFullError):  # accepted requests count before they begin
        text_engine.generate(make_request([[1]], SamplingParams(n=2)))
    await anext(first)
    with pytest.raises(QueueFullError):
        text_engine.generate(make_request([[1]], SamplingParams(n=2)))
    await collect(text_engine.generate(make_request([[1]], GREEDY)))
    await first.aclose()
    await collect(text_engine.generate(make_request([[1]], SamplingParams(n=3))))
    with pytest.raises(InvalidRequestError, match="at most 3"):
        text_engine.generate(make_request([[1]], SamplingParams(n=4)))


async def test_rejects_unknown_model_names() -> None:
    text_engine = scripted_text_engine("he", names=("a", "b"))
    for name in ("a", "b", None, ""):
        text_engine.model.check_name(name)
    for name in ("c", "A", " a"):
        with pytest.raises(UnknownModelError, match="does not exist"):
            text_engine.model.check_name(name)


async def test_metrics_count_requests_tokens_and_finish_reasons() -> None:
    text_engine = scripted_text_engine("hello world", tokens_per_output=2)
    for _ in range(4):
        await collect(text_engine.generate(make_request([[1] * 20], GREEDY)))
    await collect(text_engine.generate(make_request([[1] * 20], SamplingParams(n=2, max_tokens=2))))
    metrics = text_engine.metrics
    assert metrics.finished == {"stop": 4, "length": 2}
    assert metrics.prompt_tokens == 6 * 20
    assert metrics.cached_tokens == 6 * 16
    assert metrics.generation_tokens == 4 * 3 + 2 * 2
    assert sum(metrics.time_to_first_token.counts) == 6
    assert sum(metrics.inter_token_latency.counts) == 4 * 2 + 2
    assert metrics.by_request["request_generation_tokens"].sum == 16
    assert metrics.by_request["request_prefill_kv_computed_tokens"].sum == 6 * 4
    assert sum(metrics.max_generation_tokens.counts) == 5
    assert all(sum(h.counts) == 6 for h in metrics.by_request.values())


async def test_an_abort_keeps_the_times_of_a_completion_in_the_histograms() -> None:
    config = EngineConfig(model=ModelConfig(model="fake:step_s=0.001"))
    engine = await InProcessEngine.start(lambda: fake_engine.build(config, 0, lambda _: None))
    model = ServedModel.create(engine.ready, scripted_text_engine("x").model.tokenizer, names=["m"])
    text_engine = TextEngine(engine, model)
    endless = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
    reasons = []
    async with aclosing(text_engine.generate(make_request([[1]], endless))) as deltas:
        async for delta in deltas:
            text_engine.abort(None)
            reasons.append(delta.finish_reason)
    await engine.close()
    assert reasons[-1] == "abort"
    for name, histogram in text_engine.metrics.by_request.items():
        if name.endswith("_time_seconds"):
            assert sum(histogram.counts) == 1, name
            assert 0 <= histogram.sum < 60, f"{name}: not the time since the machine started"


async def test_the_reason_of_the_engine_reaches_the_caller() -> None:
    text_engine = scripted_text_engine("hello")

    async def failing(submit, **_):
        yield RequestOutput(submit.request_id, [1])
        yield RequestOutput(submit.request_id, [], FinishReason.ERROR, error="the disk is full")

    text_engine.engine.generate = failing
    with pytest.raises(RequestFailedError, match=r"^the disk is full$"):
        await collect(text_engine.generate(make_request([[1]], GREEDY)))
    assert text_engine.metrics.finished == {"error": 1}


async def test_the_engine_returns_permits_even_if_nobody_reads() -> None:
    """A client that stops reading keeps memory, not a place."""
    text_engine = scripted_text_engine("hello world", tokens_per_output=9, max_in_flight=4)
    with text_engine.admit(1, 4) as permit:
        deltas = await text_engine.start(make_request([[1]], SamplingParams(n=4)), permit)
    assert text_engine.num_in_flight == 4
    first = await anext(deltas)
    await until(lambda: text_engine.num_in_flight == 0)
    await complete(text_engine)
    assert text_engine.num_in_flight == 0
    assert [d.text for d in [first, *await collect(deltas)]] == ["hello world"] * 4
    assert text_engine.num_in_flight == 0


async def test_an_error_before_the_start_returns_the_permit() -> None:
    text_engine = scripted_text_engine("hello", max_in_flight=2)

    def fail() -> None:
        with text_engine.admit(2, 1):
            assert text_engine.num_in_flight == 2
            with pytest.raises(QueueFullError), text_engine.admit(1, 1):
                pass
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert text_engine.num_in_flight == 0
    too_many = text_engine.admit(3, 1, param="input")
    with pytest.raises(InvalidRequestError, match="at most 2") as caught, too_many:
        pass
    assert caught.value.param == "input"


@pytest.mark.parametrize("tokens_per_output", [1, 600])
async def test_an_output_of_many_tokens_becomes_several_deltas(tokens_per_output) -> None:
    ready = msgspec.structs.replace(READY, max_model_len=2048)
    ids = [i % 200 for i in range(600)]
    text_engine = scripted_text_engine(ids, tokens_per_output=tokens_per_output, ready=ready)
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=600, prompt_logprobs=1)
    deltas = await collect(text_engine.generate(make_request([[1, 2]], params)))
    assert max(len(delta.token_ids) for delta in deltas) <= MAX_DELTA_TOKENS
    assert sum((delta.token_ids for delta in deltas), []) == ids
    assert sum(len(delta.logprobs) for delta in deltas) == 600
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (
        len(deltas) - 1
    )
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]

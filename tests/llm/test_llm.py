"""LLM: a model in the process of its caller, with a fake engine whose tokens are arithmetic."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
)
from jaxserve.llm import LLM
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_model import FakeModel, expected_tokens
from jaxserve.testing.waiting import wait_until
from jaxserve.text.template_files import ChatTemplates

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FACTORY = "jaxserve.testing.fake_engine:build"


def make(checkpoint: Path, factory: str = FACTORY, **settings) -> LLM:
    return LLM(str(checkpoint), factory=factory, show_progress=False, **settings)


@pytest.fixture(scope="module")
def llm(front_checkpoint: Path) -> Iterator[LLM]:
    with make(front_checkpoint) as llm:
        yield llm


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def expected(llm: LLM, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return expected_tokens(
        ids,
        params,
        FakeModel(),
        context_length=fake_engine.MAX_MODEL_LEN,
        eos_token_id=llm.get_tokenizer().eos_token_id,
    )


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"hello {i}" for i in range(100)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (i * 37) % 50) for i in range(100)]
    outputs = generate(llm, prompts, params)
    tokenizer = llm.get_tokenizer()
    for output, prompt, p in zip(outputs, prompts, params, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        (completion,) = output.outputs
        assert completion.token_ids == expected(llm, output.prompt_token_ids, p)
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == (
            "length" if len(completion.token_ids) == p.max_tokens else "stop"
        )
        assert completion.logprobs is None


@pytest.mark.parametrize(
    "form",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, (5, 6, 7), list(np.array([5, 6, 7]))],
)
def test_accepts_prompts_as_token_ids(llm: LLM, form) -> None:
    (output,) = generate(llm, form)
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6, 7])
    assert output.outputs[0].token_ids == expected(llm, [5, 6, 7])


def test_accepts_prompts_as_strings_and_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms = ["hello", {"prompt": "hello"}]
    for output in [*generate(llm, forms), *generate(llm, "hello"), *generate(llm, forms[1])]:
        assert (output.prompt, output.prompt_token_ids) == ("hello", ids)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_returns_n_completions_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=5)
    (output,) = generate(llm, [[1, 2, 3]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert generate(llm, [[1, 2, 3]], params) == [output]


def test_returns_logprobs_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (completion,) = generate(llm, [[1, 2, 3]], params)[0].outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 3
    for token_id, by_id in zip(completion.token_ids, completion.logprobs, strict=True):
        # The token that the fake engine samples is the most likely token.
        assert next(iter(by_id)) == token_id
        assert by_id[token_id].rank == 1
        assert by_id[token_id].logprob == -0.5
        assert sorted(entry.rank for entry in by_id.values()) == [1, 2]


def test_a_stop_string_ends_the_completion(llm: LLM) -> None:
    text = (
        generate(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
    )
    stop = next(c for c in text[3:] if text.index(c) >= 3)
    params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,))
    (completion,) = generate(llm, [[1, 2, 3]], params)[0].outputs
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert output.outputs[0].token_ids == expected(llm, output.prompt_token_ids)


def test_chat_takes_several_conversations_and_continues_a_message(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert ["a" in str(o.prompt).split("\n")[1] for o in outputs] == [True, False]
    started = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hel"}]
    (output,) = llm.chat(started, GREEDY, continue_final_message=True, use_tqdm=False)
    assert str(output.prompt).endswith("hel")


def test_chat_shows_tools_and_variables_to_the_template(llm: LLM, monkeypatch) -> None:
    template = "{{ tools[0].name }} {{ mood }} {{ messages[0].content }}"
    templates = ChatTemplates(default=template)
    model = dataclasses.replace(llm._text_engine.model, chat_templates=templates)
    monkeypatch.setattr(llm._text_engine, "model", model)
    options = {"tools": [{"name": "clock"}], "chat_template_kwargs": {"mood": "calm"}}
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False, **options)
    assert output.prompt == "clock calm hi"


@pytest.mark.parametrize("place", ["content", "arguments"])
def test_chat_refuses_messages_that_are_not_unicode(llm: LLM, place) -> None:
    fields = {"content": "x", "arguments": "{}", place: '{"a": "\ud83d"}'}
    call = {"function": {"name": "f", "arguments": fields["arguments"]}}
    message = {"role": "assistant", "content": fields["content"], "tool_calls": [call]}
    with pytest.raises(InvalidRequestError, match="surrogates"):
        llm.chat([message], GREEDY, use_tqdm=False)


def test_returns_prompt_logprobs_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=2)
    (output,) = generate(llm, [[5, 6, 7]], params)
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [next(iter(by_id)) for by_id in others] == [6, 7]
    assert all(1 <= len(by_id) <= 3 for by_id in others)
    assert generate(llm, [[5, 6, 7]])[0].prompt_logprobs is None


def test_metrics_are_times_in_order(llm: LLM) -> None:
    before = time.time()
    outputs = generate(llm, [[1], [2]], SamplingParams(temperature=0, max_tokens=5, n=2))
    after = time.time()
    for output in outputs:
        m = output.metrics
        assert m is not None
        times = [m.arrival_time, m.first_scheduled_time, m.first_token_time]
        times += [m.last_token_time, m.finished_time]
        # The clocks differ by less than this while the test runs.
        assert [before - 1, *times, after + 1] == sorted([before - 1, *times, after + 1])
        assert m.time_in_queue == m.first_scheduled_time - m.arrival_time


def test_embed_returns_a_vector_for_each_prompt(llm: LLM) -> None:
    prompts = ["hello", [1, 2, 3]]
    raw = llm.embed(prompts, pooling="mean", normalize=False, use_tqdm=False)
    unit = llm.embed(prompts, pooling="mean", use_tqdm=False)
    pooled = generate(llm, prompts, SamplingParams(temperature=0, pooling="mean"))
    for i in range(2):
        vector = raw[i].outputs.embedding
        assert vector is not None
        assert pooled[i].outputs[0].embedding == vector
        assert pooled[i].outputs[0].text == ""
        assert np.linalg.norm(vector) > 0
        assert unit[i].outputs.embedding == pytest.approx(vector / np.linalg.norm(vector))
        assert unit[i].metrics is not None
    assert [output.prompt for output in raw] == ["hello", None]
    assert raw[1].prompt_token_ids == [1, 2, 3]
    last = llm.embed(prompts, use_tqdm=False)
    assert last[1] != unit[1]


def failing_engine(config, engine, on_progress):
    """An engine that refuses requests with the seed 9, and says why."""

    def check(params: SamplingParams) -> None:
        if params.seed == 9:
            raise InvalidRequestError("no request may have the seed 9")

    built = fake_engine.build(config, engine, on_progress)
    built.core._check_params = check
    return built


def test_a_request_that_fails_says_why_and_takes_no_other_answer(
    front_checkpoint: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("jaxserve.llm.llm.load_factory", lambda name: failing_engine)
    params = [SamplingParams(temperature=0, max_tokens=4, seed=8 + i % 2) for i in range(10)]
    with make(front_checkpoint) as llm:
        outputs = generate(llm, [[i] for i in range(10)], params)
        for i, output in enumerate(outputs):
            (completion,) = output.outputs
            if i % 2:
                assert output.error == "no request may have the seed 9"
                assert not output.finished
                assert (completion.finish_reason, completion.token_ids) == ("error", [])
            else:
                assert output.error is None
                assert output.finished
                assert completion.token_ids == expected(llm, [i], params[i])
        (vector,) = llm.embed([[1]], use_tqdm=False)
        assert vector.error is None
    assert "prompt 3 failed: no request may have the seed 9" in caplog.text


def test_an_unexpected_error_of_one_request_takes_no_other_answer(
    llm: LLM, monkeypatch, caplog
) -> None:
    decode = type(llm.get_tokenizer()).decode

    def fails(self, ids, **options):
        if ids == [expected(llm, [2], GREEDY)[0]]:
            raise ZeroDivisionError("a bug")
        return decode(self, ids, **options)

    monkeypatch.setattr(type(llm.get_tokenizer()), "decode", fails)
    params = msgspec.structs.replace(GREEDY, logprobs=0)
    outputs = generate(llm, [[1], [2], [3]], params)
    assert [output.error for output in outputs] == [None, "a bug", None]
    assert "ZeroDivisionError" in caplog.text, "with its traceback"


@pytest.mark.parametrize(
    ("grammars", "message"),
    [
        ([Grammar("json_schema", '{"type": 5}')], "^grammar: "),
        ([None, Grammar("regex", "a+"), Grammar("regex", "(")], "^prompt 2: grammar: "),
    ],
)
def test_a_grammar_that_cannot_be_followed_ends_the_call_before_any_request_runs(
    llm: LLM, grammars, message
) -> None:
    before = llm._text_engine.engine.stats[0].total_generation_tokens
    params = [SamplingParams(max_tokens=5, grammar=grammar) for grammar in grammars]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        generate(llm, [[1]] * len(params), params)
    assert caught.value.param == "grammar"
    assert llm._text_engine.engine.stats[0].total_generation_tokens == before


def test_an_error_says_which_prompt_is_invalid(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="^prompt 1: the maximum context length"):
        generate(llm, [[1], [1] * 5000])
    with pytest.raises(ContextLengthError, match="^the maximum context length"):
        generate(llm, [[1] * 5000])


def test_256_stop_ids_are_served_by_a_model_with_several_end_tokens(llm: LLM) -> None:
    model = llm._text_engine.model
    llm._text_engine.model = dataclasses.replace(model, extra_end_ids=(3, 4))
    try:
        params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=range(100, 356))  # type: ignore[arg-type]
        assert generate(llm, [[1]], params)[0].finished
    finally:
        llm._text_engine.model = model


def test_a_rejected_request_ends_the_call_before_any_request_runs(llm: LLM) -> None:
    before = llm._text_engine.engine.stats[0].total_generation_tokens
    for prompts, params in [
        (["fine", []], GREEDY),
        ([[1], [10**6]], GREEDY),
        ([[1], [1] * 5000], GREEDY),
        ([[1], [2]], [GREEDY]),
        ([[1]], SamplingParams(stop_token_ids=(10**6,))),
        ([[1]], {"max_tokens": 5}),
    ]:
        with pytest.raises(InvalidRequestError):
            generate(llm, prompts, params)
    assert llm._text_engine.engine.stats[0].total_generation_tokens == before
    assert generate(llm, [[1, 2]])[0].outputs[0].token_ids == expected(llm, [1, 2])


def test_defaults_come_from_the_checkpoint(make_front_checkpoint, tmp_path: Path) -> None:
    folder = make_front_checkpoint(tmp_path / "m", temperature=0.25, max_new_tokens=4)
    with make(folder) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)
        assert len(generate(llm, [[1]], None)[0].outputs[0].token_ids) == 4
    with make(folder, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_threads_share_the_engine(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        results[i] = generate(llm, [[i, i]])[0].outputs[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: expected(llm, [i, i]) for i in range(8)}


def test_a_closed_llm_leaves_no_thread_and_no_process(front_checkpoint: Path) -> None:
    before = set(threading.enumerate())
    llm = make(front_checkpoint)
    params = SamplingParams(max_tokens=3, grammar=Grammar("regex", "[a-z]+"))
    assert generate(llm, ["hello " * 300], params)[0].finished
    process = llm._text_engine.grammars._quick_worker._process
    assert process is not None
    assert process.poll() is None
    llm.close()
    assert process.poll() is not None
    # tqdm has one thread for all bars of the process.
    wait_until(lambda: {t.name for t in set(threading.enumerate()) - before} <= {"tqdm_monitor"})


def test_a_closed_llm_rejects_calls(front_checkpoint: Path) -> None:
    llm = make(front_checkpoint)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        generate(llm, [[1]])


def all_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(timeout=60)
    return not any(thread.is_alive() for thread in threads)


def test_rejects_bad_models_and_settings(front_checkpoint: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError):
        LLM("/no/such/model", show_progress=False)
    with pytest.raises(ConfigError, match="data_parallel_size must be 1"):
        make(front_checkpoint, data_parallel_size=2)
    with pytest.raises(ConfigError, match="policy"):
        make(front_checkpoint, policy="fastest")
    new = {thread for thread in threading.enumerate() if thread.name in ("llm", "engine")} - before
    assert not any(thread.is_alive() for thread in new)

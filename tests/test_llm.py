"""A model in one's own process, here with an engine whose tokens are arithmetic."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import llm as llm_module
from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.llm import LLM, ask_for_memory, engine_config
from jaxserve.offline.outputs import as_prompts
from jaxserve.sampling_params import SamplingParams
from jaxserve.testing import fake_engine
from jaxserve.testing.fake_runner import FakeModel, expected_tokens

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
        (answer,) = output.outputs
        assert answer.token_ids == expected(llm, output.prompt_token_ids, p)
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert answer.finish_reason == (
            "length" if len(answer.token_ids) == p.max_tokens else "stop"
        )
        assert answer.logprobs is None


@pytest.mark.parametrize(
    "form",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, (5, 6, 7), list(np.array([5, 6, 7]))],
)
def test_prompts_as_ids(llm: LLM, form) -> None:
    (output,) = generate(llm, form)
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6, 7])
    assert output.outputs[0].token_ids == expected(llm, [5, 6, 7])


def test_prompts_as_texts_and_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms = ["hello", {"prompt": "hello"}]
    for output in [*generate(llm, forms), *generate(llm, "hello"), *generate(llm, forms[1])]:
        assert (output.prompt, output.prompt_token_ids) == ("hello", ids)


@pytest.mark.parametrize("bad", [5, None, {"text": "x"}, [1, "a"], [[1.5]], ["a", None], [[True]]])
def test_what_is_no_prompt_is_refused(bad) -> None:
    with pytest.raises((InvalidRequestError, TypeError)):
        as_prompts(bad)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_several_answers_to_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=5)
    (output,) = generate(llm, [[1, 2, 3]], params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert generate(llm, [[1, 2, 3]], params) == [output]


def test_logprobs_by_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (answer,) = generate(llm, [[1, 2, 3]], params)[0].outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 3
    for token_id, by_id in zip(answer.token_ids, answer.logprobs, strict=True):
        # The fake's sampled token is the most likely one.
        assert next(iter(by_id)) == token_id
        assert by_id[token_id].rank == 1
        assert by_id[token_id].logprob == -0.5
        assert sorted(entry.rank for entry in by_id.values()) == [1, 2]


def test_a_stop_text_ends_the_answer(llm: LLM) -> None:
    text = (
        generate(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
    )
    stop = next(c for c in text[3:] if text.index(c) >= 3)
    params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,))
    (answer,) = generate(llm, [[1, 2, 3]], params)[0].outputs
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert output.outputs[0].token_ids == expected(llm, output.prompt_token_ids)


def test_chat_with_several_conversations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert ["a" in str(o.prompt).split("\n")[1] for o in outputs] == [True, False]
    started = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hel"}]
    (output,) = llm.chat(started, GREEDY, continue_final_message=True, use_tqdm=False)
    assert str(output.prompt).endswith("hel")


def test_a_request_that_cannot_be_served_stops_the_call_before_any_runs(llm: LLM) -> None:
    before = llm._text_engine.engine.stats[0].total_generation_tokens
    for prompts, params in [
        (["fine", []], GREEDY),
        ([[1], [10**6]], GREEDY),
        ([[1], [1] * 5000], GREEDY),
        ([[1], [2]], [GREEDY]),
        ([[1]], SamplingParams(stop_token_ids=(10**6,))),
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


def build_slow(config, engine, on_progress):
    """An engine that takes a while, so that a call can be interrupted."""
    import dataclasses

    model = dataclasses.replace(config.model, model="fake:step_s=0.02")
    return fake_engine.build(dataclasses.replace(config, model=model), engine, on_progress)


def test_an_interrupt_ends_a_call_and_not_the_engine(front_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.llm.load_factory", lambda name: build_slow)
    with make(front_checkpoint) as llm:
        stats = llm._text_engine.engine.stats

        def interrupt() -> None:
            while not llm._text_engine.engine.stats[0].num_running:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert stats[0].num_running == 0
        threading.Thread(target=interrupt).start()
        endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [[1]] * 4, endless)
        assert generate(llm, [[1, 2, 3]])[0].outputs[0].token_ids == expected(llm, [1, 2, 3])
        # Only what is asked for now is on board.
        assert llm._text_engine.engine.stats[0].num_running <= 1


def test_a_closed_llm_says_so(front_checkpoint: Path) -> None:
    llm = make(front_checkpoint)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        generate(llm, [[1]])


def ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(timeout=20)
    return not any(thread.is_alive() for thread in threads)


def test_a_forgotten_llm_ends_its_threads(front_checkpoint: Path) -> None:
    before = set(threading.enumerate())
    llm = make(front_checkpoint)
    gone = weakref.ref(llm)
    started = set(threading.enumerate()) - before
    assert {"engine", "llm"} <= {thread.name for thread in started}
    del llm
    gc.collect()
    assert gone() is None
    assert ended(started)


def test_settings_find_their_groups() -> None:
    config = engine_config({"model": "m", "num_blocks": 9, "policy": "priority", "warmup": False})
    assert config.model.model == "m"
    assert config.cache.num_blocks == 9
    assert config.scheduler.policy == "priority"
    assert not config.compile.warmup


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting max_model_length.*max_model_len"):
        engine_config({"max_model_length": 5})


def test_bad_models_and_settings_are_refused(front_checkpoint: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError):
        LLM("/no/such/model", show_progress=False)
    with pytest.raises(ConfigError, match="data_parallel_size must be 1"):
        make(front_checkpoint, data_parallel_size=2)
    with pytest.raises(ConfigError, match="policy"):
        make(front_checkpoint, policy="fastest")
    assert ended(set(threading.enumerate()) - before)


MEMORY = "XLA_CLIENT_MEM_FRACTION"


def test_jax_is_told_how_much_of_a_gpu_to_take(front_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setenv(MEMORY, "")
    monkeypatch.delenv(MEMORY)
    make(front_checkpoint, memory_fraction=0.6).close()
    assert os.environ[MEMORY] == "0.800"


@pytest.mark.parametrize(
    ("environment", "has_gpu", "has_jax", "warns"),
    [
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({MEMORY: "0.5"}, True, True, False),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, True, True, False),
    ],
)
def test_who_is_too_late_to_tell_it_is_warned(
    tmp_path, monkeypatch, caplog, environment, has_gpu, has_jax, warns
) -> None:
    monkeypatch.setattr(llm_module, "NVIDIA_DRIVER", tmp_path if has_gpu else tmp_path / "none")
    modules = {**sys.modules, "jax": None} if has_jax else {"sys": sys}
    monkeypatch.setattr(sys, "modules", modules)
    given = dict(environment)
    ask_for_memory(EngineConfig(), environment)
    assert environment == (given or {MEMORY: "0.950"})
    assert [MEMORY in record.getMessage() for record in caplog.records] == [True] * warns

"""lm-eval with local-completions over HTTP: log probabilities and generated texts of tasks."""

import json
from typing import Any

import httpx
import pytest

from jaxserve.testing.tiny import write_checkpoint
from server.testing import ServerThread, flags

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[clients]'")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(checkpoint):
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    argv = flags(
        model=checkpoint, num_blocks=65, warmup=False, compilation_cache_dir="", **settings
    )
    server = ServerThread(*argv)
    yield server
    server.close()


@pytest.fixture(scope="module")
def results(server, checkpoint, tmp_path_factory) -> dict[str, Any]:
    """The results of lm-eval for two small tasks: multiple choice and generation."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        {"question": f"{a} and {b} are", "choices": [str(a + b), "many"], "answer": 0}
        for a, b in ((1, 2), (3, 4), (5, 6))
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    tasks: list[dict[str, Any]] = [
        common
        | {
            "task": "tiny_choices",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "tiny_texts",
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]
    import lm_eval

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "tiny",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(checkpoint),
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=tasks,
            bootstrap_iters=0,
        )


def test_scores_of_choices_are_sums_of_logprobs(results, server) -> None:
    """The score of a choice is the sum of the log probabilities that the server returns."""
    samples = results["samples"]["tiny_choices"]
    assert len(samples) == 3
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for sample in samples:
            for (context, choice), ((score, _),) in zip(
                sample["arguments"], sample["resps"], strict=True
            ):
                body = {"prompt": context + choice, "echo": True, "logprobs": 1, "max_tokens": 0}
                scores = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
                expected = sum(
                    value
                    for value, offset in zip(
                        scores["token_logprobs"], scores["text_offset"], strict=True
                    )
                    if offset >= len(context)
                )
                assert score == pytest.approx(expected, abs=1e-4)


def test_texts_are_generated(results) -> None:
    samples = results["samples"]["tiny_texts"]
    assert len(samples) == 3
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)

"""The server, the batch program and `LLM` take the same flags and give equal completions."""

import json
from pathlib import Path

import numpy as np

from jaxserve import SamplingParams
from jaxserve.llm import LLM
from jaxserve.offline import __main__ as offline
from jaxserve.testing.tolerance import assert_close

MESSAGES = [{"role": "user", "content": "hello world"}]


def test_server_batch_program_and_llm_agree(
    serve, settings, flags, tiny_model: Path, tmp_path: Path
) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.05, "seed": 3, "max_tokens": 40}
    more = ["--logprobs-mode", "processed_logits", "--max-logprobs", "30", "--no-warmup"]
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 25, **sampling}
    with serve(tiny_model, *more) as server, server.client() as client:
        reply = client.chat.completions.create(model="tiny", **body)
    (served,) = reply.choices

    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert offline.main(["--model", str(tiny_model), *flags, *more, *files]) == 0
    result = json.loads((tmp_path / "out.jsonl").read_text())
    (batched,) = result["response"]["body"]["choices"]

    # The folder of compiled programs is a setting of the whole process, so this engine sets none.
    llm_settings = {
        **settings,
        "compilation_cache_dir": "",
        "warmup": False,
        "show_progress": False,
    }
    llm_settings |= {"logprobs_mode": "processed_logits", "max_logprobs": 30}
    with LLM(str(tiny_model), **llm_settings) as llm:
        params = SamplingParams(logprobs=25, **sampling)
        (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    (completion,) = output.outputs

    assert batched["message"]["content"] == served.message.content == completion.text
    assert batched["finish_reason"] == served.finish_reason == completion.finish_reason

    served_values = [
        [entry.logprob, *(top.logprob for top in entry.top_logprobs)]
        for entry in served.logprobs.content
    ]
    batched_values = [
        [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
        for entry in batched["logprobs"]["content"]
    ]
    finite = np.array(served_values) > -9999.0
    num_tokens = reply.usage.total_tokens
    assert ((np.array(batched_values) > -9999.0) == finite).all()
    assert_close(
        np.array(batched_values)[finite], np.array(served_values)[finite], num_tokens=num_tokens
    )
    for (sampled, *top), token, by_id in zip(
        served_values, completion.token_ids, completion.logprobs, strict=True
    ):
        assert len(top) == 25
        assert top[-1] == -9999.0  # not in the top half
        # Log probabilities would not be positive, so these are logits.
        assert top[0] > 0
        assert_close(sampled, by_id[token].logprob, num_tokens=num_tokens)

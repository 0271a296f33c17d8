"""The server, the batch program and `LLM` give the same answers."""

import json
from pathlib import Path

from jaxserve import SamplingParams, offline
from jaxserve.llm import LLM

MESSAGES = [{"role": "user", "content": "hello world"}]


def test_all_agree(serve, settings, flags, tiny_model: Path, tmp_path: Path) -> None:
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 40}
    with serve(tiny_model) as server, server.client() as client:
        reply = client.chat.completions.create(model="tiny", messages=MESSAGES, **sampling)
    (served,) = reply.choices

    body = {"messages": MESSAGES, **sampling}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert offline.main(["--model", str(tiny_model), *flags, "--no-warmup", *files]) == 0
    result = json.loads((tmp_path / "out.jsonl").read_text())
    (batched,) = result["response"]["body"]["choices"]

    # The rest of the tests keep no compiled programs, and the setting counts for the whole process.
    own = {**settings, "compilation_cache_dir": "", "warmup": False, "show_progress": False}
    with LLM(str(tiny_model), **own) as llm:
        (output,) = llm.chat(MESSAGES, SamplingParams(**sampling), use_tqdm=False)
    (answer,) = output.outputs

    assert batched["message"]["content"] == served.message.content == answer.text
    assert batched["finish_reason"] == served.finish_reason == answer.finish_reason

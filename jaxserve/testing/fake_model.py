"""The tokens of a fake model: each is a hash of all tokens before it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The behaviour of a fake runner.

    Attributes:
      vocab_size: tokens are in ``[0, vocab_size)``.
      step_s: seconds that a step takes.
      eos_after: a request with an end token samples it as output token number ``eos_after``,
        counted from 1. If None, it samples the end token only where the hash equals it.
      fail_on_step: this call of `FakeRunner.execute`, counted from 1, raises.
      width: length of the vectors of pooling requests.
      fail_on_token: every call with a request that has this token in its prompt raises.
    """

    vocab_size: int = 1000
    step_s: float = 0.0
    eos_after: int | None = None
    fail_on_step: int | None = None
    fail_on_token: int | None = None
    width: int = 8

    @classmethod
    def parse(cls, text: str) -> FakeModel:
        """Parses a model name like ``fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9``.

        Each option may be left out. Any other model name means a fake model without options.

        Raises:
          ConfigError: an option is unknown, or its value is not a number.
        """
        name, _, rest = text.partition(":")
        if name != "fake":
            return cls()
        options = [item.split("=") for item in rest.split(",") if item]
        try:
            values = {name: float(value) for name, value in options}
            step_s = values.pop("step_s", 0.0)
            known = {
                "vocab": "vocab_size",
                "eos_after": "eos_after",
                "fail_on_step": "fail_on_step",
                "fail_on_token": "fail_on_token",
                "width": "width",
            }
            numbers = {known[name]: int(value) for name, value in values.items()}
        except (ValueError, KeyError) as error:
            raise ConfigError(
                "a fake model is named like fake:vocab=300,step_s=0.01,eos_after=5,fail_on_step=9 "
                f"(each option may be left out), got {text!r}"
            ) from error
        return cls(step_s=step_s, **numbers)


def expected_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    model: FakeModel,
    *,
    context_length: int,
    eos_token_id: int | None = None,
) -> list[int]:
    """Returns the whole output for a prompt, which must not depend on other requests."""
    tokens = array("q", prompt_token_ids)
    num_prompt = len(tokens)
    limit = context_length - num_prompt
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    ends = {eos_token_id, *params.stop_token_ids}
    for count in range(1, limit + 1):
        token = next_token(
            tokens, params, model, num_prompt_tokens=num_prompt, eos_token_id=eos_token_id
        )
        tokens.append(token)
        if count >= params.min_tokens and token in ends:
            break
    return list(tokens[num_prompt:])


def fake_logprobs(token_id: int, k: int, vocab_size: int) -> TokenLogprobs:
    """Returns fake logprobs: the token is the most likely one, and the next k IDs follow it."""
    ids = (token_id, *((token_id + i) % vocab_size for i in range(k)))
    return TokenLogprobs(ids, (-0.5, *(-0.5 - i for i in range(k))), rank=1)


def next_token(
    context: array[int],
    params: SamplingParams,
    model: FakeModel,
    *,
    num_prompt_tokens: int,
    eos_token_id: int | None,
) -> int:
    """Returns a hash of all tokens so far, and of the seed unless sampling is greedy."""
    if eos_token_id is not None and len(context) + 1 - num_prompt_tokens == model.eos_after:
        return eos_token_id
    seed = 0 if params.is_greedy else (params.seed or 0)
    return zlib.crc32(context.tobytes(), seed & 0xFFFFFFFF) % model.vocab_size

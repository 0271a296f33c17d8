"""Limits on products of fields: what every completion of a request repeats."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.protocol import GenerationRequest
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams

MAX_PARAMETER_IDS = 2**20
"""The most token IDs in the parameters of a request, times its completions: each completion has its
own copy in the engine, at about 50 bytes for an ID."""

MAX_REPEATED_IDS = 2**22
"""The most prompt tokens that a reply repeats, as text or as IDs."""

MAX_PROMPT_SCORES = 2**19
"""The most log probabilities of prompt tokens in a reply."""

MAX_COUNTED_LOGPROBS = 20
"""At most this many log probabilities of a position count for `MAX_PROMPT_SCORES`. Whoever raises
``--max-logprobs`` accepts larger replies."""


def check_ids_in_flight(body: GenerationRequest, num_completions: int) -> None:
    """Checks the number of token IDs in the parameters; of bad words, the most that they can have.

    Raises:
      InvalidRequestError: they are more than `MAX_PARAMETER_IDS`, times the completions.
    """
    counts = {
        "logit_bias": len(body.logit_bias or ()),
        "allowed_token_ids": len(body.allowed_token_ids or ()),
        "stop_token_ids": len(body.stop_token_ids or ()),
        "bad_words": sum(
            2 * min(4 * len(word), MAX_BAD_WORD_TOKENS) for word in body.bad_words or ()
        ),
    }
    total = num_completions * sum(counts.values())
    if total > MAX_PARAMETER_IDS:
        field = max(counts, key=counts.__getitem__)
        raise InvalidRequestError(
            f"{field}: the token IDs in the parameters times the {num_completions} completions "
            f"must be at most {MAX_PARAMETER_IDS}, got {total}",
            param=field,
        )


def check_repeated_prompts(
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    echo: bool = False,
) -> None:
    """Checks how often a reply repeats its prompts.

    Raises:
      InvalidRequestError: it would repeat more than `MAX_REPEATED_IDS` tokens, or show more than
        `MAX_PROMPT_SCORES` log probabilities of prompt tokens.
    """
    num_tokens = params.n * sum(map(len, prompts))
    repeats = (echo, "echo") if echo else (body.return_token_ids, "return_token_ids")
    if repeats[0] and num_tokens > MAX_REPEATED_IDS:
        raise InvalidRequestError(
            f"{repeats[1]}: a reply repeats at most {MAX_REPEATED_IDS} tokens of prompts, over all "
            f"completions, but this one would repeat {num_tokens}",
            param=repeats[1],
        )
    if params.prompt_logprobs is None:
        return
    num_scores = num_tokens * (1 + min(params.prompt_logprobs, MAX_COUNTED_LOGPROBS))
    if num_scores > MAX_PROMPT_SCORES:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{field}: a reply shows at most {MAX_PROMPT_SCORES} log probabilities of prompt "
            f"tokens, over all completions, but this one would show {num_scores}",
            param=field,
        )

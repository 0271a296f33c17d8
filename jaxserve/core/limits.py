"""How long a request may be. Pure functions of numbers that `messages.Ready` carries, so that the
front refuses what an engine could never finish, with the same words as the engine itself.
"""

from __future__ import annotations

from jaxserve.errors import ContextLengthError, InvalidRequestError


def context_length(*, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The most tokens, prompt and answer together, that one request can have."""
    return min(max_model_len, (num_blocks - 1) * block_size)


def check_length(
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Refuses a request that could never run to its end, however long it waited.

    Args:
      num_prompt_tokens: tokens that came with the prompt.
      max_tokens: tokens asked for, or None for the rest of the context; 0 if none is generated.
      max_model_len, num_blocks, block_size: as in `messages.Ready`; ``num_blocks`` counts block 0.

    Raises:
      InvalidRequestError: the prompt is empty.
      ContextLengthError: prompt and answer do not fit the context, or the KV cache if that is
        smaller. ``param`` is "prompt" if the prompt alone is too long, or leaves no room for a
        single token where one is generated; else "max_tokens".
    """
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty; expected at least 1 token", param="prompt")
    context = context_length(
        max_model_len=max_model_len, num_blocks=num_blocks, block_size=block_size
    )
    limit = f"the maximum context length is {context} tokens"
    if context < max_model_len:
        limit += f" (the KV cache has {num_blocks - 1} blocks of {block_size} tokens)"
    if max_tokens == 0:
        if num_prompt_tokens > context:
            raise ContextLengthError(
                f"{limit}, but the prompt has {num_prompt_tokens} tokens", param="prompt"
            )
        return
    if num_prompt_tokens + 1 > context:
        raise ContextLengthError(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens, which leaves no room for "
            f"an answer; shorten the prompt to at most {context - 1} tokens",
            param="prompt",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > context:
        raise ContextLengthError(
            f"{limit}, but {num_prompt_tokens + max_tokens} were requested ({num_prompt_tokens} "
            f"in the prompt, {max_tokens} for the answer); shorten the prompt or ask for at most "
            f"{context - num_prompt_tokens} tokens",
            param="max_tokens",
        )

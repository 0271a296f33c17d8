"""From a checked request to its answers, each with the parameters that the engine expects."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence

import msgspec

from jaxserve.core.limits import check_length, context_length
from jaxserve.errors import InvalidRequestError
from jaxserve.front.generation_defaults import GenerationDefaults
from jaxserve.front.metrics import RequestRecord
from jaxserve.front.outputs import Answer
from jaxserve.ipc.messages import Ready
from jaxserve.parsing.message_parser import MessageParser
from jaxserve.sampling_params import INT64, SamplingParams, check_ids
from jaxserve.text.tokenizer import Tokenizer


class AnswerBuilder:
    """Checks prompts and parameters against the model, and makes the answers to generate.

    Args:
      ready: what the engine settled on.
      tokenizer: of its model.
      defaults: what counts where a request leaves something unset.
    """

    def __init__(self, ready: Ready, tokenizer: Tokenizer, defaults: GenerationDefaults) -> None:
        self._ready = ready
        self._defaults = defaults
        self._eos_token_id = tokenizer.eos_token_id
        more = {i for i in defaults.eos_token_ids if i != tokenizer.eos_token_id}
        self._more_end_tokens = tuple(sorted(more))
        check_ids(self._more_end_tokens, ready.vocab_size, param="eos_token_id")
        self.max_model_len = context_length(
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
        )

    def build(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        cache_salt: str,
        default_max_tokens: int | None,
        param: str,
        length_param: str,
        parsers: Sequence[MessageParser],
    ) -> list[Answer]:
        """The answers to all prompts. Arguments and errors: see `TextEngine.generate_batch`."""
        params.check_token_ids(self._ready.vocab_size)
        params = params.within_logprobs(self._ready.max_logprobs, self._ready.vocab_size)
        if not INT64[0] <= priority <= INT64[1]:
            raise InvalidRequestError(
                f"priority must be between {INT64[0]} and {INT64[1]}, got {priority}",
                param="priority",
            )
        if default_max_tokens is None:
            default_max_tokens = self._defaults.max_tokens
        base = f"{request_id}-{uuid.uuid4().hex[:12]}"
        answers: list[Answer] = []
        for i, prompt_ids in enumerate(prompts):
            path = param if len(prompts) == 1 else f"{param}[{i}]"
            self._check_prompt(prompt_ids, params.most_tokens, path, length_param)
            room = self.max_model_len - len(prompt_ids)
            unasked = room if default_max_tokens is None else min(default_max_tokens, room)
            max_tokens = unasked if params.max_tokens is None else params.max_tokens
            for sample in range(params.n):
                index = len(answers)
                answers.append(
                    Answer(
                        index=index,
                        request_id=f"{base}-{index}",
                        prompt_ids=prompt_ids,
                        params=self._params(params, sample, max_tokens),
                        eos_token_id=None if params.ignore_eos else self._eos_token_id,
                        priority=priority,
                        cache_salt=cache_salt,
                        record=RequestRecord(
                            time.monotonic(),
                            len(prompt_ids),
                            0 if params.pooling is not None else max_tokens,
                            params.n,
                        ),
                        parser=parsers[index] if parsers else None,
                    )
                )
        return answers

    def _check_prompt(
        self, prompt_ids: list[int], max_tokens: int | None, path: str, length_param: str
    ) -> None:
        """Raises if a prompt, which is at ``path`` in the request, is not one to run."""
        ready, param = self._ready, path.partition("[")[0]
        try:
            check_length(
                len(prompt_ids),
                max_tokens,
                max_model_len=ready.max_model_len,
                num_blocks=ready.num_blocks,
                block_size=ready.block_size,
            )
            check_ids(prompt_ids, ready.vocab_size, param=path)
        except InvalidRequestError as error:
            which = "" if path in (param, error.param) else f"{path}: "
            field = length_param if error.param == "max_tokens" else param
            raise type(error)(which + error.message, param=field) from error

    def _params(self, params: SamplingParams, sample: int, max_tokens: int) -> SamplingParams:
        """The parameters of one answer, as the engine expects them."""
        seed = random.getrandbits(63) if params.seed is None else params.seed + sample
        stop_ids = params.stop_token_ids
        if self._more_end_tokens and not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._more_end_tokens))
        return msgspec.structs.replace(
            params.normalised(),
            n=1,
            seed=(seed + 2**63) % 2**64 - 2**63,
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
        )

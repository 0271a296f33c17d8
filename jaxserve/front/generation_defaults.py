"""The sampling defaults of a checkpoint, and the tokens that end a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Default values for unset fields of a request, and the end tokens of the model.

    Attributes:
      sampling: values of `SamplingParams` fields, under some of the ``SAMPLING_KEYS``.
      max_tokens: the most tokens of a completion; None: the rest of the context.
      eos_token_ids: tokens that end a completion. The tokenizer's end token may be missing here.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_checkpoint(
        cls,
        generation_config: Mapping[str, Any],
        *,
        use_sampling: bool = True,
        overrides: Mapping[str, Any] | None = None,
    ) -> GenerationDefaults:
        """Returns the defaults in the contents of generation_config.json.

        Null means the same as a missing key; ``do_sample`` is ignored.

        Args:
          generation_config: the contents of generation_config.json.
          use_sampling: use the sampling values of ``generation_config``. Its end tokens count in
            any case.
          overrides: values that replace those of ``generation_config``, even if ``use_sampling`` is
            false.

        Raises:
          ConfigError: a value has the wrong type or is out of range.
        """
        overrides = overrides or {}
        eos = _first_set(
            overrides.get("eos_token_id"),
            generation_config.get("eos_token_id"),
        )
        eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        given = {**(generation_config if use_sampling else {}), **overrides}
        sampling = {key: given[key] for key in SAMPLING_KEYS if given.get(key) is not None}
        max_tokens = given.get("max_new_tokens")
        try:
            SamplingParams(**sampling, max_tokens=max_tokens)
        except (InvalidRequestError, TypeError) as error:
            raise ConfigError(
                f"generation_config.json: {error}; --generation-config none ignores its sampling "
                "defaults, --override-generation-config changes them"
            ) from error
        return cls(sampling, max_tokens, eos_ids)

    def describe(self) -> tuple[str, str]:
        """Returns the defaults as text for the start-up log, and a sentence about their source."""
        shown: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, **self.sampling}
        if self.max_tokens is not None:
            shown["max_tokens"] = self.max_tokens
        values = ", ".join(f"{name} {value:g}" for name, value in shown.items())
        is_from_api = not self.sampling and self.max_tokens is None
        source = (
            "the API's own defaults"
            if is_from_api
            else "the model's own, as in generation_config.json"
        )
        return values, f"{source}; requests can set their own"


def _first_set(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)

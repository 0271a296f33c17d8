"""What a checkpoint says about sampling from it: defaults, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for what a request leaves unset, and the model's end tokens.

    Attributes:
      sampling: fields of `SamplingParams` by name, from the keys of ``SAMPLING_KEYS``.
      max_tokens: length of an answer for which none was asked, or None for the rest of the context.
      eos_token_ids: every token that ends an answer, the tokenizer's own included or not.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_checkpoint(
        cls,
        generation_config: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        use_sampling: bool = True,
        overrides: Mapping[str, Any] | None = None,
    ) -> GenerationDefaults:
        """Reads the contents of generation_config.json and config.json.

        A null is as good as a missing key, and ``do_sample`` is not looked at. The end tokens count
        also without ``use_sampling``, and are taken from ``config`` where ``generation_config``
        has none. ``overrides`` are put over ``generation_config``, whether that is used or not.

        Raises:
          ConfigError: a value is of the wrong type or out of its range.
        """
        overrides = overrides or {}
        eos = _first_set(
            overrides.get("eos_token_id"),
            generation_config.get("eos_token_id"),
            config.get("eos_token_id"),
        )
        eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        given = {**(generation_config if use_sampling else {}), **overrides}
        sampling = {key: given[key] for key in SAMPLING_KEYS if given.get(key) is not None}
        max_tokens = given.get("max_new_tokens")
        try:
            SamplingParams(**sampling, max_tokens=max_tokens)
        except (InvalidRequestError, TypeError) as error:
            raise ConfigError(
                f"generation_config.json: {error}; --generation-config none leaves its sampling "
                "defaults out, --override-generation-config changes them"
            ) from error
        return cls(sampling, max_tokens, eos_ids)

    def describe(self) -> tuple[str, str]:
        """For people: what counts when a request does not say, and where it comes from."""
        shown: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, **self.sampling}
        if self.max_tokens is not None:
            shown["max_tokens"] = self.max_tokens
        values = ", ".join(f"{name} {value:g}" for name, value in shown.items())
        is_ours = not self.sampling and self.max_tokens is None
        source = (
            "the API's own defaults" if is_ours else "the model's own, as in generation_config.json"
        )
        return values, f"{source}; requests can set their own"


def _first_set(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)

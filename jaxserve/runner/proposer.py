"""The interface of a proposer: a function on the device that guesses the next tokens of requests.

A draft that is wrong costs time and changes nothing: a step verifies all drafts with the model. So
a proposer may be any function of the tokens so far. To add one, write a module with a function
`propose`, and add a line to `PROPOSERS`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Int32

from jaxserve.errors import ConfigError


@runtime_checkable
class ProposeFn(Protocol):
    """Guesses the tokens that follow each sequence. Called while a step is traced."""

    def __call__(
        self,
        tokens: Int32[Array, "requests length"],
        num_tokens: Int32[Array, " requests"],
        *,
        num_drafts: int,
    ) -> tuple[Int32[Array, "requests {num_drafts}"], Int32[Array, " requests"]]:
        """Returns draft tokens, and how many of them each request gets.

        Args:
          tokens: i32[Q, H], the tokens of each request, prompt first; garbage after the last one.
          num_tokens: i32[Q], the number of tokens of each request, in [0, H]. Padding repeats the
            tokens of some row; what is proposed for it is ignored.
          num_drafts: K, at least 1, static.

        Returns:
          (i32[Q, K], i32[Q] in [0, K]). The tokens are in the vocabulary; those after the number
          of a request are ignored.
        """
        ...


PROPOSERS: dict[str, str] = {"ngram": "jaxserve.runner.ngram"}
"""Name -> module with a function `propose`, a `ProposeFn`."""


def load(name: str) -> ProposeFn:
    """Returns the proposer ``name``.

    Raises:
      ConfigError: no proposer has this name.
    """
    if name not in PROPOSERS:
        raise ConfigError(f"--speculative must be one of {', '.join(PROPOSERS)}, got {name!r}")
    return importlib.import_module(PROPOSERS[name]).propose

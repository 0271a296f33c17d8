"""What the tokens of a request have to obey, beyond numbers: the seam to grammars."""

from __future__ import annotations

from typing import Any, Protocol

from jaxserve.ipc.messages import FinishReason


class Constraint(Protocol):
    """Follows the tokens of one request and says which may come next.

    It never raises: trouble ends the request that it belongs to, and no other.
    """

    def fill_mask(self, mask: Any) -> None:
        """Sets the tokens that may come next.

        Args:
          mask: numpy u32[ceil(V / 32)], written over; token 32 w + b is bit b of word w. At least
            one bit is set afterwards; all of them if the request is to end anyway.
        """
        ...

    def accept(self, token_id: int) -> FinishReason | None:
        """Takes the token that was sampled.

        Returns None to go on; STOP if the answer is complete with this token; ERROR if the request
        cannot go on.
        """
        ...

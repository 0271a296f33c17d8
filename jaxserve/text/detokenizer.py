"""Token ids to text, piece by piece, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from jaxserve.text.tokenizer import Tokenizer


class DetokenizerStep(msgspec.Struct, frozen=True, gc=False):
    """What one push adds.

    Attributes:
      text_delta: text that is now certain; can be empty.
      stop_hit: the stop string that ended the answer, or None.
      num_tokens_used: how many of the tokens just pushed belong to the answer: all of them, or with
        a stop string those up to and including the one that completed it.
    """

    text_delta: str
    stop_hit: str | None
    num_tokens_used: int


class NullDetokenizer:
    """Stands for a `Detokenizer` where no text is wanted."""

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizerStep:
        """No text of any tokens."""
        return DetokenizerStep("", None, len(token_ids))


class Detokenizer:
    """The text of one answer as its tokens arrive.

    The joined deltas do not depend on how the tokens are divided into pushes. Without a stop string
    they are what decoding the bytes of all tokens at once gives, where bytes that are no character
    become U+FFFD; the bytes of an unfinished character are held back. No leading space is taken
    off, since the text goes on after a prompt.

    Stop strings are looked for after each token, in the characters completed by tokens after the
    first ``min_tokens``. The one that begins earliest wins, then the one named first. The
    text ends before it, or after it with ``include_stop``. Text is held back only while it could
    begin a stop string.

    The token that ended the answer for another reason, an end token or a stop id, should be pushed
    only if its text is wanted.

    Args:
      tokenizer: gives the bytes of the tokens.
      skip_special_tokens: leave special tokens out of the text.
      stop: texts that end the answer, none of them empty.
      include_stop: keep the stop string.
      min_tokens: number of tokens, over all pushes, whose text is not searched.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unsearched = min_tokens
        self._bytes = b""  # the beginning of a character
        self._done = False

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizerStep:
        """Adds tokens. ``finished`` says that they are the last, so that nothing is held back.

        After a stop string or ``finished`` nothing may be pushed.
        """
        assert not self._done, "pushed after the end"
        if self._matcher is not None:
            return self._push_searched(token_ids, self._matcher, finished)
        if len(token_ids) == 1 and not self._bytes and not finished:
            piece = self._pieces[token_ids[0]]
            if isinstance(piece, str):
                return DetokenizerStep(piece, None, 1)
        text = "".join([self._text(token_id) for token_id in token_ids])
        if finished:
            text += self._flush()
        return DetokenizerStep(text, None, len(token_ids))

    def _push_searched(
        self, token_ids: Sequence[int], matcher: StopMatcher, finished: bool
    ) -> DetokenizerStep:
        deltas = []
        for used, token_id in enumerate(token_ids, 1):
            text = self._text(token_id)
            if self._unsearched > 0:
                self._unsearched -= 1
                deltas.append(text)
                continue
            certain, stop = matcher.push(text)
            deltas.append(certain)
            if stop is not None:
                self._done = True
                deltas.append(stop if self._include_stop else "")
                return DetokenizerStep("".join(deltas), stop, used)
        if finished:
            deltas.append(matcher.held + self._flush())
        return DetokenizerStep("".join(deltas), None, len(token_ids))

    def _text(self, token_id: int) -> str:
        """The text that is complete with this token."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._bytes:
                return piece
            piece = piece.encode()
        data = self._bytes + piece
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[num_used:]
        return text

    def _flush(self) -> str:
        """Ends the text: the replacement for a character that was never finished."""
        self._done = True
        return self._bytes.decode(errors="replace")


class StopMatcher:
    """Finds the first of several texts in a stream of text.

    For each stop string it keeps how many of its characters the text so far ends with (the way of
    Knuth, Morris and Pratt), so the time that a character takes does not depend on their length.
    While no stop string has begun, and the new text has no first character of one, nothing is done.

    Attributes:
      held: the end of the text, which could begin a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.held = ""
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        # For each n, how much is still matched when the character after n matched ones is wrong.
        # Grown as far as the text has matched: a stop string can be long, and most are never begun.
        self._fallbacks = [[0, 0] for _ in stops]

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text. Returns the text before a stop string, and that string if found."""
        if not self.held and self._firsts.isdisjoint(text):
            return text, None
        whole = self.held + text
        found = min(((end - len(self._stops[i]), i) for i, end in self._ends(text)), default=None)
        if found is not None:
            start, i = found
            self.held = ""
            return whole[:start], self._stops[i]
        keep = max(self._matched)
        certain = len(whole) - keep
        self.held = whole[certain:]
        return whole[:certain], None

    def _ends(self, text: str) -> list[tuple[int, int]]:
        """Which stop strings are completed in new text: (index, end in held + text)."""
        ends = []
        num_held = len(self.held)
        for i, stop in enumerate(self._stops):
            fallback, matched = self._fallbacks[i], self._matched[i]
            if not matched and stop[0] not in text:
                continue
            for at, char in enumerate(text, num_held + 1):
                matched = _advance(stop, fallback, matched, char)
                if matched == len(stop):
                    ends.append((i, at))
                    break  # a later match of the same text begins later
            self._matched[i] = matched
        return ends


def _advance(stop: str, fallback: list[int], matched: int, char: str) -> int:
    """How many characters of ``stop`` are matched after one more character."""
    while matched and stop[matched] != char:
        matched = fallback[matched]
    if stop[matched] != char:
        return 0
    matched += 1
    while len(fallback) <= matched:
        n = len(fallback)
        k = fallback[n - 1]
        while k and stop[k] != stop[n - 1]:
            k = fallback[k]
        fallback.append(k + 1 if stop[k] == stop[n - 1] else 0)
    return matched

"""Turns token IDs into text while they arrive, and finds stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from jaxserve.text.tokenizer import Tokenizer


class DetokenizedText(msgspec.Struct, frozen=True, gc=False):
    """The result of one push.

    Attributes:
      text_delta: the text that is certain now; may be empty.
      stop_hit: the stop string that ended the completion, or None.
      num_tokens_used: how many of the pushed tokens belong to the completion: all of them, or up to
        and including the token that completed the stop string.
    """

    text_delta: str
    stop_hit: str | None
    num_tokens_used: int


class NullDetokenizer:
    """Replaces a `Detokenizer` if a request wants no text."""

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizedText:
        """Returns no text."""
        return DetokenizedText("", None, len(token_ids))


class Detokenizer:
    """Turns the tokens of one completion into text while they arrive.

    The joined deltas do not depend on how the tokens are divided into pushes. Without a stop string
    they equal the bytes of all tokens decoded at once, where invalid bytes become U+FFFD. The bytes
    of an unfinished character are held back. A leading space stays, because the text continues a
    prompt.

    After each token, the text is searched for stop strings, but only in the characters that tokens
    after the first ``min_tokens`` complete. The stop string that begins first wins; among those
    that begin together, the first of ``stop``. The text ends before the stop string, or after it
    with ``include_stop``. Text is held back only while it may be the beginning of a stop string.

    If EOS or a stop token ended the completion, push that token only if its text is wanted.

    Args:
      tokenizer: the tokenizer of the model.
      skip_special_tokens: leave special tokens out of the text.
      stop: stop strings, none of them empty.
      include_stop: keep the stop string in the text.
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
        self._token_texts = tokenizer.token_texts(skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unsearched = min_tokens
        self._bytes = b""  # the beginning of an unfinished character
        self._done = False

    def push(self, token_ids: Sequence[int], *, finished: bool) -> DetokenizedText:
        """Adds tokens and returns the text that is certain now.

        If they are the last tokens (``finished``), no text is held back. Nothing may be pushed
        after that, or after a stop string.
        """
        assert not self._done, "pushed after the end"
        if self._matcher is not None:
            return self._push_searched(token_ids, self._matcher, finished)
        if len(token_ids) == 1 and not self._bytes and not finished:
            text = self._token_texts[token_ids[0]]
            if isinstance(text, str):
                return DetokenizedText(text, None, 1)
        text = "".join([self._text(token_id) for token_id in token_ids])
        if finished:
            text += self._flush()
        return DetokenizedText(text, None, len(token_ids))

    def _push_searched(
        self, token_ids: Sequence[int], matcher: StopMatcher, finished: bool
    ) -> DetokenizedText:
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
                return DetokenizedText("".join(deltas), stop, used)
        if finished:
            deltas.append(matcher.held + self._flush())
        return DetokenizedText("".join(deltas), None, len(token_ids))

    def _text(self, token_id: int) -> str:
        """Returns the characters that a token completes."""
        piece = self._token_texts[token_id]
        if isinstance(piece, str):
            if not self._bytes:
                return piece
            piece = piece.encode()
        data = self._bytes + piece
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[num_used:]
        return text

    def _flush(self) -> str:
        """Ends the text; returns U+FFFD if a character is unfinished."""
        self._done = True
        return self._bytes.decode(errors="replace")


class StopMatcher:
    """Finds the first of several stop strings in a stream of text.

    For each stop string, the matcher keeps how many of the string's characters the text so far ends
    with (the Knuth-Morris-Pratt algorithm), so the time for a character does not depend on the
    length of the stop strings. While no stop string has begun, text is only searched for the first
    characters of stop strings.

    Attributes:
      held: the end of the text, which may be the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.held = ""
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        # Entry n of a list: how many characters still match when n have matched and the next one
        # does not. A list grows with the longest match, because stop strings can be long and rarely
        # begin.
        self._fallbacks = [[0, 0] for _ in stops]

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text; returns the certain text before a stop string, and the stop string or None."""
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
        """Returns (index, end in held + text) of each stop string that the new text completes."""
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
                    break  # a later match of the same stop string begins later
            self._matched[i] = matched
        return ends


def _advance(stop: str, fallback: list[int], matched: int, char: str) -> int:
    """Returns how many characters of ``stop`` match after one more character."""
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

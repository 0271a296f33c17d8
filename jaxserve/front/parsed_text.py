"""Turns token IDs into the events of a parser, and searches the content for stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from jaxserve.parsing.parser import MessageParser
from jaxserve.text.detokenizer import DetokenizedText, Detokenizer, StopMatcher
from jaxserve.text.tokenizer import Tokenizer


class ParsedDelta(DetokenizedText, frozen=True, gc=False):
    """The result of one push.

    Attributes:
      text_delta: the text of the content events.
      stop_hit: as in `DetokenizedText`.
      num_tokens_used: as in `DetokenizedText`.
      events: the events that the tokens completed.
      num_reasoning_tokens: how many of the tokens lie in a think block.
    """

    events: list[Event] = []
    num_reasoning_tokens: int = 0


class ParsedText:
    """Turns the tokens of one completion into events, as `Detokenizer` turns them into text.

    The joined events do not depend on how the tokens are divided into pushes. Reasoning and tool
    calls are not searched for stop strings. Text that the parser holds back because it may be a
    tool call is searched once it turns out to be content.

    Args:
      tokenizer: the tokenizer of the model.
      parser: the parser of this completion.
      skip_special_tokens: leave special tokens out of the text.
      stop: stop strings.
      include_stop: keep the stop string in the content.
      min_tokens: how many of the first tokens are not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: MessageParser,
        *,
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._parser = parser
        self._stop = stop
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unsearched = min_tokens

    def push(self, token_ids: Sequence[int], *, finished: bool) -> ParsedDelta:
        """Adds tokens and returns the events that are certain now.

        If they are the last tokens (``finished``), no text is held back.
        """
        out: list[Event] = []
        num_reasoning = 0
        for used, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push((token_id,), finished=False).text_delta
            was_reasoning = self._parser.is_reasoning
            stop = self._take(self._parser.push(text), out) if text else None
            num_reasoning += was_reasoning or self._parser.is_reasoning
            if stop is not None:
                return _parsed_delta(out, stop, used, num_reasoning)
            self._unsearched -= 1
        if finished:
            tail = self._detokenizer.push((), finished=True).text_delta
            rest = self._parser.push(tail) if tail else []
            stop = self._take([*rest, *self._parser.finish()], out)
            if stop is not None:
                return _parsed_delta(out, stop, len(token_ids), num_reasoning)
            self._flush(out)
        return _parsed_delta(out, None, len(token_ids), num_reasoning)

    def _take(self, events: Iterable[Event], out: list[Event]) -> str | None:
        """Appends events to ``out`` up to a stop string; returns the stop string, or None."""
        for event in events:
            if not isinstance(event, ContentDelta):
                self._flush(out)
                _append(out, event)
            elif self._matcher is None or self._unsearched > 0:
                _append(out, event)
            else:
                certain, stop = self._matcher.push(event.text)
                if stop is not None and self._include_stop:
                    certain += stop
                if certain:
                    _append(out, ContentDelta(certain))
                if stop is not None:
                    return stop
        return None

    def _flush(self, out: list[Event]) -> None:
        """Releases held text: a stop string cannot span a non-content event."""
        if self._matcher is not None and self._matcher.held:
            _append(out, ContentDelta(self._matcher.held))
            self._matcher = StopMatcher(self._stop)


def _append(out: list[Event], event: Event) -> None:
    """Appends an event to ``out``, or joins its text to the last event if both have one type."""
    last = out[-1] if out else None
    if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
        out[-1] = ContentDelta(last.text + event.text)
    elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
        out[-1] = ReasoningDelta(last.text + event.text)
    elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
        out[-1] = ToolCallArguments(event.index, last.text + event.text)
    else:
        out.append(event)


def _parsed_delta(
    events: list[Event], stop: str | None, num_used: int, num_reasoning: int
) -> ParsedDelta:
    text = "".join([event.text for event in events if isinstance(event, ContentDelta)])
    return ParsedDelta(text, stop, num_used, events, num_reasoning)

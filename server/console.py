"""Prints the progress of the start to the terminal or the log."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from jaxserve.config import GIB, MIB
from jaxserve.ipc.messages import Progress

QUIET_S = 3.5
"""Seconds without output after which the next tick prints the progress."""

BAR_WIDTH = 24


@dataclass(frozen=True)
class _Running:
    """A running phase: its latest event, and the time at which it began."""

    event: Progress
    since_s: float


class Console:
    """Prints the progress of a start.

    On a terminal, the running phase is a bar that is redrawn in place. Elsewhere, a phase prints a
    line when it begins, one when it ends, and one now and then in between. Lines of finished phases
    stay in both cases. Engines start at the same time, each with its own phases; the bar shows the
    running phase with the lowest engine number.

    Args:
      out: the stream to print to.
      is_terminal: whether the output is shown by a terminal; None asks ``out``.
      clock: returns seconds, like `time.monotonic`; replaced in tests.

    Attributes:
      phase: the name of the latest phase.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = "starting"
        self._out = out
        self._clock = clock
        self._is_terminal = out.isatty() if is_terminal is None else is_terminal
        self._last_output_s = clock()
        self._started_s = clock()
        self._last_event_s = clock()
        self._running: dict[int, _Running] = {}
        self._has_bar = False

    def say(self, text: str) -> None:
        """Prints permanent lines, and erases the bar."""
        if self._has_bar:
            self._out.write("\r\x1b[K")
            self._has_bar = False
        self._out.write(text + "\n")
        self._out.flush()
        self._last_output_s = self._clock()

    def progress(self, event: Progress) -> None:
        """Shows the progress of a phase."""
        now = self._last_event_s = self._clock()
        self.phase = event.phase
        before = self._running.pop(event.engine, None)
        is_new = before is None or before.event.phase != event.phase
        if event.seconds is not None:
            self.say(f"  {_label(event)}: {_amount(event)}done in {event.seconds:.1f} s")
            return
        since_s = now if before is None or is_new else before.since_s
        self._running[event.engine] = _Running(event, since_s)
        if self._is_terminal:
            self._draw()
        elif is_new:
            self.say(f"  {_label(event)}...")

    def tick(self) -> None:
        """Prints the progress again after a long silence. Call it about every second."""
        if self._is_terminal:
            self._draw()
        elif self._clock() - self._last_output_s >= QUIET_S:
            for _, running in sorted(self._running.items()):
                self.say(f"  {self._where(running)}")
            if not self._running:
                waited = self._clock() - self._last_event_s
                self.say(f"  waiting for {waited:.0f} s, after: {self.phase}")

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Calls `tick` every second while the block runs. Needs a running event loop."""

        async def keep_ticking() -> None:
            while True:
                await asyncio.sleep(1)
                self.tick()

        task = asyncio.create_task(keep_ticking())
        try:
            yield
        finally:
            task.cancel()

    def decisions(self, decisions: Iterable[Sequence[str]]) -> None:
        """Prints lines of (name, value, reason)."""
        rows = list(decisions)
        width = max((len(what) for what, _, _ in rows), default=0)
        for what, value, why in rows:
            self.say(f"  {what:<{width}}  {value}  ({why})")

    def ready(self, *, url: str, model: str, context: int, is_chat: bool, needs_key: bool) -> None:
        """Prints the URL, the model, and a command to try them."""
        took = self._clock() - self._started_s
        example = _curl(url, model, is_chat=is_chat, needs_key=needs_key)
        self.say(
            f"\nReady after {took:.1f} s\n"
            f"  URL      {url}\n"
            f"  model    {model}\n"
            f"  context  {context} tokens\n\n{example}\n"
        )

    def _draw(self) -> None:
        """Redraws the bar in place."""
        if not self._running:
            return
        first = self._running[min(self._running)]
        event = first.event
        share = min(event.done / event.total, 1.0) if event.total else 0.0
        filled = round(share * BAR_WIDTH)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        others = len(self._running) - 1
        more = f", and {others} more engine{'s' if others > 1 else ''}" if others else ""
        self._out.write(f"\r\x1b[K  [{bar}] {self._where(first)}{more}")
        self._out.flush()
        self._has_bar = True

    def _where(self, running: _Running) -> str:
        event = running.event
        elapsed = self._clock() - running.since_s
        left = ""
        # Estimate for bytes only: one program may take a hundred times as long as the next.
        if event.unit == "bytes" and 0 < event.done < event.total and elapsed > 1:
            left = f", about {elapsed * (event.total - event.done) / event.done:.0f} s left"
        detail = f" ({event.detail})" if event.detail else ""
        return f"{_label(event)}: {_amount(event)}{elapsed:.0f} s{left}{detail}"


def _label(event: Progress) -> str:
    return event.phase if event.engine == 0 else f"engine {event.engine}: {event.phase}"


def _amount(event: Progress) -> str:
    if not event.total:
        return ""
    if event.unit == "bytes":
        scale, unit = (GIB, "GiB") if event.total >= GIB else (MIB, "MiB")
        return f"{event.done / scale:.1f} of {event.total / scale:.1f} {unit}, "
    return f"{event.done:g} of {event.total:g} {event.unit}, "


def _curl(url: str, model: str, *, is_chat: bool, needs_key: bool) -> str:
    body: dict[str, object] = {"model": model, "max_tokens": 64}
    if is_chat:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        path, body["prompt"] = "completions", "The sky is blue because"
    lines = [f"curl {url}/{path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $API_KEY"')
    lines.append(f"-d {shlex.quote(json.dumps(body))}")
    return " \\\n  ".join(lines)

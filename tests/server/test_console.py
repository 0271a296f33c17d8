"""The messages that are printed while the server starts."""

import io
import itertools

from jaxserve.ipc.messages import Progress
from jaxserve.testing.waiting import until
from server.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_console(out: io.StringIO) -> tuple[Console, Clock]:
    clock = Clock()
    return Console(out, clock=clock), clock


def test_a_phase_prints_a_line_at_its_start_and_end() -> None:
    out = io.StringIO()
    console, _ = make_console(out)
    for done in (0, 1e9, 2e9):
        console.progress(Progress(0, "load weights", done, 3e9, "bytes"))
    console.progress(Progress(0, "load weights", 3e9, 3e9, "bytes", seconds=2.5))
    console.progress(Progress(1, "compile", 1, 8, "programs", "decode"))
    assert out.getvalue().splitlines() == [
        "  load weights...",
        "  load weights: 2.8 of 2.8 GiB, done in 2.5 s",
        "  engine 1: compile...",
    ]
    assert console.phase == "compile"


def test_a_line_is_printed_every_few_seconds() -> None:
    out = io.StringIO()
    console, clock = make_console(out)
    console.say("begin")
    printed_at, length = [clock.now], len(out.getvalue())
    for second in range(60):
        clock.now += 1
        if second in (10, 20, 25):
            console.progress(Progress(0, "compile", second, 30, "programs", "decode"))
        if second == 40:
            console.progress(Progress(0, "compile", 30, 30, "programs", seconds=30.0))
        console.tick()
        if len(out.getvalue()) > length:
            printed_at.append(clock.now)
            length = len(out.getvalue())
    assert max(b - a for a, b in itertools.pairwise(printed_at)) <= 5
    assert "  waiting for 8 s, after: starting\n" in out.getvalue()
    assert "  compile: 20 of 30 programs, 12 s (decode)\n" in out.getvalue()
    assert "  waiting for 16 s, after: compile\n" in out.getvalue()


def test_two_engines_in_the_same_phase_both_print_progress() -> None:
    out = io.StringIO()
    console, clock = make_console(out)
    printed_at, length = [clock.now], 0
    for phase in ("load weights", "compile"):
        for step in range(100):
            clock.now += 0.1
            for engine in (0, 1):
                console.progress(Progress(engine, phase, step // 10, 10, "programs"))
            if step % 10 == 9:
                console.tick()
            if len(out.getvalue()) > length:
                printed_at.append(clock.now)
                length = len(out.getvalue())
        for engine in (1, 0):
            console.progress(Progress(engine, phase, 10, 10, "programs", seconds=10.0))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 * 2 * 4
    for name in ("load weights", "engine 1: load weights", "compile", "engine 1: compile"):
        assert [line for line in lines if line.startswith(f"  {name}")] == [
            f"  {name}...",
            f"  {name}: 3 of 10 programs, 4 s",
            f"  {name}: 7 of 10 programs, 8 s",
            f"  {name}: 10 of 10 programs, done in 10.0 s",
        ]
    assert max(b - a for a, b in itertools.pairwise(printed_at)) <= 5


def test_an_engine_prints_progress_after_the_other_is_done() -> None:
    out = io.StringIO()
    console, clock = make_console(out)
    for engine in (0, 1):
        console.progress(Progress(engine, "compile", 1, 8, "programs"))
    console.progress(Progress(0, "compile", 8, 8, "programs", seconds=1.0))
    clock.now += 6
    console.tick()
    assert out.getvalue().splitlines()[3:] == ["  engine 1: compile: 1 of 8 programs, 6 s"]


def test_the_bar_shows_the_first_engine_and_counts_the_others() -> None:
    out = Terminal()
    console, _ = make_console(out)
    console.progress(Progress(0, "compile", 2, 8, "programs"))
    console.progress(Progress(1, "compile", 4, 8, "programs"))
    assert out.getvalue().endswith("compile: 2 of 8 programs, 0 s, and 1 more engine")
    console.progress(Progress(0, "compile", 8, 8, "programs", seconds=9.0))
    console.tick()
    assert out.getvalue().endswith("engine 1: compile: 4 of 8 programs, 0 s")


def test_the_bar_estimates_the_time_left_to_load_weights() -> None:
    out = Terminal()
    console, clock = make_console(out)
    console.progress(Progress(0, "load weights", 0, 4e9, "bytes"))
    clock.now += 3
    console.progress(Progress(0, "load weights", 1e9, 4e9, "bytes"))
    assert out.getvalue().endswith("load weights: 0.9 of 3.7 GiB, 3 s, about 9 s left")


async def test_progress_is_printed_in_the_background() -> None:
    out = io.StringIO()
    console, clock = make_console(out)
    with console.talking():
        clock.now += 10
        await until(out.getvalue)


def test_a_terminal_redraws_the_bar_and_finally_replaces_it() -> None:
    out = Terminal()
    console, clock = make_console(out)
    console.progress(Progress(0, "compile", 2, 8, "programs"))
    clock.now += 3
    console.tick()
    console.progress(Progress(0, "compile", 8, 8, "programs", seconds=9.0))
    text = out.getvalue()
    assert "\r\x1b[K  [######..................] compile: 2 of 8 programs, 0 s" in text
    assert "compile: 2 of 8 programs, 3 s" in text
    assert text.endswith("\r\x1b[K  compile: 8 of 8 programs, done in 9.0 s\n")
    assert text.count("\n") == 1


def test_decisions_are_printed_as_a_table_with_reasons() -> None:
    out = io.StringIO()
    make_console(out)[0].decisions(
        [("dtype", "float32", "no bf16"), ("context", "8192", "as asked")]
    )
    assert out.getvalue() == "  dtype    float32  (no bf16)\n  context  8192  (as asked)\n"


def test_ready_prints_a_command_to_paste() -> None:
    for is_chat, needs_key in itertools.product((False, True), repeat=2):
        out = io.StringIO()
        make_console(out)[0].ready(
            url="http://h:1/v1", model="it's", context=64, is_chat=is_chat, needs_key=needs_key
        )
        text = out.getvalue()
        assert "http://h:1/v1/chat/completions" in text if is_chat else "/v1/completions" in text
        assert ("Authorization" in text) == needs_key
        assert "64 tokens" in text
        assert "'\"'\"'" in text

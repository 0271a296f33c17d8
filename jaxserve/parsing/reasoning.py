"""Think blocks: <think>reasoning</think>answer.

White space at both ends of the block and before the answer is dropped. A block that the text ends
in is reasoning to the end. Tags anywhere else are ordinary text.
"""

from __future__ import annotations

from jaxserve.parsing.call_rules import Terminal
from jaxserve.parsing.scanner import Scanner, Steps

_OPEN, _CLOSE = "<think>", "</think>"


def qwen3(scan: Scanner, prompt: str) -> Steps[None]:
    """The answer may begin with a block, or be within one if the prompt has opened it."""
    return _read(scan, prompt.rstrip().endswith(_OPEN))


def deepseek_r1(scan: Scanner, prompt: str) -> Steps[None]:
    """The answer begins within a block, opened or not, unless the prompt has closed it."""
    return _read(scan, not prompt.rstrip().endswith(_CLOSE))


def _read(scan: Scanner, is_open: bool) -> Steps[None]:
    yield from scan.skip()
    if is_open:
        scan.drop()
    if (yield from scan.peek()) == "<" and (yield from scan.match(_OPEN)):
        is_open = True
        yield from scan.skip()
        scan.drop()
    if is_open:
        scan.is_reasoning = True
        if not (yield from scan.find(_CLOSE)):
            return
        yield from scan.skip()
        scan.drop()
        scan.is_reasoning = False
    yield from scan.rest()


def qwen3_rules(mark: Terminal, prompt: str) -> str:
    """For `registry.THINK_RULES`."""
    prompt = prompt.rstrip()
    if prompt.endswith(_CLOSE):
        return ""
    return _rules(mark, "{}" if prompt.endswith(_OPEN) else f"({mark(_OPEN)} {{}})?")


def deepseek_r1_rules(mark: Terminal, prompt: str) -> str:
    """For `registry.THINK_RULES`."""
    return "" if prompt.rstrip().endswith(_CLOSE) else _rules(mark, f"{mark(_OPEN)}? {{}}")


def _rules(mark: Terminal, think: str) -> str:
    """The rule ``think``, in which {} is a block after its opening mark."""
    end = mark(_CLOSE)
    if end.startswith("<"):  # a special token, which is in no text
        block, thought = f"thought {end}", "thought"
    else:
        block, thought = "thought", f"thought[suffix={end}]"
    return f"think: {think.format(block + ' GAP')}\n{thought}: /(.|\\n)*/\nGAP: /\\s{{0,8}}/\n"

"""Think blocks: <think>reasoning</think>content.

White space at both ends of the block and before the content is dropped. If the text ends within the
block, all of it is reasoning. Tags anywhere else are ordinary text.
"""

from __future__ import annotations

from jaxserve.parsing.scanner import Reading, Scanner
from jaxserve.structured_output.structural_tag import TagTerm

_OPEN, _CLOSE = "<think>", "</think>"


def qwen3(scan: Scanner, prompt: str) -> Reading[None]:
    """Reads a completion that may begin with a block, or within one that the prompt opened."""
    return _read(scan, prompt.rstrip().endswith(_OPEN))


def deepseek_r1(scan: Scanner, prompt: str) -> Reading[None]:
    """Reads a completion that begins in a block, even without a start tag.

    If the prompt closed the block, only a start tag begins another.
    """
    return _read(scan, not prompt.rstrip().endswith(_CLOSE))


def _read(scan: Scanner, is_open: bool) -> Reading[None]:
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


def qwen3_rules(tag: TagTerm, prompt: str) -> str:
    """Writes the rule ``think``; "" if the prompt closed the block."""
    prompt = prompt.rstrip()
    if prompt.endswith(_CLOSE):
        return ""
    return _rules(tag, "{}" if prompt.endswith(_OPEN) else f"({tag(_OPEN)} {{}})?")


def deepseek_r1_rules(tag: TagTerm, prompt: str) -> str:
    """Writes the rule ``think``; "" if the prompt closed the block."""
    return "" if prompt.rstrip().endswith(_CLOSE) else _rules(tag, f"{tag(_OPEN)}? {{}}")


def _rules(tag: TagTerm, think: str) -> str:
    """Writes the rule ``think`` from a template in which {} is a block after its start tag."""
    end = tag(_CLOSE)
    if end.startswith("<"):  # a special token, which no text contains
        block, thought = f"thought {end}", "thought"
    else:
        block, thought = "thought", f"thought[suffix={end}]"
    return f"think: {think.format(block + ' GAP')}\n{thought}: /(.|\\n)*/\nGAP: /\\s{{0,8}}/\n"

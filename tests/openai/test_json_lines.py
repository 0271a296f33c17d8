"""JSON that stays on one line for every reader."""

import json
import sys

import hypothesis
import hypothesis.strategies as st
import msgspec

from jaxserve.openai.json_lines import encode_line, escape_line_breaks


def test_no_character_splits_a_line() -> None:
    """Every character, as a value and as a key; among others those with similar bytes."""
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    splits = [c for c in characters if len(f"a{c}b".splitlines()) > 1]
    assert len(splits) == 10
    for group in (splits, characters):
        line = encode_line({"".join(group): group}).decode()
        assert line.splitlines() == [line]
        assert json.loads(line) == {"".join(group): group}


@hypothesis.given(
    st.text(st.sampled_from('a"\\\n\r\x0b\x0c\x1c\x85\xa0\xc2é\u2027\u2028\u2029“你😀'))
)
def test_the_value_is_unchanged(text: str) -> None:
    line = encode_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert escape_line_breaks(line) == line
    if len(line.decode().splitlines()) == len(msgspec.json.encode(text).decode().splitlines()):
        assert line == msgspec.json.encode({"text": text})

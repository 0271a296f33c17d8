"""The text in the content of a message or an item, whole or in parts."""

from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.openai.content import content_text

PARTS = {"text": "text", "refusal": "refusal"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "a\nb"),
    ],
)
def test_parts_are_joined_with_line_breaks(content: Any, text: str) -> None:
    assert content_text(content, "c", PARTS) == text


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        (5, "c", "c must be a string or a list of parts, got int"),
        ([5], "c[0]", r"c\[0\]: parts must have type 'text' or 'refusal', got no type"),
        ([{"type": ["text"]}], "c[0]", "got no type"),
        ([{"type": "image"}], "c[0]", "got 'image'"),
        ([{"type": "x" * 10**6}], "c[0]", "got 'x{50}'$"),
        ([{"type": "text"}], "c[0].text", r"c\[0\]\.text must be a string, got null"),
        ([{"type": "refusal", "text": "a"}], "c[0].refusal", "must be a string, got null"),
    ],
)
def test_rejects_other_content_with_its_path(content: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        content_text(content, "c", PARTS)
    assert caught.value.param == param

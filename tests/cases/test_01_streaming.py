"""Streams, server-sent events, and text from tokens."""

from jaxserve.testing.scripted_checkpoint import EOS

FIRE = [b"\xf0", b"\x9f", b"\x94", b"\xa5", "ok", EOS]


def test_js_001_bytes_of_a_character_wait_for_each_other(serve, script) -> None:
    server = serve(script(fire=FIRE))
    whole = server.complete("<fire>", max_tokens=6)["choices"][0]["text"]
    streamed = server.stream_complete("<fire>", max_tokens=6)
    assert whole == streamed.text() == "\U0001f525ok"
    assert all("\ufffd" not in delta for delta in streamed.deltas())

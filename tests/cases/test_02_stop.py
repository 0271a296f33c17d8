"""What ends an answer, what is left out of its text then, and the reason that is given."""

import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS, EOS_ID, FIRST_SPECIAL_ID

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
END = "<|end|>"
NUMBERS = [f"{i}," for i in range(40)]


@pytest.fixture(scope="module")
def server(serve, script):
    return serve(
        script(
            greek=["alpha", " beta", " gamma", " delta", EOS],
            user=["hi", "\nUser", ":", "x", EOS],
            part=["end", "\nUs", EOS],
            bar=[" foobar", "!", EOS],
            numbers=NUMBERS,
            early=[EOS],
            stops=["a", "STOP", "b", "ST", "OP", "c", EOS],
            border=["O", "P", "Q", "R", "S"],
            three=["one", "two", EOS],
        )
    ).one_token_at_a_time()


def ask(server, path, start, **more):
    """The one choice of the reply, with its usage; the stream must say the same."""
    request = {"max_tokens": 10, **more}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": start}]
    else:
        request["prompt"] = start
    reply = server.post(path, request)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    (choice,) = reply.json()["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    streamed = server.stream(path, {**request, "stream_options": {"include_usage": True}})
    assert streamed.text() == text
    assert streamed.finish_reason() == choice["finish_reason"]
    assert streamed.choices()[-1]["stop_reason"] == choice["stop_reason"]
    assert streamed.usage == usage
    return {
        "text": text,
        "finish": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "tokens": usage["completion_tokens"],
        "deltas": streamed.deltas(),
    }


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["beta gamma"], "alpha ", 3),
        ("a g", "alpha bet", 3),
        (["never", "mma del"], "alpha beta ga", 4),
        (["beta gamma", "ta"], "alpha be", 2),
        (["alpha beta gamma delta"], "", 4),
    ],
)
@BOTH
def test_js_022_a_stop_text_over_several_tokens(server, path, stop, text, tokens) -> None:
    got = ask(server, path, "<greek>", stop=stop)
    assert (got["text"], got["finish"], got["tokens"]) == (text, "stop", tokens)


@BOTH
def test_js_023_no_part_of_a_stop_text_is_sent(server, path) -> None:
    got = ask(server, path, "<user>", stop=["\nUser:"])
    assert got["deltas"] == ["hi"]
    assert got["stop_reason"] == "\nUser:"


@pytest.mark.parametrize(("max_tokens", "finish"), [(10, "stop"), (2, "length")])
@BOTH
def test_js_024_text_that_was_held_back_is_not_lost(server, path, max_tokens, finish) -> None:
    got = ask(server, path, "<part>", stop=["\nUser:"], max_tokens=max_tokens)
    assert (got["text"], got["finish"]) == ("end\nUs", finish)
    assert got["stop_reason"] is None


@pytest.mark.parametrize(("stop", "text"), [("ob", " fo"), (" foobar", ""), ("r", " fooba")])
@BOTH
def test_js_025_a_stop_text_inside_a_token(server, path, stop, text) -> None:
    got = ask(server, path, "<bar>", stop=[stop])
    assert (got["text"], got["tokens"]) == (text, 1)


@BOTH
def test_js_026_only_what_may_begin_a_stop_text_is_held(server, path) -> None:
    request = {"max_tokens": 20, "stop": ["Z" * 500], "return_token_ids": True}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": "<numbers>"}]
    else:
        request["prompt"] = "<numbers>"
    shown, ids, num_pieces = "", [], 0
    for choice in server.stream(path, request).choices():
        piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        shown += piece
        num_pieces += bool(piece)
        ids += choice.get("token_ids") or []
        # With every piece, all text is there that its tokens make.
        assert shown == server.tokenizer.decode(ids)
    assert shown == "".join(NUMBERS[:20])
    assert num_pieces == 20


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("start", "more"),
    [("half", {}), ("begun", {"stop": ["!"]}), ("begun", {"max_tokens": 2}), ("begun", {})],
)
def test_js_027_half_a_tool_call_at_the_end(serve, script, start, more) -> None:
    server = serve(
        script(
            half=["Sure ", "<tool", "_c", EOS],
            begun=["Hi ", '<tool_call>{"na', "!", "?", EOS],
        ),
        tool_call_parser="hermes",
    )
    messages = [{"role": "user", "content": f"<{start}>"}]
    request = {"messages": messages, "tools": TOOLS, "max_tokens": 10, **more}
    whole = server.post(CHAT, request).json()["choices"][0]
    streamed = server.stream(CHAT, request)
    assert (whole["message"]["content"] or "") == streamed.text()
    assert streamed.text().startswith("Sure <tool_c" if start == "half" else "Hi ")
    assert whole["finish_reason"] == streamed.finish_reason()
    assert whole["finish_reason"] == ("length" if "max_tokens" in more else "stop")
    assert "tool_calls" not in whole["message"]
    assert not any(choice["delta"].get("tool_calls") for choice in streamed.choices())


@pytest.mark.parametrize(
    ("stop", "text"),
    [("beta gamma", "alpha beta gamma"), ("eta", "alpha beta"), ("al", "al")],
)
@BOTH
def test_js_028_the_stop_text_can_be_kept(server, path, stop, text) -> None:
    got = ask(server, path, "<greek>", stop=[stop], include_stop_str_in_output=True)
    assert (got["text"], got["finish"], got["stop_reason"]) == (text, "stop", stop)


@pytest.mark.parametrize("stop", ["", [""], ["ok", ""], ["", "ok"]])
@BOTH
def test_js_030_an_empty_stop_text_is_refused(server, path, stop) -> None:
    request = {"stop": stop, "max_tokens": 5, "prompt": "x"}
    request["messages"] = [{"role": "user", "content": "x"}]
    assert server.refused(path, request)["param"] == "stop"


@pytest.mark.parametrize("stop", [None, []])
@BOTH
def test_js_031_null_is_no_stop_text(server, path, stop) -> None:
    got = ask(server, path, "<greek>", stop=stop)
    assert (got["text"], got["finish"]) == ("alpha beta gamma delta", "stop")
    assert got["stop_reason"] is None


@pytest.mark.parametrize(
    "stop", [["x" * 100] * 2000, [f"{i:0100}" for i in range(65)], "x" * 2**20, ["x" * 1001]]
)
@BOTH
def test_js_033_stop_texts_have_a_stated_limit(server, path, stop) -> None:
    request = {"stop": stop, "max_tokens": 200, "prompt": "x"}
    request["messages"] = [{"role": "user", "content": "x"}]
    error = server.refused(path, request)
    assert error["param"] == "stop"
    assert any(limit in error["message"] for limit in ("64", "1000"))


@pytest.mark.parametrize("echo", [False, True])
def test_js_034_the_prompt_is_not_searched(server, echo) -> None:
    inside = server.complete(
        "Q: a STOP b<numbers>", stop=["STOP"], echo=echo, max_tokens=4, skip_special_tokens=False
    )
    text = "0,1,2,3,"
    assert inside["choices"][0]["text"] == ("Q: a STOP b<numbers>" + text if echo else text)
    # The prompt ends with what the stop string begins with.
    border = server.complete("x ST<border>", stop=["<border>OP", "STOP"], echo=echo, max_tokens=4)
    assert border["choices"][0]["text"] == ("x ST<border>OPQR" if echo else "OPQR")
    for reply in (inside, border):
        assert reply["usage"]["completion_tokens"] == 4
        assert reply["choices"][0]["finish_reason"] == "length"


END_ID = FIRST_SPECIAL_ID
ENDING = {"end": ["ok", END, EOS, "on", "and"], "early": [EOS, "on", "and"]}
TWO = {"eos_token_id": [EOS_ID, END_ID]}


@pytest.fixture(scope="module")
def ending(serve, script):
    """Serves a checkpoint with two end tokens; ``where`` the second is named, if anywhere."""

    def make(where="generation_config", **flags):
        options = {"special": (END,)} | ({where: TWO} if where else {})
        return serve(script(**ENDING, options=options), **flags)

    return make


@pytest.mark.parametrize("skip", [True, False])
@BOTH
def test_js_035_every_end_token_of_the_generation_config_ends(ending, path, skip) -> None:
    got = ask(ending(), path, "<end>", max_tokens=20, skip_special_tokens=skip)
    assert (got["text"], got["finish"], got["tokens"]) == ("ok", "stop", 2)


@BOTH
def test_js_036_end_tokens_are_found_in_config_json_too(ending, path) -> None:
    got = ask(ending("config"), path, "<end>", max_tokens=20)
    assert (got["text"], got["finish"], got["tokens"]) == ("ok", "stop", 2)
    # Where no file names it, it is a token like others.
    got = ask(ending(None), path, "<end>", max_tokens=20)
    assert (got["text"], got["finish"], got["tokens"]) == ("ok", "stop", 3)


@pytest.mark.parametrize("where", ["generation_config", "config"])
@BOTH
def test_js_038_ignore_eos_ignores_every_end_token(ending, path, where) -> None:
    server = ending(where)
    got = ask(server, path, "<end>", ignore_eos=True, max_tokens=6)
    assert (got["text"], got["finish"], got["tokens"]) == ("okonandand", "length", 6)
    got = ask(server, path, "<end>", ignore_eos=True, stop=["onan"], max_tokens=6)
    assert (got["text"], got["finish"], got["tokens"]) == ("ok", "stop", 5)
    got = ask(server, path, "<end>", ignore_eos=True, stop_token_ids=[END_ID], max_tokens=6)
    assert (got["text"], got["stop_reason"], got["tokens"]) == ("ok", END_ID, 2)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("start", ["<early>", "<end>"])
@BOTH
def test_js_039_end_tokens_wait_for_min_tokens(ending, path, start, temperature) -> None:
    server = ending()
    more = {"temperature": temperature, "seed": 1, "min_tokens": 4, "max_tokens": 8}
    got = ask(server, path, start, **more)
    assert 4 <= got["tokens"] <= 8
    reply = server.complete(start, return_token_ids=True, **more)["choices"][0]
    assert not {EOS_ID, END_ID} & set(reply["token_ids"][:3])
    stopped = server.complete(
        start, **{**more, "min_tokens": 5}, stop_token_ids=[0, 10], return_token_ids=True
    )["choices"][0]
    assert not {0, 10, EOS_ID, END_ID} & set(stopped["token_ids"][:4])
    request = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    request |= {"min_tokens": 9, "max_tokens": 8}
    assert server.refused(path, request)["param"] == "min_tokens"


@BOTH
def test_js_040_stop_texts_wait_for_min_tokens(server, path) -> None:
    assert ask(server, path, "<stops>", stop=["STOP"])["text"] == "a"
    got = ask(server, path, "<stops>", stop=["STOP"], min_tokens=3)
    assert (got["text"], got["finish"], got["stop_reason"]) == ("aSTOPb", "stop", "STOP")
    # What comes before is not searched, not even for the beginning of a stop string.
    got = ask(server, path, "<stops>", stop=["bST"], min_tokens=3)
    assert (got["text"], got["stop_reason"]) == ("aSTOPbSTOPc", None)


@BOTH
def test_js_041_the_reply_says_what_ended_it(ending, path) -> None:
    server = ending()
    by_text = ask(server, path, "<end>", stop=["ok"])
    assert (by_text["stop_reason"], by_text["finish"]) == ("ok", "stop")
    (ok,) = server.complete("<end>", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"]
    by_id = ask(server, path, "<end>", stop_token_ids=[ok])
    assert (by_id["stop_reason"], by_id["finish"], by_id["text"]) == (ok, "stop", "")
    by_second = ask(server, path, "<end>")
    assert by_second["stop_reason"] in (END_ID, None)
    assert by_second["finish"] == "stop"
    plain = ask(ending(None), path, "<end>")
    assert (plain["stop_reason"], plain["finish"]) == (None, "stop")


@pytest.mark.parametrize(
    ("start", "more", "finish"),
    [
        ("<numbers>", {}, "length"),
        ("<three>", {}, "stop"),
        ("<greek>", {"stop": ["gamma"]}, "stop"),
        ("<greek>", {"stop": ["gamma d"]}, "length"),
        ("<three>", {"min_tokens": 3, "ignore_eos": True}, "length"),
    ],
)
@BOTH
def test_js_043_the_reason_of_the_last_allowed_token(server, path, start, more, finish) -> None:
    got = ask(server, path, start, max_tokens=3, **more)
    assert (got["finish"], got["tokens"]) == (finish, 3)


@pytest.mark.parametrize("override", ['{"temperature": 0}', '{"top_k": 1, "max_new_tokens": 9}'])
def test_js_044_overriding_a_default_keeps_the_end_tokens(ending, override) -> None:
    server = ending(override_generation_config=override)
    for path in (COMPLETIONS, CHAT):
        got = ask(server, path, "<end>", max_tokens=20)
        assert (got["text"], got["finish"]) == ("ok", "stop")
    none = ending(generation_config="none")
    assert ask(none, CHAT, "<end>", max_tokens=20)["text"] == "ok"

"""Stop strings and stop tokens: where the text ends, and the finish reason."""

import pytest

from jaxserve.testing.api_client import CHAT, COMPLETIONS
from jaxserve.testing.scripted_checkpoint import EOS, EOS_ID, FIRST_SPECIAL_ID

BOTH_ENDPOINTS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
END = "<|end|>"
NUMBERS = [f"{i}," for i in range(40)]


@pytest.fixture(scope="module")
def server(serve, scripted_checkpoint):
    return serve(
        scripted_checkpoint(
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
    ).with_one_token_per_output()


def generate(server, path, prompt, **more):
    """Returns facts about the only choice, and asserts that they are the same in a stream."""
    request = {"max_tokens": 10, **more}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": prompt}]
    else:
        request["prompt"] = prompt
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
@BOTH_ENDPOINTS
def test_js_022_a_stop_string_across_tokens_is_found(server, path, stop, text, tokens) -> None:
    result = generate(server, path, "<greek>", stop=stop)
    assert (result["text"], result["finish"], result["tokens"]) == (text, "stop", tokens)


@BOTH_ENDPOINTS
def test_js_023_no_part_of_a_stop_string_is_sent(server, path) -> None:
    result = generate(server, path, "<user>", stop=["\nUser:"])
    assert result["deltas"] == ["hi"]
    assert result["stop_reason"] == "\nUser:"


@pytest.mark.parametrize(("max_tokens", "finish"), [(10, "stop"), (2, "length")])
@BOTH_ENDPOINTS
def test_js_024_held_back_text_is_sent_at_the_end(server, path, max_tokens, finish) -> None:
    result = generate(server, path, "<part>", stop=["\nUser:"], max_tokens=max_tokens)
    assert (result["text"], result["finish"]) == ("end\nUs", finish)
    assert result["stop_reason"] is None


@pytest.mark.parametrize(("stop", "text"), [("ob", " fo"), (" foobar", ""), ("r", " fooba")])
@BOTH_ENDPOINTS
def test_js_025_a_stop_string_inside_a_token_is_found(server, path, stop, text) -> None:
    result = generate(server, path, "<bar>", stop=[stop])
    assert (result["text"], result["tokens"]) == (text, 1)


@BOTH_ENDPOINTS
def test_js_026_only_the_beginning_of_a_stop_string_is_held_back(server, path) -> None:
    request = {"max_tokens": 20, "stop": ["Z" * 500], "return_token_ids": True}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": "<numbers>"}]
    else:
        request["prompt"] = "<numbers>"
    text, ids, num_pieces = "", [], 0
    for choice in server.stream(path, request).choices():
        piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        text += piece
        num_pieces += bool(piece)
        ids += choice.get("token_ids") or []
        # No text is held back: it is the whole text of the tokens so far.
        assert text == server.tokenizer.decode(ids)
    assert text == "".join(NUMBERS[:20])
    assert num_pieces == 20


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("start", "more"),
    [("half", {}), ("begun", {"stop": ["!"]}), ("begun", {"max_tokens": 2}), ("begun", {})],
)
def test_js_027_an_incomplete_tool_call_is_not_a_call(
    serve, scripted_checkpoint, start, more
) -> None:
    server = serve(
        scripted_checkpoint(
            half=["Sure ", "<tool", "_c", EOS],
            begun=["Hi ", '<tool_call>{"na', "!", "?", EOS],
        ),
        tool_call_parser="hermes",
    )
    messages = [{"role": "user", "content": f"<{start}>"}]
    request = {"messages": messages, "tools": TOOLS, "max_tokens": 10, **more}
    complete = server.post(CHAT, request).json()["choices"][0]
    streamed = server.stream(CHAT, request)
    assert (complete["message"]["content"] or "") == streamed.text()
    assert streamed.text().startswith("Sure <tool_c" if start == "half" else "Hi ")
    assert complete["finish_reason"] == streamed.finish_reason()
    assert complete["finish_reason"] == ("length" if "max_tokens" in more else "stop")
    assert "tool_calls" not in complete["message"]
    assert not any(choice["delta"].get("tool_calls") for choice in streamed.choices())


@pytest.mark.parametrize(
    ("stop", "text"),
    [("beta gamma", "alpha beta gamma"), ("eta", "alpha beta"), ("al", "al")],
)
@BOTH_ENDPOINTS
def test_js_028_the_stop_string_can_be_included(server, path, stop, text) -> None:
    result = generate(server, path, "<greek>", stop=[stop], include_stop_str_in_output=True)
    assert (result["text"], result["finish"], result["stop_reason"]) == (text, "stop", stop)


@pytest.mark.parametrize("stop", ["", [""], ["ok", ""], ["", "ok"]])
@BOTH_ENDPOINTS
def test_js_030_an_empty_stop_string_is_refused(server, path, stop) -> None:
    request = {"stop": stop, "max_tokens": 5, "prompt": "x"}
    request["messages"] = [{"role": "user", "content": "x"}]
    assert server.refused(path, request)["param"] == "stop"


@pytest.mark.parametrize("stop", [None, []])
@BOTH_ENDPOINTS
def test_js_031_null_means_no_stop_string(server, path, stop) -> None:
    result = generate(server, path, "<greek>", stop=stop)
    assert (result["text"], result["finish"]) == ("alpha beta gamma delta", "stop")
    assert result["stop_reason"] is None


@pytest.mark.parametrize(
    "stop", [["x" * 100] * 2000, [f"{i:0100}" for i in range(65)], "x" * 2**20, ["x" * 1001]]
)
@BOTH_ENDPOINTS
def test_js_033_errors_state_the_limits_of_stop_strings(server, path, stop) -> None:
    request = {"stop": stop, "max_tokens": 200, "prompt": "x"}
    request["messages"] = [{"role": "user", "content": "x"}]
    error = server.refused(path, request)
    assert error["param"] == "stop"
    assert any(limit in error["message"] for limit in ("64", "1000"))


@pytest.mark.parametrize("echo", [False, True])
def test_js_034_stop_strings_in_the_prompt_are_ignored(server, echo) -> None:
    in_prompt = server.complete(
        "Q: a STOP b<numbers>", stop=["STOP"], echo=echo, max_tokens=4, skip_special_tokens=False
    )
    text = "0,1,2,3,"
    assert in_prompt["choices"][0]["text"] == ("Q: a STOP b<numbers>" + text if echo else text)
    # The prompt ends with the beginning of a stop string.
    across_boundary = server.complete(
        "x ST<border>", stop=["<border>OP", "STOP"], echo=echo, max_tokens=4
    )
    assert across_boundary["choices"][0]["text"] == ("x ST<border>OPQR" if echo else "OPQR")
    for reply in (in_prompt, across_boundary):
        assert reply["usage"]["completion_tokens"] == 4
        assert reply["choices"][0]["finish_reason"] == "length"


END_ID = FIRST_SPECIAL_ID
END_SCRIPTS = {"end": ["ok", END, EOS, "on", "and"], "early": [EOS, "on", "and"]}
TWO_END_IDS = {"eos_token_id": [EOS_ID, END_ID]}


@pytest.fixture(scope="module")
def serve_with_two_ends(serve, scripted_checkpoint):
    """``serve_with_two_ends(where)`` serves a model; file ``where`` names its second end token."""

    def make(where="generation_config", **flags):
        options = {"special": (END,)} | ({where: TWO_END_IDS} if where else {})
        return serve(scripted_checkpoint(**END_SCRIPTS, options=options), **flags)

    return make


@pytest.mark.parametrize("skip", [True, False])
@BOTH_ENDPOINTS
def test_js_035_every_end_token_of_the_generation_config_ends_the_text(
    serve_with_two_ends, path, skip
) -> None:
    result = generate(serve_with_two_ends(), path, "<end>", max_tokens=20, skip_special_tokens=skip)
    assert (result["text"], result["finish"], result["tokens"]) == ("ok", "stop", 2)


@BOTH_ENDPOINTS
def test_js_036_end_tokens_are_read_from_config_json_too(serve_with_two_ends, path) -> None:
    result = generate(serve_with_two_ends("config"), path, "<end>", max_tokens=20)
    assert (result["text"], result["finish"], result["tokens"]) == ("ok", "stop", 2)
    # If no file names it as an end token, it does not end the text.
    result = generate(serve_with_two_ends(None), path, "<end>", max_tokens=20)
    assert (result["text"], result["finish"], result["tokens"]) == ("ok", "stop", 3)


@pytest.mark.parametrize("where", ["generation_config", "config"])
@BOTH_ENDPOINTS
def test_js_038_ignore_eos_ignores_every_end_token(serve_with_two_ends, path, where) -> None:
    server = serve_with_two_ends(where)
    result = generate(server, path, "<end>", ignore_eos=True, max_tokens=6)
    assert (result["text"], result["finish"], result["tokens"]) == ("okonandand", "length", 6)
    result = generate(server, path, "<end>", ignore_eos=True, stop=["onan"], max_tokens=6)
    assert (result["text"], result["finish"], result["tokens"]) == ("ok", "stop", 5)
    result = generate(server, path, "<end>", ignore_eos=True, stop_token_ids=[END_ID], max_tokens=6)
    assert (result["text"], result["stop_reason"], result["tokens"]) == ("ok", END_ID, 2)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("prompt", ["<early>", "<end>"])
@BOTH_ENDPOINTS
def test_js_039_end_tokens_are_not_sampled_before_min_tokens(
    serve_with_two_ends, path, prompt, temperature
) -> None:
    server = serve_with_two_ends()
    more = {"temperature": temperature, "seed": 1, "min_tokens": 4, "max_tokens": 8}
    result = generate(server, path, prompt, **more)
    assert 4 <= result["tokens"] <= 8
    reply = server.complete(prompt, return_token_ids=True, **more)["choices"][0]
    assert not {EOS_ID, END_ID} & set(reply["token_ids"][:3])
    stopped = server.complete(
        prompt, **{**more, "min_tokens": 5}, stop_token_ids=[0, 10], return_token_ids=True
    )["choices"][0]
    assert not {0, 10, EOS_ID, END_ID} & set(stopped["token_ids"][:4])
    request = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    request |= {"min_tokens": 9, "max_tokens": 8}
    assert server.refused(path, request)["param"] == "min_tokens"


@BOTH_ENDPOINTS
def test_js_040_stop_strings_are_ignored_before_min_tokens(server, path) -> None:
    assert generate(server, path, "<stops>", stop=["STOP"])["text"] == "a"
    result = generate(server, path, "<stops>", stop=["STOP"], min_tokens=3)
    assert (result["text"], result["finish"], result["stop_reason"]) == ("aSTOPb", "stop", "STOP")
    # Text before min_tokens is not searched, not even for the beginning of a stop string.
    result = generate(server, path, "<stops>", stop=["bST"], min_tokens=3)
    assert (result["text"], result["stop_reason"]) == ("aSTOPbSTOPc", None)


@BOTH_ENDPOINTS
def test_js_041_stop_reason_names_the_stop_string_or_token(serve_with_two_ends, path) -> None:
    server = serve_with_two_ends()
    by_string = generate(server, path, "<end>", stop=["ok"])
    assert (by_string["stop_reason"], by_string["finish"]) == ("ok", "stop")
    (ok,) = server.complete("<end>", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"]
    by_id = generate(server, path, "<end>", stop_token_ids=[ok])
    assert (by_id["stop_reason"], by_id["finish"], by_id["text"]) == (ok, "stop", "")
    by_second_end_token = generate(server, path, "<end>")
    assert (by_second_end_token["stop_reason"], by_second_end_token["finish"]) == (END_ID, "stop")
    plain = generate(serve_with_two_ends(None), path, "<end>")
    assert (plain["stop_reason"], plain["finish"]) == (None, "stop")


@pytest.mark.parametrize(
    ("prompt", "more", "finish"),
    [
        ("<numbers>", {}, "length"),
        ("<three>", {}, "stop"),
        ("<greek>", {"stop": ["gamma"]}, "stop"),
        ("<greek>", {"stop": ["gamma d"]}, "length"),
        ("<three>", {"min_tokens": 3, "ignore_eos": True}, "length"),
    ],
)
@BOTH_ENDPOINTS
def test_js_043_the_finish_reason_is_right_at_max_tokens(
    server, path, prompt, more, finish
) -> None:
    result = generate(server, path, prompt, max_tokens=3, **more)
    assert (result["finish"], result["tokens"]) == (finish, 3)


@pytest.mark.parametrize("override", ['{"temperature": 0}', '{"top_k": 1, "max_new_tokens": 9}'])
def test_js_044_overriding_a_default_keeps_the_end_tokens(serve_with_two_ends, override) -> None:
    server = serve_with_two_ends(override_generation_config=override)
    for path in (COMPLETIONS, CHAT):
        result = generate(server, path, "<end>", max_tokens=20)
        assert (result["text"], result["finish"]) == ("ok", "stop")
    without_generation_config = serve_with_two_ends(generation_config="none")
    assert generate(without_generation_config, CHAT, "<end>", max_tokens=20)["text"] == "ok"

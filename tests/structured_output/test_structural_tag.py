"""Structural tags of every format, followed with llguidance and read back by the parsers."""

import json

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import FinishReason, Submit
from jaxserve.parsing.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from jaxserve.parsing.parser import MessageParser
from jaxserve.parsing.registry import (
    CALL_RULES,
    REASONING_PARSERS,
    THINK_RULES,
    TOOL_PARSERS,
    call_rules,
    reasoning_parser,
    think_rules,
    tool_parser,
)
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.constraint import GrammarCompiler
from jaxserve.structured_output.structural_tag import (
    MAX_VALUE_CHARS,
    RuleWriter,
    structural_tag,
    tag_terms,
)
from jaxserve.testing.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
LEAF = {"type": "array", "items": {"type": "null"}, "maxItems": 1}
TOOLS = {
    "look": {
        "type": "object",
        "properties": {
            "where": {"type": "string", "enum": ["Zürich", 'a "b"']},
            "how": {"$ref": "#/$defs/leaf"},
            "why": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["where", "how"],
        "additionalProperties": False,
        "$defs": {"leaf": LEAF},
    },
    "stop.now": {"type": "object", "additionalProperties": False},
}
VOCAB = 340


def tag_of(name, *, think="", parallel=True, tokenizer=TOKENIZER):
    rules = RuleWriter(TOOLS, parallel=parallel, tag=tag_terms(tokenizer))
    calls = call_rules(name, rules)
    assert calls is not None
    return structural_tag(think=think, calls=calls)


class Walk:
    """Follows one completion with a grammar."""

    def __init__(self, tag: str, kind="json_schema", spec=None, *, tokenizer=TOKENIZER) -> None:
        grammar = Grammar(kind, json.dumps(SCHEMA) if spec is None else spec, tag)
        params = SamplingParams(seed=0, grammar=grammar)
        submit = Submit("a", [1], params, eos_token_id=tokenizer.eos_token_id)
        compiler = GrammarCompiler(tokenizer, VOCAB)
        self.constraint = compiler.start(submit).result()
        self.tokenizer = tokenizer

    def allowed(self) -> list[int]:
        mask = np.zeros(-(-VOCAB // 32), np.uint32)
        self.constraint.fill_mask(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()

    def accepts(self, text: str) -> bool:
        """Returns whether ``text`` can be the whole completion."""
        reason = None
        for token_id in self.tokenizer.encode(text):
            if reason is not None or token_id not in self.allowed():
                return False
            reason = self.constraint.accept(token_id)
        return reason is FinishReason.STOP or self.tokenizer.eos_token_id in self.allowed()

    def random_completion(self, rng: np.random.Generator, limit: int = 1000) -> str:
        tokens = []
        for _ in range(limit):
            tokens.append(int(rng.choice(self.allowed())))
            if self.constraint.accept(tokens[-1]) is not None:
                shown = [i for i in tokens if i != self.tokenizer.eos_token_id]
                return self.tokenizer.decode(shown, skip_special_tokens=False)
        raise AssertionError("the completion does not end")


def read(parser: MessageParser, text: str):
    """Returns the reasoning, the content and the calls of a completion."""
    events = parser.push(text) + parser.finish()
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    content = "".join(e.text for e in events if isinstance(e, ContentDelta))
    calls = [[e.name, ""] for e in events if isinstance(e, ToolCallStart)]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


def check_call(name, arguments) -> None:
    if name == "stop.now":
        assert arguments == {}
        return
    assert name == "look"
    assert {"where", "how"} <= set(arguments) <= {"where", "how", "why"}
    assert arguments["where"] in ("Zürich", 'a "b"')
    assert arguments["how"] in ([], [None])
    assert 1 <= arguments.get("why", 1) <= 9


def test_every_format_with_rules_has_a_parser() -> None:
    assert CALL_RULES.keys() <= TOOL_PARSERS.keys()
    assert THINK_RULES.keys() == REASONING_PARSERS.keys()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", CALL_RULES)
def test_random_tokens_form_calls_or_the_text(name, parallel) -> None:
    rng = np.random.default_rng(7)
    counts = {"text": 0, "calls": 0}
    for _ in range(30):
        text = Walk(tag_of(name, parallel=parallel)).random_completion(rng)
        _, content, calls = read(MessageParser(None, tool_parser(name, TOOLS)), text)
        if calls:
            assert not content.strip()
            for call in calls:
                check_call(*call)
        else:
            assert json.loads(content) in ({"ok": True}, {"ok": False})
        counts["calls"] = max(counts["calls"], len(calls))
        counts["text"] += not calls
    assert counts["text"] > 0
    assert (counts["calls"] > 1) if parallel else (counts["calls"] == 1)


def as_json(call) -> str:
    return json.dumps(call, ensure_ascii=False)


LOOK = {"name": "look", "arguments": {"where": "Zürich", "how": []}}
LOOK_3 = {"name": "look", "parameters": {"where": "Zürich", "how": []}}
STOP, STOP_3 = {"name": "stop.now", "arguments": {}}, {"name": "stop.now", "parameters": {}}
WRITTEN_CALLS = {
    "hermes": [
        f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        for call in (LOOK, STOP)
    ],
    "llama3_json": [as_json(call) for call in (LOOK_3, STOP_3)],
    "mistral": [f"[TOOL_CALLS][{as_json(call)}]" for call in (LOOK, STOP)],
    "qwen3_coder": [
        "<tool_call>\n<function=look>\n<parameter=where>\nZürich\n</parameter>\n"
        "<parameter=how>\n[]\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop.now>\n</function>\n</tool_call>",
    ],
}


@pytest.mark.parametrize("name", CALL_RULES)
def test_accepts_calls_as_models_write_them(name) -> None:
    tag = tag_of(name)
    for text, expected in zip(WRITTEN_CALLS[name], (LOOK, STOP), strict=True):
        assert Walk(tag).accepts(text), text
        _, content, calls = read(MessageParser(None, tool_parser(name, TOOLS)), text)
        assert (content, calls) == ("", [tuple(expected.values())])
        assert not Walk(tag).accepts(text.replace("look", "loot").replace("now", "not"))
        assert not Walk(tag).accepts("Sure! " + text)
        assert not Walk(tag).accepts(text + '{"ok": true}')
    assert Walk(tag).accepts('{"ok": true}')
    assert not Walk(tag).accepts('{"ok": 1}')


def test_qwen3_coder_values_follow_the_types_of_the_schema() -> None:
    tools = {
        "f": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "n": {"type": ["integer", "string"]},
                "free": {},
                "a<b": {"type": "string"},
            },
            "required": ["code"],
        }
    }
    tag = structural_tag(think="", calls=qwen3_coder_calls(tools))

    def call(*values):
        return qwen3_coder_call("f", *values)

    code = 'if a < b:\n\tprint("</tool_call>")'
    assert Walk(tag).accepts(call(("code", code)))
    assert Walk(tag).accepts(call(("code", ""), ("n", "5"), ("free", '{"x": [1]}')))
    for bad in ([], [("n", "5")], [("code", "x"), ("n", "[]")], [("code", "x"), ("a<b", "y")]):
        assert not Walk(tag).accepts(call(*bad)), bad


def qwen3_coder_calls(tools) -> str:
    calls = call_rules("qwen3_coder", RuleWriter(tools, parallel=True, tag=tag_terms(TOKENIZER)))
    assert calls is not None
    return calls


def qwen3_coder_call(name, *values) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_qwen3_coder_values_follow_references_to_any_place() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"$ref": "#/properties/n"}},
        "additionalProperties": False,
    }
    parameters = {
        "properties": {
            "n": {"type": "integer"},
            "m": {"$ref": "#/properties/n"},
            "list": {"$ref": "#/$defs/node"},
            "self": {"$ref": "#"},
        },
        "additionalProperties": False,
        "$defs": {"node": node, "unused": {"enum": ["unused"]}},
    }
    calls = qwen3_coder_calls({"f": parameters})
    assert "unused" not in calls
    tag = structural_tag(think="", calls=calls)
    for key, value, expected in [
        ("m", "5", True),
        ("m", "x", False),
        ("list", '{"next": {"next": {"n": 1}}}', True),
        ("list", '{"next": {"m": 1}}', False),
        ("self", '{"n": 1, "self": {"m": 2}}', True),
        ("self", '{"n": "x"}', False),
    ]:
        assert Walk(tag).accepts(qwen3_coder_call("f", (key, value))) == expected, (key, value)


def test_qwen3_coder_leaves_out_what_no_value_matches() -> None:
    string = {"type": "string", "enum": [1, "x", None]}
    tools = {
        "f": {"properties": {"never": False, "none": {"type": "string", "enum": [1]}, "s": string}},
        "g": {"properties": {"never": False}, "required": ["never"]},
    }
    tag = structural_tag(think="", calls=qwen3_coder_calls(tools))
    assert Walk(tag).accepts(qwen3_coder_call("f"))
    assert Walk(tag).accepts(qwen3_coder_call("f", ("s", "x")))
    for bad in (("never", "5"), ("none", "1"), ("none", ""), ("s", "1"), ("s", "null")):
        assert not Walk(tag).accepts(qwen3_coder_call("f", bad)), bad
    assert not Walk(tag).accepts(qwen3_coder_call("g"))
    assert not Walk(tag).accepts(qwen3_coder_call("g", ("never", "5")))
    with pytest.raises(InvalidRequestError, match="no finite value matches") as caught:
        qwen3_coder_calls({"g": tools["g"]})
    assert caught.value.param == "tools"


def test_the_copies_of_definitions_are_limited() -> None:
    """A small body could become a grammar of gigabytes."""
    count = 400
    definitions = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    parameters = {
        "properties": {f"p{i}": {"$ref": "#/$defs/0"} for i in range(count)},
        "$defs": {**definitions, str(count): {"type": "integer"}},
    }
    assert len(json.dumps(parameters)) < 50_000
    with pytest.raises(
        InvalidRequestError, match=f"at most {MAX_VALUE_CHARS} characters"
    ) as caught:
        qwen3_coder_calls({"f": parameters})
    assert caught.value.param == "tools"
    few = {f"p{i}": {"$ref": "#/$defs/0"} for i in range(10)}
    assert len(qwen3_coder_calls({"f": {**parameters, "properties": few}})) < MAX_VALUE_CHARS


@pytest.fixture
def special():
    """A tokenizer whose think tags are special tokens."""
    tokenizer = tiny_tokenizer()
    tags = [i for i in range(tokenizer.vocab_size) if "think>" in tokenizer.token_text(i)]
    assert len(tags) == 2
    tokenizer.special_ids |= set(tags)
    return tokenizer


OPENED, CLOSED = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("tags", ["text", "tokens"])
@pytest.mark.parametrize(
    ("name", "prompt", "whole", "begun", "bare"),
    [
        ("qwen3", "hello", True, False, True),
        ("qwen3", OPENED, True, True, False),
        ("qwen3", CLOSED, False, False, True),
        ("deepseek_r1", "hello", True, True, False),
        ("deepseek_r1", OPENED, True, True, False),
        ("deepseek_r1", CLOSED, False, False, True),
    ],
)
def test_a_think_block_may_precede_the_text(
    tags, name, prompt, whole, begun, bare, special
) -> None:
    """A completion may have a whole block, the end of a block that the prompt began, or none."""
    tokenizer = special if tags == "tokens" else TOKENIZER
    think = think_rules(name, tag_terms(tokenizer), prompt=prompt)
    tag = structural_tag(think=think, calls="")
    if tags == "tokens" and name == "qwen3" and prompt == OPENED:
        whole = False  # a thought cannot contain a special token
    thought = "is 1 < 2 {\n\n}?"
    for text, expected in (
        (f"<think>{thought}</think>\n\n", whole),
        (f"{thought}</think>\n\n", begun),
        ("", bare),
    ):
        completion = text + '{"ok": true}'
        assert Walk(tag, tokenizer=tokenizer).accepts(completion) == expected, completion
        if not expected:
            continue
        parser = MessageParser(reasoning_parser(name, prompt=prompt), None)
        reasoning, content, _ = read(parser, completion)
        assert content == '{"ok": true}'
        assert (thought in reasoning) == bool(text)
    assert not Walk(tag, tokenizer=tokenizer).accepts(f"<think>{thought}</think>hello")


@pytest.mark.parametrize(
    ("kind", "spec", "text"),
    [
        ("json_object", "", '{"x": [1]}'),
        ("regex", "a/b+", "a/bb"),
        ("choice", '["é\\"", "no"]', 'é"'),
        ("grammar", 'start: "x" call+\ncall: "y"', "xyy"),
        ("grammar", 'root ::= "x" [0-9]+', "x05"),
    ],
)
def test_every_kind_of_grammar_can_have_a_structural_tag(kind, spec, text) -> None:
    think = think_rules("qwen3", tag_terms(TOKENIZER), prompt="")
    tag = tag_of("hermes", think=think)
    for before in ("", "<think>hm</think>"):
        assert Walk(tag, kind, spec).accepts(before + text)
        assert Walk(tag, kind, spec).accepts(before + WRITTEN_CALLS["hermes"][0])
        assert not Walk(tag, kind, spec).accepts(before + "z" + text)


def test_content_alone_needs_no_structural_tag() -> None:
    assert structural_tag(think="", calls="") == ""

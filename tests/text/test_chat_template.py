"""Chat templates: output like that of transformers, the sandbox and its limits."""

from datetime import datetime
from pathlib import Path

import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.errors import InvalidRequestError
from jaxserve.testing.tiny_tokenizer import CHAT_TEMPLATE
from jaxserve.text import chat_template
from jaxserve.text.chat_template import render_chat

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi <b>&amp; 漢字 "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort>",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "1",
                "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
    {"role": "tool", "content": "wind", "tool_call_id": "2"},
]

# Like Llama 3: trims, a date, tools as indented JSON.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # noqa: E501

# Like Qwen: loop neighbours, a namespace, a macro, loop controls, the generation tag.
QWEN = """\
{%- macro tag(name) %}<{{ name }}>{% endmacro %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + tag("tools") }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {% generation %}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_user %}
            {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '<tool_call>' + tool_call.function.name }}
            {%- for name, value in tool_call.function.arguments|items %}
                {{- name ~ '=' ~ value }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
        {% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def render(
    template: str, messages=CHAT, /, *, add_generation_prompt: bool = True, **options
) -> str:
    return render_chat(
        template,
        messages,
        add_generation_prompt=add_generation_prompt,
        special_tokens=TOKENS,
        **options,
    )


def reference(template: str, messages, *, add_generation_prompt: bool, **options) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **TOKENS,
        **options,
    )
    return text


THINKING = [*CHAT, {"role": "assistant", "content": "So", "reasoning_content": "\nhm\n"}]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CHAT, {}),
        (CHAT[1:], {"tools": TOOLS}),
        (TOOL_CHAT, {"tools": TOOLS, "date_string": "1 May 2026"}),
        (THINKING, {"enable_thinking": False}),
    ],
)
@pytest.mark.parametrize("template", [LLAMA3, QWEN, CHAT_TEMPLATE], ids=["llama", "qwen", "plain"])
def test_renders_like_transformers(
    template: str, messages: list, options: dict, add_generation_prompt: bool
) -> None:
    options = {"add_generation_prompt": add_generation_prompt, **options}
    assert render(template, messages, **options) == reference(template, messages, **options)


def test_renders_the_template_of_the_default_model(smollm2: Path) -> None:
    template = open_checkpoint(str(smollm2)).tokenizer().chat_template
    assert template is not None
    for messages in (CHAT, CHAT[1:]):
        expected = reference(template, messages, add_generation_prompt=True)
        assert render(template, messages) == expected
    assert expected.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_an_error_that_the_template_raises_reaches_the_client() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="^roles must alternate$") as caught:
        render(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for %}", "not valid: line 1"),
        ("{{ messages[0].content + 1 }}", "failed: can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "failed: .* has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: maximum recursion depth"),
    ],
)
def test_a_failing_template_is_an_invalid_request(template: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{{ messages.append({}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ _loop_turns.__init__() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_stops_unsafe_templates(template: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="failed: .*(unsafe|underscore|undefined|no loader)"
    ):
        render(template)


DOUBLED = (
    "{%% set ns = namespace(x='a') %%}{%% for i in range(40) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% set r = range(9999) %}{% for i in r for j in r %}{% endfor %}", "not valid"),
        (
            "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
            "looped more than",
        ),
        ("{{ range(10**9)|length }}", "Range too big"),
        ("{{ 'a' * 10**9 }}", "more than 16000000 characters"),
        ("{{ ([0] * 10**9)|length }}", "more than 16000000 characters"),
        ("{% for i in range(20) %}{{ 'a' * 10**6 }}{% endfor %}", "more than 16000000"),
        ("{{ 10**1000**1000 }}", "more than 100000 bits"),
        (DOUBLED % "ns.x + ns.x", "more than 16000000 characters"),
        (DOUBLED % "ns.x ~ '' ~ ns.x", "more than 16000000 characters"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "took more than|looped more than",
        ),
        ("{% for i in range(99999) %}{% set x = 'a' * 15000000 %}{% endfor %}", "took more than"),
        ("{{ lipsum(n=100000000) }}", "'lipsum' is undefined"),
    ],
)
def test_limits_stop_expensive_templates(monkeypatch, template: str, complaint: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_TIME_S", 0.5)
    with pytest.raises(InvalidRequestError, match=complaint):
        render(template)


def test_strings_are_joined_as_in_transformers() -> None:
    template = "{{ 'a' ~ 1 ~ none ~ messages[0].role ~ [1.5] }}{{ [1] + [2] }}{{ (1 + 2) ~ 'x' }}"
    assert render(template, CHAT[:1]) == reference(template, CHAT[:1], add_generation_prompt=True)


def test_arguments_of_macros_can_have_any_name() -> None:
    template = "{% macro f(called, context, self) %}{{ called }}{{ context }}{% endmacro %}"
    assert render(template + "{{ f(called=1, context=2) }}") == "12"


def test_limits_apply_to_each_rendering() -> None:
    template = "{% for i in range(90000) %}{% endfor %}{% set _loop_turns = 0 %}ok"
    for _ in range(30):
        assert render(template) == "ok"


def test_loops_work_as_in_jinja() -> None:
    template = (
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}"
        "{% for x in nothing %}{{ x }}{% else %}none{% endfor %}"
        "{% for m in messages if m.role == 'user' %}"
        "{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{% if loop.first %}{% continue %}{% endif %}!"
        "{% endfor %}"
        "{% for m in [{'c': [{'n': 1}], 'n': 0}] recursive %}"
        "{{ m.n }}{{ loop(m.c) if m.c }}"
        "{% endfor %}"
    )
    assert render(template) == "a1none1/2False2/2True!01"


def test_null_fields_render_as_nothing() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    template = "{% for m in messages %}[{{ m.content }}{{ m.name }}]{% endfor %}"
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {"role": "assistant", "tool_calls": calls},
    ]
    assert render(template, messages) == "[][]"


def test_reasoning_has_each_of_its_names_in_the_template() -> None:
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render(template, [{"role": "assistant", name: "hm"}]) == "hmhm"


def test_missing_special_tokens_render_as_nothing() -> None:
    assert render("[{{ bos_token }}{{ pad_token }}]") == "[<s>]"


def test_variables_cannot_override_those_of_the_server() -> None:
    shown = "{{ bos_token }} {{ template }} {{ messages|length }} {{ documents }}"
    assert render(shown, template="t", documents=[1], bos_token="x") == "<s> t 4 [1]"


def test_strftime_now_formats_the_current_time() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year + i) for i in (-1, 0)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "hi"),
        ("{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}", "<hi>"),
        ("{% for p in messages[0]['content'] | list %}<{{ p.text }}>{% endfor %}", "<hi>"),
        ("{% set c = messages[0].content %}{% for p in c %}<{{ p.text }}>{% endfor %}", "<hi>"),
        (
            "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}"
            "{% for p in c %}<{{ p.text }}>{% endfor %}{% endif %}",
            "hi",
        ),
        ("{% for c in ['x'] %}{{ messages[0].content + c }}{% endfor %}", "hix"),
    ],
)
def test_strings_become_lists_of_parts_for_templates_that_loop_over_them(
    source: str, expected: str
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"add_generation_prompt": False, "special_tokens": {}}
    assert render_chat(source, messages, **options) == expected

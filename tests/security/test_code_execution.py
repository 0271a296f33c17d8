"""No external input is executed: no pickles, no model code, no expressions.

CVE-2024-50050 and related ones, CVE-2025-66448, CVE-2025-9141, CVE-2026-5760.
"""

import ast
import json
import sys
from pathlib import Path

import pytest

from jaxserve.checkpoint.locate import open_checkpoint
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.parsing.parser import Parser
from jaxserve.parsing.registry import TOOL_PARSERS, tool_parser
from jaxserve.testing.tiny import tiny_config, write_checkpoint

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("jaxserve", "server", "pallas_kernels")
    for path in (ROOT / package).rglob("*.py")
)
MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("multiprocessing", "code", "codeop", "runpy", "torch", "yaml", "xmlrpc", "imp"),
}
FUNCTIONS = {"eval", "exec", "compile", "__import__", "breakpoint"}
METHODS = {
    *("literal_eval", "read_pickle", "set_extension_load", "send_pyobj", "recv_pyobj"),
    *("system", "popen", "spawn_module", "exec_module", "create_subprocess_shell"),
}
IMPORTERS = {
    "jaxserve/engine/process.py",  # --engine-factory
    "jaxserve/models/registry.py",  # our own classes, and those of installed packages
    "jaxserve/ops/attention.py",  # a table of our own backends
    "jaxserve/ops/linear.py",  # a table of our own weight formats
    "jaxserve/parsing/registry.py",  # a table of our own parsers
    "jaxserve/runner/proposer.py",  # a table of our own proposers
    "jaxserve/sampling/registry.py",  # our own stages, and those that the operator names
}
"""Files that import modules by a computed name. The name never comes from a model file."""


def violations(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            yield node.func.id
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in METHODS:
                yield node.func.attr
            options = {option.arg: option.value for option in node.keywords}
            for name in ("trust_remote_code", "allow_pickle", "shell"):
                value = options.get(name)
                if value is not None and not (
                    isinstance(value, ast.Constant) and value.value is False
                ):
                    yield name
            if ast.unparse(node.func) == "np.load" and "allow_pickle" not in options:
                yield "np.load"


def test_the_search_finds_unsafe_code_only():
    code = (
        "import pickle\nfrom torch import load\neval('1')\nast.literal_eval(x)\n"
        "f(trust_remote_code=y)\nx.f(trust_remote_code=True)\nnp.load(f)\nx.run(c, shell=True)\n"
        "from a import b\nre.compile('x')\nlowered.compile()\nx.f(trust_remote_code=False)\n"
    )
    assert sorted(violations(ast.parse(code))) == sorted(
        ["pickle", "torch", "eval", "literal_eval", "trust_remote_code", "np.load", "shell"]
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_file_has_unsafe_code(path):
    assert list(violations(ast.parse(path.read_text()))) == []


def test_only_listed_files_import_modules_by_name():
    ways = ("import_module", "EntryPoint(", "entry_points(")
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(way in path.read_text() for way in ways)
    }
    assert found == IMPORTERS


@pytest.mark.parametrize("key", ["auto_map", "custom_pipelines", "trust_remote_code"])
def test_code_next_to_the_weights_is_not_run(tmp_path, key):
    """Neither the configuration, the tokenizer nor its mere presence causes code to run."""
    folder = write_checkpoint(tmp_path / "model", tiny_config())
    trap = f"open({str(tmp_path / 'trapped')!r}, 'w')\n"
    names = ("modeling_evil", "configuration_evil", "tokenization_evil", "conftest", "__init__")
    for name in (*names, "sitecustomize"):
        (folder / f"{name}.py").write_text(trap)
    for file in ("config.json", "tokenizer_config.json"):
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        content[key] = {
            "AutoConfig": "configuration_evil.Config",
            "AutoModelForCausalLM": "modeling_evil.Model",
            "AutoTokenizer": ["tokenization_evil.Tokenizer", None],
        }
        content["tokenizer_class"] = "EvilTokenizer"
        path.write_text(json.dumps(content))
    before = set(sys.modules)
    checkpoint = open_checkpoint(str(folder))
    checkpoint.tokenizer().encode("hello")
    dict(checkpoint.tensors())
    assert not (tmp_path / "trapped").exists()
    assert not any("evil" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "m.ckpt"])
def test_rejects_pickled_weights(tmp_path, name):
    folder = write_checkpoint(tmp_path / "model", tiny_config())
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_tool_calls_are_parsed_without_evaluation(name, tmp_path):
    evil = f"__import__('os').system('touch {tmp_path}/trapped')"
    parser: Parser = tool_parser(name, {"f": {"properties": {"a": {"type": "integer"}}}})
    for text in (
        f"[f(a={evil})]",
        f"<tool_call>\n<function=f>\n<parameter=a>\n{evil}\n</parameter>\n</function>\n</tool_call>",
        f'<tool_call>{{"name": "f", "arguments": {{"a": {evil}}}}}</tool_call>',
        f'[TOOL_CALLS]f[ARGS]{{"a": {evil}}}',
    ):
        parser.push(text)
    parser.finish()
    assert not (tmp_path / "trapped").exists()


def test_templates_cannot_escape_the_sandbox():
    """Includes escapes that Jinja had to fix: CVE-2024-56201, CVE-2024-56326, CVE-2025-27516."""
    from jaxserve.text.chat_template import render_chat

    for template in (
        "{{ ('{0.__class__.__init__.__globals__}'|attr('format'))(messages) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{{ ['{0.__class__}']|map('format', messages)|list }}{{ messages.__class__ }}",
        "{{ (['x']|map(attribute='format')|first)(messages).__class__ }}",
        "{{ '{x.__class__}'.format_map({'x': messages}) }}",
        "{{ messages|attr('__class__')|attr('__mro__') }}{{ ''.__class__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (joiner|attr('__init__')).__globals__ }}",
        "{% import 'os' as os %}{{ os.system }}",
        "{% from 'os' import system %}",
        "{% extends '/etc/passwd' %}",
    ):
        try:
            text = render_chat(template, [], add_generation_prompt=True, special_tokens={})
        except InvalidRequestError:
            continue
        assert "class" not in text, template
        assert "root" not in text

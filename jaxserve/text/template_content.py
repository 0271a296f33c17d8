"""Whether a chat template takes the content of a message as a text or as a list of parts."""

from __future__ import annotations

from jinja2 import nodes


def wants_parts(template: nodes.Template) -> bool:
    """Whether a template loops over the content of messages and would make nothing of a text.

    Templates that ask whether the content is a string can do with one.
    """
    if any(test.name == "string" for test in template.find_all(nodes.Test)):
        return False
    names = {
        assigned.target.name
        for assigned in template.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node)
    }
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(value: nodes.Node | None, names: set[str] | frozenset[str] = frozenset()) -> bool:
    """Whether a value is ``x.content``, ``x['content']``, or a variable of these names."""
    while isinstance(value, nodes.Filter):
        value = value.node
    if isinstance(value, nodes.Getattr):
        return value.attr == "content"
    if isinstance(value, nodes.Getitem):
        return isinstance(value.arg, nodes.Const) and value.arg.value == "content"
    return isinstance(value, nodes.Name) and value.name in names

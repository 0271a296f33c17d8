"""Decodes the body of a request, or raises an error that names the field at fault."""

from __future__ import annotations

import codecs
import re
from typing import Any, TypeVar

import msgspec

from jaxserve.errors import InvalidRequestError

T = TypeVar("T")

MAX_ERROR_CHARS = 300

MAX_INTEGER = 2.0**53
"""Floats of at least this size stand for more than one integer."""

_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_ESCAPE_BYTES = len(r"\ud83d")
# An escape for one half of a surrogate pair, without the escape for the other half.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)


def decode(body: bytes | bytearray, body_type: type[T]) -> T:
    """Returns the struct of a JSON body, which may start with a byte order mark of UTF-8.

    Holds the interpreter while it decodes. `jaxserve.openai.json_structure` limits that time.

    Raises:
      InvalidRequestError: the body is not JSON in UTF-8 or nested too deeply, or a field has the
        wrong type. ``param`` is the path of that field, as in ``messages[0].role``.
    """
    body = body.removeprefix(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else body
    try:
        return _decode(body, body_type)
    except msgspec.ValidationError as error:
        raise wrong_type(error, body_type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error)
        if not body.strip():
            reason = "it is empty"
        elif b"\0" in body[:4] or body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason = "it is in UTF-16 or UTF-32, but must be in UTF-8"
        elif "surrogate" in reason or ("truncated" in reason and _ends_in_half_character(body)):
            reason = "a string has half of a surrogate pair, such as \\ud83d alone"
        elif "truncated" in reason:
            reason = "it ends too early"
        raise InvalidRequestError(f"the body is not valid JSON: {reason}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error


def _ends_in_half_character(body: bytes | bytearray) -> bool:
    """Returns whether a body ends where the decoder expects the other half of a pair."""
    return bool(_HALF_CHARACTER.search(body, max(len(body) - 2 * _ESCAPE_BYTES, 0)))


def _decode(body: bytes | bytearray, body_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    value = with_integers(msgspec.json.decode(body), body_type)
    return msgspec.convert(value, body_type, str_keys=True)


def with_integers(value: Any, form: Any) -> Any:
    """Returns a value in which integers that were written as floats, such as 3.0, are integers.

    JSON has one kind of number, and some clients write every number with a point.

    Args:
      value: a value of decoded JSON; it is not changed.
      form: the type that the value should have. Only places where it wants an integer, and not a
        float, change.
    """
    return _with_integers(value, msgspec.inspect.type_info(form))


def _with_integers(value: Any, form: msgspec.inspect.Type) -> Any:
    kinds = form.types if isinstance(form, msgspec.inspect.UnionType) else (form,)
    for kind in kinds:
        if isinstance(value, float) and isinstance(kind, msgspec.inspect.IntType):
            return int(value) if value.is_integer() and abs(value) < MAX_INTEGER else value
        if isinstance(value, list) and isinstance(kind, msgspec.inspect.ListType):
            return [_with_integers(item, kind.item_type) for item in value]
        if isinstance(value, dict) and isinstance(kind, msgspec.inspect.DictType):
            return {key: _with_integers(item, kind.value_type) for key, item in value.items()}
        if isinstance(value, dict) and isinstance(kind, msgspec.inspect.StructType):
            forms = {field.encode_name: field.type for field in kind.fields}
            return {
                key: _with_integers(item, forms[key]) if key in forms else item
                for key, item in value.items()
            }
    return value


def wrong_type(
    error: msgspec.ValidationError, form: Any, *, under: str = ""
) -> InvalidRequestError:
    """Returns the error for a value of the wrong type.

    Args:
      error: the error of msgspec, whose path starts at the value that was decoded.
      form: the type that the value should have.
      under: the field that holds the value; "" for the body itself.
    """
    message = str(error)
    match = _PATH.search(message)
    path = match["path"] if match else ""
    # The message may quote the value, which can be of any length.
    reason = (message[: match.start()] if match else message)[:MAX_ERROR_CHARS]
    if missing := _MISSING.match(reason):
        path, reason = f"{path}.{missing[1]}".removeprefix("."), "it is missing"
    elif reason.startswith("Invalid enum value"):
        reason += f"; expected one of {', '.join(map(repr, _choices(form, path)))}"
    which = "its keys: " if match and match["key"] else ""
    if path.endswith("[...]"):
        path, which = path.removesuffix("[...]"), which or "its values: "
    if under:
        path = under + ("" if not path or path.startswith("[") else ".") + path
    reason = reason.replace("`", "").replace(" | null", "")
    return InvalidRequestError(f"{path or 'body'}: {which}{reason}", param=path or None)


def _choices(form: Any, path: str) -> list[str]:
    """Returns the allowed values of the field at ``path`` in a struct or a list of structs."""
    kinds = [msgspec.inspect.type_info(form)]
    for name in re.findall(r"[^.\[\]]+|\[", path):
        parts = [part for kind in kinds for part in getattr(kind, "types", (kind,))]
        if name == "[":
            kinds = [p.item_type for p in parts if isinstance(p, msgspec.inspect.ListType)]
            continue
        structs = [part for part in parts if isinstance(part, msgspec.inspect.StructType)]
        fields = [field for struct in structs for field in struct.fields]
        kinds = [field.type for field in fields if field.encode_name == name] or kinds
    parts = [part for kind in kinds for part in getattr(kind, "types", (kind,))]
    literals = [part for part in parts if isinstance(part, msgspec.inspect.LiteralType)]
    return [str(value) for literal in literals for value in literal.values]


def json_type(value: Any) -> str:
    """Returns the name of a value's type for error messages: that of JSON or Python."""
    names = {type(None): "null", str: "str", list: "array", dict: "object"}
    return names.get(type(value)) or type(value).__name__

"""Values of options: what a flag's text or a YAML value is in the option's type, and whether it keeps the limits."""

import dataclasses
import json
import shlex
import types
import typing
from typing import Any

from eagle3.common.errors import UsageError

SHOWN = 200  # characters of a wrong value in a message
_LARGEST = 2.0**63
_FIX = "correct it; --help says what the option takes"


def plain_type(annotation: Any) -> tuple[type, bool]:
    """Return (the type without None, whether None is allowed); list[int] becomes list."""
    optional = False
    if isinstance(annotation, types.UnionType):
        choices = [choice for choice in annotation.__args__ if choice is not type(None)]
        optional = len(choices) < len(annotation.__args__)
        annotation = choices[0]
    return typing.get_origin(annotation) or annotation, optional


def checked(item: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """Return the value of an option in its type; UsageError naming `where` when it does not fit."""
    kind, optional = plain_type(item.type)
    if value is None and optional:
        return None
    if kind is not list:
        return _within_limits(item, _converted(item.type if kind is dict else kind, value, where), where)
    inner, length = typing.get_args(item.type)[0], item.metadata["length"]
    alone = inner is float and isinstance(value, int | float) and not isinstance(value, bool)  # temperature: 0.7
    values = [value] if alone else _listed(value, where)
    if length is not None and len(values) != length:
        raise UsageError("wrong number of values", where=where, expected=length, found=len(values),
                         fix=f"give {length} values")
    return [_within_limits(item, _converted(inner, element, where), where) for element in values]


def _listed(value: Any, where: str) -> list[Any]:
    """Return a list; one text holds it as words."""
    try:
        value = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError("the words cannot be told apart", where=where, found=f"{shown(value)} ({error})",
                         fix="close the quotation") from None
    if not isinstance(value, list):
        raise UsageError("wrong type", where=where, expected="a list", found=shown(value), fix=_FIX)
    return value


def _within_limits(item: dataclasses.Field[Any], value: Any, where: str) -> Any:
    choices, low, high = (item.metadata[key] for key in ("choices", "minimum", "maximum"))
    if choices and value not in choices:
        raise UsageError("not a valid choice", where=where, expected=" or ".join(choices), found=shown(value),
                         fix=_FIX)
    if low is not None and value < low:
        raise UsageError("too small", where=where, expected=f"at least {low}", found=value, fix=_FIX)
    if high is not None and value > high:
        raise UsageError("too large", where=where, expected=f"at most {high}", found=value, fix=_FIX)
    return value


def _converted(kind: Any, value: Any, where: str) -> Any:
    try:
        if (typing.get_origin(kind) or kind) is dict:
            return _object(kind, value)
        if kind is str and isinstance(value, dict | list | type(None)):
            raise ValueError("not text")
        if kind is bool and not isinstance(value, bool):
            raise ValueError("not true or false")
        if kind in (int, float) and isinstance(value, bool):
            raise ValueError("a number is needed")
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError("not a whole number")
        converted = kind(value)  # YAML 1.1 reads 1e-4 as text; float() mends that
        if kind in (int, float) and not abs(converted) < _LARGEST:
            raise ValueError("not a number that fits")  # nor NaN
        if kind is str and "\0" in converted:
            raise ValueError("it holds a NUL character")
        return converted
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        expected = "a JSON object" if typing.get_origin(kind) is dict else getattr(kind, "__name__", kind)
        raise UsageError(
            "wrong type", where=where, expected=expected, found=f"{shown(value)} ({str(error)[:SHOWN]})", fix=_FIX
        ) from None


def _object(kind: Any, value: Any) -> dict[str, Any]:
    """Return what JSON text or a mapping says, as JSON would have it; texts where the option's type says texts.

    Raises ValueError, TypeError or RecursionError for anything else.
    """
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if typing.get_args(kind) == (str, str):
        texts = {str(name): item if isinstance(item, str) else _scalar_text(item) for name, item in value.items()}
        if any("\0" in text for pair in texts.items() for text in pair):
            raise ValueError("it holds a NUL character")
        return texts
    return json.loads(json.dumps(value, allow_nan=False))


def _scalar_text(value: Any) -> str:
    if not isinstance(value, int | float):
        raise ValueError("its values must be texts")
    return json.dumps(value)


def shown(value: Any) -> str:
    """Return a value in a message, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"

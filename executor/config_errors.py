# SPDX-License-Identifier: Apache-2.0
"""From pydantic's list of errors to one line in the user's words: dotted key, value, constraint, fix."""

import difflib
import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types as at
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_UNKNOWN = ("extra_forbidden", "invalid_key")


def keys(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section in the spelling of the YAML file, in the order of declaration."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def kind(field: FieldInfo) -> Any:
    """The declared type without ``| None``."""
    if not _nullable(field):
        return field.annotation
    return next(arg for arg in get_args(field.annotation) if arg is not NoneType)


def _nullable(field: FieldInfo) -> bool:
    return NoneType in get_args(field.annotation)


def subsection(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section a key opens, or None for a key that holds a value."""
    declared = kind(field) if field else None
    return declared if isinstance(declared, type) and issubclass(declared, BaseModel) else None


def expected(field: FieldInfo) -> str:
    """The constraint of a key in words, such as ``integer >= 1 or null``."""
    declared = kind(field)
    if get_origin(declared) is Literal:
        words = "one of " + ", ".join(get_args(declared))
    elif get_origin(declared) is tuple:
        words = "list of non-empty text"
    elif subsection(field):
        words = "mapping of keys"
    else:
        words = _KINDS[declared]
    bounds = []
    for rule in field.metadata:
        match rule:
            case at.MinLen():
                words = f"non-empty {words}"
            case at.Ge(ge=bound):
                bounds.append(f">= {bound}")
            case at.Gt(gt=bound):
                bounds.append(f"> {bound}")
            case at.Le(le=bound):
                bounds.append(f"<= {bound}")
            case at.Lt(lt=bound):
                bounds.append(f"< {bound}")
            case at.MultipleOf(multiple_of=bound):
                bounds.append(f"a multiple of {bound}")
    return f"{words} {' and '.join(bounds)}".rstrip() + (" or null" if _nullable(field) else "")


def show(value: object) -> str:
    """A value on one printable line of at most 60 characters, spelled as in YAML where possible."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date, a set, a mapping that contains itself
        text = repr(value)
    text = _printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def first_error(error: ValidationError, root: type[BaseModel]) -> str:
    """One line for the first error, and how many more there are."""
    # unknown keys first: a typo in a required key also makes that key missing
    first, *more = sorted(error.errors(include_url=False), key=lambda e: e["type"] not in _UNKNOWN)
    rest = f" (and {len(more)} more error{'s' * (len(more) > 1)})" if more else ""
    return _describe(first, root) + rest


def _describe(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    loc, value = error["loc"], error["input"]
    if error["type"] == "value_error":  # a rule between keys, which has said it all
        return str(error["ctx"]["error"])
    section, field = _find(root, loc)
    if error["type"] in _UNKNOWN:
        path = ".".join(str(part) for part in loc)  # YAML allows 7 as a key, so no brackets here
        word = str(loc[-1])
        return f"unknown key `{_printable(path)}`; {_follows(word, section) or _suggest(word, section, root)}"
    if field is None:
        return f"the config must be a mapping of sections: {', '.join(keys(root))}"
    if error["type"] == "missing":
        return f"missing key `{_dotted(loc)}`: expected {expected(field)}"
    return f"{_dotted(loc)}={show(value)}: expected {expected(field)}{_fix(value, field)}"


def _find(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that holds the last key of ``loc``, and its declaration (None for an unknown key)."""
    section, field = root, None
    for part in loc:
        if isinstance(part, int):  # an element of a list
            break
        section = subsection(field) or section
        field = keys(section).get(part)
    return section, field


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _printable(text: str) -> str:
    """Escapes line breaks, of which Unicode has several, control characters and lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _follows(word: str, section: type[BaseModel]) -> str | None:
    """For what is no key of a section because it follows from its keys: a property, whose docstring says how."""
    found = vars(section).get(word)
    if not isinstance(found, property):
        return None
    how = " ".join((found.__doc__ or "").split()).partition(".")[0]
    return f"it follows from other keys ({how}); leave it out"


def _suggest(word: str, section: type[BaseModel], root: type[BaseModel]) -> str:
    """The keys nearest to a misspelt one, or the section where it is right, or the list of legal keys."""
    elsewhere = [path for path, _ in walk(root) if path.rpartition(".")[2] == word]
    if elsewhere:
        return f"did you mean `{elsewhere[0]}`?"
    legal = list(keys(section))
    scores = {key: difflib.SequenceMatcher(None, key, word).ratio() for key in legal}
    best = max(scores.values())
    if best >= 0.6:  # difflib's own threshold for a close match
        near = [key for key in legal if scores[key] == best]
    else:
        near = [key for key in legal if word and key.startswith(word)]
    if not near:
        return f"legal: {', '.join(legal)}"
    return "did you mean " + " or ".join(f"`{key}`" for key in near) + "?"


def walk(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key below a section with its declaration, sections before their keys."""
    for key, field in keys(section).items():
        yield prefix + key, field
        if below := subsection(field):
            yield from walk(below, f"{prefix}{key}.")


def _fix(value: object, field: FieldInfo) -> str:
    """For the usual slips: a number that YAML took for text, a text it took for a number, no keys."""
    declared = kind(field)
    if subsection(field) and value is None:
        return "; remove the line or put keys under it"
    if declared is str and not isinstance(value, str | dict | list | NoneType):
        return "; put it in quotes"
    if declared in (int, float) and isinstance(value, str):
        try:
            # dump gives the spelling that YAML reads back as a number: 1.0e-06, where 1e-6 would be text
            return f"; write {yaml.safe_dump(declared(value)).split()[0]} without quotes"
        except ValueError:
            pass
    return ""

# SPDX-License-Identifier: Apache-2.0
"""From a recipe file and ``section.key=value`` overrides to one plain mapping, not knowing what keys mean."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from executor.errors import UserError

# Besides YAMLError, PyYAML lets errors of Python through: ValueError for the date 2024-13-45, KeyError for
# `!!bool maybe`, AttributeError for `!!timestamp x`, TypeError for sorting or hashing odd keys.
_PARSE_ERRORS = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError)


class _UniqueKeyLoader(yaml.SafeLoader):
    """``yaml.safe_load`` silently keeps the last of two equal keys; this loader refuses the second one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                problem = f"duplicate key `{key.value}`; remove one of the two"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node


def _parse(text: str, source: str) -> Any:
    """The value of a text by ``yaml.safe_load`` rules. Raises UserError with source, position, problem."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = _one_line(error.problem or error.context or error)
        raise UserError(f"{where}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{source}: not valid YAML: nested too deeply") from None
    except _PARSE_ERRORS as error:
        raise UserError(f"{source}: not valid YAML: {_one_line(error)}") from None


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file, unvalidated.

    Raises UserError when the file is missing, a directory, unreadable, not UTF-8, not YAML, empty, not a
    mapping at the top, or writes a key twice.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; configs/README.md lists the shipped recipes") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory; name one YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise UserError(f"{_one_line(path)}: cannot be read: {getattr(error, 'strerror', error)}") from None
    value = _parse(text, str(path))
    if value is None:
        raise UserError(f"{path}: the file is empty; at least model_config.model_name must be given")
    if not isinstance(value, dict):
        found = type(value).__name__
        raise UserError(f"{path}: the top level must be a mapping of sections (`model_config:`), not {found}")
    return value


def apply_overrides(mapping: Mapping[Any, Any], overrides: Iterable[str]) -> dict[Any, Any]:
    """A new mapping with each ``section.key=value`` written into it, the last one winning; the value is YAML.

    An absent or null section on the way is created. Raises UserError when the form is wrong, the value is not
    YAML, or the path leads through something that is not a mapping. Unknown keys are the caller's to find.
    """
    result = dict(mapping)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        path = dotted.strip().split(".")
        if not equals or len(path) < 2 or not all(path):
            example = "such as scheduler_config.batch_size=4"
            raise UserError(f"override `{_one_line(override)}`: expected section.key=value, {example}")
        result = _replaced(result, path, _parse(text, f"override `{_one_line(override)}`"), done=())
    return result


def _replaced(node: Mapping[Any, Any], path: list[str], value: Any, done: tuple[str, ...]) -> dict[Any, Any]:
    """A copy of ``node`` with ``path`` set; a copy, as a YAML alias may put one mapping under two keys."""
    key, *rest = path
    if not rest:
        return {**node, key: value}
    child = {} if node.get(key) is None else node[key]
    if not isinstance(child, Mapping):
        here, whole = ".".join((*done, key)), ".".join((*done, *path))
        raise UserError(f"override `{whole}`: `{here}` holds a value, not a section of keys")
    return {**node, key: _replaced(child, rest, value, done=(*done, key))}

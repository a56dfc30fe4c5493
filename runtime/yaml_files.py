"""Yaml as people mean it: 1e9 is a number, yes and no and 2026-11-30 are texts, and a key stands once in a mapping."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _no_duplicates(loader: Any, node: yaml.MappingNode) -> dict[Hashable, Any]:
    found: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in found:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands twice", key_node.start_mark
            )
        found[key] = loader.construct_object(value_node, deep=True)
    return found


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|false", "tf"),
    ("tag:yaml.org,2002:null", r"~|null|", ["~", "n", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?\d+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node))
)
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
)
_Loader.add_constructor("tag:yaml.org,2002:map", _no_duplicates)


def read_yaml(path: Path) -> Any:
    """Return a yaml file's content. Raises OSError, and ValueError saying where it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(
            f"{path.name}{where}: {getattr(error, 'problem', None) or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: not UTF-8: {error}") from error

"""What families share when they read a release's config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runtime.errors import UserError


@contextmanager
def keys_named() -> Iterator[None]:
    """Turn a key that is not there into a UserError that names it."""
    try:
        yield
    except KeyError as error:
        raise UserError(
            f"the checkpoint's config.json lacks {error}",
            "fetch the snapshot again, or check model.family",
        ) from error


def require(
    values: Mapping[str, tuple[Any, Any]], refusal: Callable[[str, Any, Any], UserError]
) -> None:
    """values: key -> (found, wanted). Raises the family's refusal of the first that differ."""
    for key, (found, wanted) in values.items():
        if found != wanted:
            raise refusal(key, found, wanted)

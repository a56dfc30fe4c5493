"""What the server asks of a living memory; knows no store and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from runtime.sampling import SamplingParams


class Remembers(Protocol):
    """What answers a request's `memory` field."""

    def check(self, field: Mapping[str, Any]) -> None:
        """Raise UserError for what cannot be answered. From any thread."""

    def answer(
        self,
        field: Mapping[str, Any],
        question: str,
        params: SamplingParams,
        after_layer: Callable[[], None],
    ) -> Recalled: ...

    def close(self) -> None: ...


class Recalled(Protocol):
    """An answer out of a memory."""

    @property
    def shown(self) -> str: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def finish(self) -> str: ...

    @property
    def asked_tokens(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...

"""The model that a server offers, apart from its engine."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.text import TextCodec


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the model before it is loaded."""

    name: str
    revision: str
    codec: TextCodec
    context_tokens: int
    version: str
    commit: str | None

    @property
    def fingerprint(self) -> str:
        """What an answer's bytes depend on: this code and these weights."""
        return f"nvmoe-{self.version}-{(self.commit or 'unknown')[:10]}-{self.revision[:12]}"

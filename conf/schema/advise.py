"""The hardware advisor: `advise`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from conf.schema.names import nearest


@dataclass
class SituationConfig:
    """What the advisor is told of a person's situation; null: not known, or assumed as conf/advisor says."""

    min_tok_s: float | None = None  # tokens a second that are fast enough
    context_tokens: float | None = None
    users: float | None = None  # at the same time
    country: str | None = None  # two letters, such as DE: prices of other countries do not count
    currency: str | None = None  # EUR, USD, GBP, CHF, JPY, PLN or CNY
    budget: float | None = None  # in that currency
    cloud_allowed: bool | None = None
    hours_day: float | None = None
    price_kwh: float | None = None
    horizon_months: float | None = None
    tokens_in_month: float | None = None
    tokens_out_month: float | None = None
    line_mbit: float | None = None
    accepts_smaller: bool | None = None
    language: str | None = None
    privacy: str | None = None
    noise: str | None = None
    use: str | None = None  # private or business


@dataclass
class AdviseConfig:
    """The hardware advisor."""

    question: str | None = None  # in plain words; numbers with units and names in it are heard
    model: str | None = None  # a model of conf/advisor/models.yaml; null: the one of model=
    variant: str | None = None  # of it; null: the first
    system: str | None = None  # a machine of conf/advisor/systems.yaml; null: the one of hw=
    as_of: str | None = None  # day that ages of prices are counted to; null: the knowledge base's
    situation: SituationConfig = field(default_factory=SituationConfig)
    plot: bool = True
    answer: str | None = None  # for stages=[advise_check]: file with the draft
    last_message: str | None = None  # for stages=[advise_check]: what the person wrote last
    searched_web: bool = False  # for stages=[advise_check]: the web was searched for the draft
    transport: str = "http"  # for stages=[advise_serve]: http or stdio
    host: str = "127.0.0.1"
    port: int = 8010


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "advise.situation.min_tok_s": (0, 1e6),
    "advise.situation.context_tokens": (1, 2**24),
    "advise.situation.users": (1, 1e6),
    "advise.situation.budget": (0, 1e9),
    "advise.situation.hours_day": (0, 24),
    "advise.situation.price_kwh": (0, 1e3),
    "advise.situation.horizon_months": (1, 1200),
    "advise.situation.tokens_in_month": (0, 1e15),
    "advise.situation.tokens_out_month": (0, 1e15),
    "advise.situation.line_mbit": (0, 1e7),
    "advise.port": (0, 65535),
}

_TRANSPORTS = ("http", "stdio")


def faults(advise: AdviseConfig) -> Iterable[str]:
    """Yield what no range says."""
    if advise.transport not in _TRANSPORTS:
        yield f"advise.transport {advise.transport!r} is unknown: {nearest(advise.transport, _TRANSPORTS)}"

"""Figures for Prometheus: vLLM's names behind a prefix of ours, and where experts came from. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.stats import ExpertCounters

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the engine has counted and holds at one moment."""

    experts: ExpertCounters
    row_read_nbytes: int
    ram_cache_nbytes: int
    vram_expert_nbytes: int
    is_direct: bool
    snapshot_nbytes: int
    snapshot_saved_nbytes: int


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, model: str, figures: Callable[[], EngineFigures | None]) -> None:
        """figures: asked at each scrape; None while the engine is not there."""
        self._registry = CollectorRegistry()
        self._model = model
        self.running = self._gauge("num_requests_running", "Requests being computed")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, cached ones included")
        self.cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens found in a state")
        self.asked_tokens = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.generated = self._counter("generation_tokens", "Tokens of answers")
        self.ttft = self._histogram("time_to_first_token_seconds", "From request to first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens")
        self.e2e = self._histogram("e2e_request_latency_seconds", "From request to its end")
        self.queued = self._histogram("request_queue_time_seconds", "In the queue")
        self.prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt")
        self.decode = self._histogram("request_decode_time_seconds", "After the first token")
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "Of an answer", TOKENS)
        self.prompt_speed = self._gauge("prompt_tokens_seconds", "Last prompt, tokens a second")
        self.speed = self._gauge("predicted_tokens_seconds", "Last answer, tokens a second")
        self.read_rate = self._gauge("disk_read_bytes_per_second", "Of the last answer")
        self._finished = self._labelled(
            "request_success", "Answers by their end", "finished_reason"
        )
        self._cancelled = self._labelled("requests_cancelled", "Given up by clients", "phase")
        self._errors = self._labelled("errors", "Errors by their code", "code")
        self._figures, self._engine = figures, _EngineCollector(model)
        self._registry.register(self._engine)

    def finished(self, reason: str) -> None:
        """Count an answer."""
        self._finished.labels(self._model, reason).inc()

    def cancelled(self, phase: str) -> None:
        """Count a request whose client went away."""
        self._cancelled.labels(self._model, phase).inc()

    def failed(self, code: str) -> None:
        """Count an error."""
        self._errors.labels(self._model, code).inc()

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        self._engine.found = self._figures()
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        gauge = Gauge(f"nvmoe_{name}", what, ["model_name"], registry=self._registry)
        return gauge.labels(self._model)

    def _counter(self, name: str, what: str) -> Counter:
        counter = Counter(f"nvmoe_{name}", what, ["model_name"], registry=self._registry)
        return counter.labels(self._model)

    def _labelled(self, name: str, what: str, label: str) -> Counter:
        return Counter(f"nvmoe_{name}", what, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        histogram = Histogram(
            f"nvmoe_{name}", what, ["model_name"], registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model)


class _EngineCollector(Collector):
    """Tells the engine's own counters as they were found last."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.found: EngineFigures | None = None

    def collect(self) -> Iterator[Metric]:
        found = self.found
        if found is None:
            return
        c = found.experts
        tiers = {"vram": c.vram_hits, "ram": c.hits, "late": c.late, "disk": c.misses}
        yield self._counters("expert_lookups", "Experts that decoding asked for", "tier", tiers)
        sweeps = {"vram": c.sweep_vram_hits, "ram": c.sweep_hits, "disk": c.sweep_misses}
        yield self._counters("prompt_expert_lookups", "Experts of prompts", "tier", sweeps)
        for name, what, value in (
            ("expert_bytes_read", "Bytes of experts read from the drive", c.read_nbytes),
            ("expert_bytes_copied", "Bytes of experts from RAM to the GPU", c.copied_nbytes),
            ("table_bytes_read", "Bytes of table rows read from the drive", found.row_read_nbytes),
            ("prefetch_useful", "Guesses that were used", c.guesses_used),
            ("prefetch_wasted", "Guesses read for nothing", c.guesses_wasted),
        ):
            family = CounterMetricFamily(f"nvmoe_{name}", what, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        for name, what, value in (
            ("io_direct", "1: experts are read around the page cache", int(found.is_direct)),
            ("ram_cache_bytes", "Of the expert cache in RAM", found.ram_cache_nbytes),
            ("vram_expert_bytes", "Of expert slots on the GPU", found.vram_expert_nbytes),
            ("snapshot_bytes", "Of conversations' states in RAM", found.snapshot_nbytes),
            ("snapshot_saved_bytes", "Of those on the disk", found.snapshot_saved_nbytes),
        ):
            gauge = GaugeMetricFamily(f"nvmoe_{name}", what, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge

    def _counters(self, name: str, what: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"nvmoe_{name}", what, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

"""What an answer took, as `timings` of replies and of /status. No torch."""

from __future__ import annotations

from typing import Any

from runtime.server.jobs import Job
from runtime.stats import RunSummary, TokenStats


def pass_timings(stats: TokenStats) -> dict[str, Any]:
    """Return where one pass's milliseconds and bytes went."""
    c = stats.counters
    return {
        "tokens": stats.num_tokens,
        "total_ms": round(stats.total_ms, 3),
        "drive_ms": round(stats.drive_wait_ms, 3),
        "rows_ms": round(stats.row_wait_ms, 3),
        "device_ms": round(stats.device_wait_ms, 3),
        "host_ms": round(stats.host_ms, 3),
        "drive_nbytes": stats.read_nbytes,
        "pcie_nbytes": c.copied_nbytes,
        "vram_hits": c.vram_hits + c.sweep_vram_hits,
        "ram_hits": c.hits + c.sweep_hits,
        "late": c.late,
        "misses": c.misses + c.sweep_misses,
    }


def answer_timings(s: RunSummary, job: Job, decode_s: float) -> dict[str, Any]:
    """Return one answer's figures: llama-server's names first, then ours."""
    assert job.started is not None
    assert job.first_token is not None
    return {
        "cache_n": s.cached_tokens,
        "prompt_n": s.prompt_tokens - s.cached_tokens,
        "prompt_ms": round(s.ttft_ms, 3),
        "prompt_per_second": round(s.prefill_tok_s, 2),
        "predicted_n": job.count,
        "predicted_ms": round(decode_s * 1e3, 3),
        "predicted_per_second": round(s.decode_tok_s, 2),
        "queue_ms": round((job.started - job.created) * 1e3, 3),
        "ttft_ms": round((job.first_token - job.created) * 1e3, 3),
        "expert_hit_rate": round(s.hit_rate, 4),
        "expert_misses": s.counters.misses + s.counters.sweep_misses,
        "read_nbytes_per_token": round(s.read_nbytes_per_token),
        "copied_nbytes_per_token": round(s.copied_nbytes_per_token),
        "tokens_per_pass": round(s.tokens_per_pass, 3),
    }

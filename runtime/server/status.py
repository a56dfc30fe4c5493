"""What a running server says of itself, for /status and /metrics; no secrets, no text of anybody."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runtime.engine import Engine
from runtime.server.jobs import Job, JobQueue
from runtime.server.metrics import EngineFigures
from runtime.server.served import Served
from runtime.session import Session
from runtime.snapshot import SnapshotStore


def served_facts(served: Served) -> dict[str, Any]:
    """Return which model and which code this is."""
    return {
        "model": {
            "id": served.name,
            "revision": served.revision,
            "can_think": served.codec.can_think,
            "can_call_tools": served.codec.can_call,
            "context_tokens": served.context_tokens,
        },
        "version": served.version,
        "commit": served.commit,
        "fingerprint": served.fingerprint,
    }


def queue_facts(queue: JobQueue, at_work: Mapping[Job, Session]) -> dict[str, Any]:
    """Return what waits and what is in work.  at_work: the session of each job that is answered now."""
    running, now = queue.running, time.perf_counter()
    return {
        "waiting": [
            {"id": job.name, "since_ms": round((now - job.created) * 1e3)} for job in queue.waiting
        ],
        "running": _running(running[0], at_work, now) if running else None,
        "all_running": [_running(job, at_work, now) for job in running],
    }


def _running(job: Job, at_work: Mapping[Job, Session], now: float) -> dict[str, Any]:
    return {
        "id": job.name,
        "model": job.model,
        "phase": job.phase,
        "since_ms": round((now - job.created) * 1e3),
        "prompt_tokens": len(job.prompt),
        "generated_tokens": job.count,
        "prompt_progress": prompt_progress(at_work.get(job)),
    }


def prompt_progress(session: Session | None) -> dict[str, Any] | None:
    """Return how far a prompt has been read, in llama-server's names; None when none is in work."""
    found = None if session is None else session.progress
    if found is None:
        return None
    return {
        "total": found.total,
        "cache": found.cached,
        "processed": round(found.processed),
        "time_ms": round((time.perf_counter() - found.started) * 1e3),
    }


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Return what the engine runs on and how: device, memory plan, drive, drafts, default sampling."""
    plan, vram = engine.plan, engine.vram_plan
    return {
        "device": str(engine.device),
        "plan": engine.format_plan().splitlines(),
        "ram_cache_nbytes": plan.cache_nbytes,
        "vram_expert_nbytes": 0 if vram is None else vram.slots * vram.record_nbytes,
        "io_direct": engine.is_direct,
        "drive_gib_s": engine.drive_gib_s,
        "prefill_tokens": engine.prefill_tokens,
        "drafts": None if engine.drafting is None else engine.drafting.report(),
        "sampling": asdict(engine.default_sampling()),
    }


def snapshot_facts(store: SnapshotStore) -> dict[str, Any]:
    """Return how many conversations' states are kept, and their bytes."""
    return {
        "in_ram": len(store),
        "nbytes": store.used_nbytes,
        "saved": store.num_saved,
        "saved_nbytes": store.saved_nbytes,
    }


def engine_figures(engine: Engine, store: SnapshotStore | None) -> EngineFigures:
    """Return what /metrics tells of the engine."""
    counters = engine.counters()
    return EngineFigures(
        experts=counters.experts,
        row_read_nbytes=counters.row_read_nbytes,
        ram_cache_nbytes=engine.plan.cache_nbytes,
        vram_expert_nbytes=0
        if engine.vram_plan is None
        else engine.vram_plan.slots * engine.vram_plan.record_nbytes,
        is_direct=engine.is_direct,
        snapshot_nbytes=0 if store is None else store.used_nbytes,
        snapshot_saved_nbytes=0 if store is None else store.saved_nbytes,
    )

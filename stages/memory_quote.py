"""Stored sentences, byte for byte, that share most with a question. Needs no model."""

from __future__ import annotations

import sys

from runtime.living_kv.errors import EXIT_LOW_CONFIDENCE
from runtime.living_kv.quote import quote
from stages.memory_parts import leave_metrics, opened_store
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Print each quote between markers that say where it stands; nothing found is LOW CONFIDENCE."""
    memory = ctx.cfg.memory
    assert memory.question is not None, "the schema asks for it"
    with opened_store(ctx.cfg) as store:
        found = quote(store, memory.question, memory.k, memory.scope)
        for q in found:
            print(
                f"<<< {q.session} sentence {q.sentence_id}, bytes {q.byte_offset}+{len(q.text)}, blake3 {q.digest[:16]}"
            )
            sys.stdout.flush()
            sys.stdout.buffer.write(q.text)
            sys.stdout.buffer.flush()
            print("\n>>>")
        if not found:
            print("LOW CONFIDENCE (no_rare_term, 0.00)")
            ctx.runner.exit_code = EXIT_LOW_CONFIDENCE
        leave_metrics(ctx, {"quotes": [q.to_dict() for q in found]})


STAGE = Stage(name="memory_quote", run=run, is_endpoint=True)

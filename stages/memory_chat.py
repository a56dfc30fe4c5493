"""One turn of a conversation that a store remembers: answered from all that is stored, then stored itself."""

from __future__ import annotations

import sys

from stages.memory_parts import leave_metrics, opened_memory, sampling, show_answer
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Open the store for writing, answer, append the turn, leave an exact snapshot for the next process."""
    settings = ctx.cfg.memory
    with opened_memory(ctx, is_writer=True) as (memory, engine):
        answer = memory.turn(settings.question, settings.session or "chat", sampling(ctx, engine))
        show_answer(ctx, answer)
        memory.close_session()
        how = "rebuilt from 8-bit blocks" if memory.was_rebuilt else "exact"
        print(f"hot window: {how}; now {memory.store.commit.tokens:,} tokens", file=sys.stderr)
        leave_metrics(ctx, {**answer.to_dict(), "was_rebuilt": memory.was_rebuilt})


STAGE = Stage(name="memory_chat", run=run, needs=lambda cfg: cfg.engine_stages, is_endpoint=True)

"""Answer one question from a store. Exit code 3 says LOW CONFIDENCE; the answer is printed all the same."""

from __future__ import annotations

import time

from stages.memory_parts import leave_metrics, opened_memory, sampling, show_answer
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Open the store for reading, answer, print."""
    with opened_memory(ctx) as (memory, engine):
        started = time.perf_counter()
        answer = memory.ask(ctx.cfg.memory.question, sampling(ctx, engine))
        show_answer(ctx, answer)
        seconds = time.perf_counter() - started
        leave_metrics(
            ctx, {**answer.to_dict(), "seconds": seconds, "hot_nbytes": memory.hot_nbytes}
        )


STAGE = Stage(name="memory_ask", run=run, needs=lambda cfg: cfg.engine_stages, is_endpoint=True)

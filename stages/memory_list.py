"""The sessions of a store: number, name, tag, day, sentences, source."""

from __future__ import annotations

import time

import numpy as np

from stages.memory_parts import opened_store
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Print one line a session."""
    with opened_store(ctx.cfg) as store:
        counts = np.bincount(store.sentences["session"], minlength=len(store.sessions))
        for session in store.sessions:
            day = time.strftime("%Y-%m-%d", time.gmtime(session.started))
            state = "" if session.is_finished or session.source == "chat" else "  (not finished)"
            tag = f" [{session.tag}]" if session.tag else ""
            print(
                f"{session.id}  {session.name}{tag}  {day}  {counts[session.id]} sentences{state}"
            )


STAGE = Stage(name="memory_list", run=run, is_endpoint=True)

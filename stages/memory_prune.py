"""Take sentences out of a store: hidden at once; with compact or forget their bytes go too."""

from __future__ import annotations

import sys

import numpy as np

from conf.schema import MemoryConfig
from runtime.living_kv.errors import MemoryUsageError
from runtime.living_kv.quote import parse_date
from runtime.living_kv.rewrite import compact
from runtime.living_kv.store import Store, Update
from stages.memory_parts import opened_store, root_of
from stages.stage import Stage, StageContext


def chosen(store: Store, memory: MemoryConfig) -> list[int]:
    """Return the sentences that go. Raises MemoryUsageError for a number that the store does not have."""
    count = len(store.sentences)
    odd = [i for i in memory.sentences if not 0 <= i < count]
    if odd:
        raise MemoryUsageError(
            f"the store has sentences 0 to {count - 1}, not {odd[0]}",
            "see memory_quote for numbers",
        )
    gone = set(memory.sentences)
    if memory.keep is not None:
        gone |= set(range(max(0, count - memory.keep)))
    if memory.before:
        at = parse_date(memory.before)
        old = [s.id for s in store.sessions if s.started < at]
        gone |= set(np.flatnonzero(np.isin(store.sentences["session"], old)).tolist())
    return sorted(gone)


def run(ctx: StageContext) -> None:
    """Write tombstones, then rewrite the store if that was asked for."""
    memory = ctx.cfg.memory
    with opened_store(ctx.cfg, is_writer=True) as store:
        gone = [i for i in chosen(store, memory) if i not in store.tombstones]
        if gone:
            tail, hot = store.tail or None, store.read_hot()
            store.append(Update(tombstones=gone, tail=tail, hot=hot))
        print(
            f"{store.root.name}: {len(gone)} sentences pruned, {len(store.tombstones)} in all",
            file=sys.stderr,
        )
    if memory.compact or memory.forget:
        kept = compact(root_of(ctx.cfg), is_forgotten=memory.forget)
        print(f"{root_of(ctx.cfg).name}: rewritten, {kept}", file=sys.stderr)


STAGE = Stage(name="memory_prune", run=run, is_endpoint=True)

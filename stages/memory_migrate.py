"""Read a store's text in anew with the present model; the old store stays beside it as `.bak`."""

from __future__ import annotations

import shutil
import sys
from functools import partial

from runtime.errors import UserError
from runtime.living_kv.rewrite import session_texts, swap
from runtime.living_kv.store import Store
from stages.memory_parts import root_of
from stages.stage import Stage, StageContext


def run(ctx: StageContext) -> None:
    """Ingest session by session into a new store, compare the text, swap."""
    from runtime.living_kv.service import open_memory
    from stages.download import snapshot_of
    from stages.opening import open_engine

    root = root_of(ctx.cfg)
    old = Store.open(root, is_writer=True)
    new_root = root.with_name(root.name + ".migrating")
    shutil.rmtree(new_root, ignore_errors=True)
    engine = open_engine(ctx.cfg, ctx.inputs, ctx.runner)
    try:
        snapshot = snapshot_of(ctx.inputs["download"])
        memory = open_memory(engine, snapshot, new_root, ctx.cfg.memory, is_writer=True)
        wanted = 0
        for session, text in session_texts(old):
            memory.clock = partial(float, session.started)
            memory.ingest(text, session.name, session.tag, session.source)
            wanted += len(text)
        found = int(memory.store.sentences["text_len"].sum())
        memory.close()
        if found != wanted:
            raise UserError(
                f"the new store holds {found:,} bytes of text, the old one {wanted:,}: nothing was changed",
                f"look at {new_root}, and run the command again",
            )
    finally:
        engine.close()
        old.close()
    backup = swap(root, new_root)
    print(
        f"{root.name}: {wanted:,} bytes of text read in; the old store is {backup.name}",
        file=sys.stderr,
    )


STAGE = Stage(name="memory_migrate", run=run, needs=lambda cfg: cfg.engine_stages, is_endpoint=True)

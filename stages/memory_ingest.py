"""Take a text into a store: through the model (kv), or as text alone. Goes on where an interrupted run was."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from conf.schema import RunConfig, StoreKind
from runtime.errors import UserError
from runtime.living_kv.store import Store
from runtime.living_kv.text_store import ingest_text
from runtime.units import format_duration, format_nbytes
from stages.memory_parts import leave_metrics, opened_memory, root_of
from stages.progress import Progress
from stages.stage import Stage, StageContext


def needs(cfg: RunConfig) -> tuple[str, ...]:
    """Return the set-up of the model; a store of text needs none."""
    return () if cfg.memory.kind is StoreKind.text else cfg.engine_stages


def read_file(name: str) -> bytes:
    """Return a text file's bytes. Raises UserError when it cannot be read."""
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"memory.file={name} cannot be read: {error.strerror}", "check the path"
        ) from error


def run(ctx: StageContext) -> None:
    """Append the file as one session."""
    memory = ctx.cfg.memory
    assert memory.file is not None, "the schema asks for it"
    data = read_file(memory.file)
    source = Path(memory.file).name
    session = memory.session or source
    started = time.perf_counter()
    with Progress(f"memory_ingest: {source}", len(data)) as bar:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            bar.advance(nbytes - done)
            done = nbytes

        if memory.kind is StoreKind.text:
            tokens = ingest_text(root_of(ctx.cfg), data, session, memory.tag, source)
        else:
            with opened_memory(ctx, is_writer=True) as (opened, _):
                tokens = opened.ingest(data, session, memory.tag, source, advance)
    store = Store.open(root_of(ctx.cfg))
    seconds = time.perf_counter() - started
    nbytes = sum(store.commit.lengths.values())
    print(
        f"{memory.store} ({store.header.kind}): {tokens:,} tokens read in {format_duration(seconds)}, now "
        f"{store.commit.tokens:,} tokens, {store.commit.sentences:,} sentences, {format_nbytes(nbytes)}",
        file=sys.stderr,
    )
    leave_metrics(
        ctx,
        {
            "read_tokens": tokens,
            "seconds": seconds,
            "tokens": store.commit.tokens,
            "nbytes": nbytes,
        },
    )
    store.close()


STAGE = Stage(name="memory_ingest", run=run, needs=needs, is_endpoint=True)

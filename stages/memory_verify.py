"""Check every byte of a store against what was committed, and its text against its tokens where the model is set up."""

from __future__ import annotations

from conf.schema import RunConfig
from runtime.living_kv.errors import checksum
from runtime.living_kv.layout import TEXT
from runtime.living_kv.rewrite import ERASED_TOKEN
from runtime.living_kv.sentences import readable
from runtime.living_kv.store import Store
from stages.memory_parts import opened_store
from stages.stage import Stage, StageContext


def token_faults(store: Store, cfg: RunConfig, ctx: StageContext) -> list[str]:
    """Return the commits whose text does not encode to the stored tokens; empty without the model's tokenizer."""
    found = ctx.runner.find("download")
    if found is None or store.header.kind != "kv":
        return []
    from runtime.engine import load_family
    from runtime.living_kv.identity import tokenizer_digest
    from stages.download import snapshot_of

    snapshot = snapshot_of(found)
    if tokenizer_digest(snapshot) != store.header.tokenizer:
        return []
    codec = load_family(cfg.model.family).open_codec(snapshot)
    tokens, at, faults = store.tokens().tolist(), 0, []
    for commit in store.commits:
        part = commit.ranges.get(TEXT)
        if part is not None:
            text = store.text_range(part.start, part.nbytes).decode("utf-8", "surrogateescape")
            stored = tokens[at : commit.tokens]
            # what was pruned for good is blank in the text and -1 in the tokens: nothing to compare
            if ERASED_TOKEN not in stored and codec.encode_plain(readable(text)) != stored:
                faults.append(f"commit {commit.seq}: its text does not encode to its tokens")
        at = commit.tokens
    return faults


def run(ctx: StageContext) -> None:
    """Print every problem, or that there is none. Raises StoreRefusedError when there are some."""
    with opened_store(ctx.cfg) as store:
        problems = [str(problem) for problem in store.verify()]
        if not problems:
            problems = token_faults(store, ctx.cfg, ctx)
        for problem in problems:
            print(problem)
        if problems:
            raise checksum(
                f"{len(problems)} problems in {store.root.name}; what is not named is whole",
                "sentences that are named are answered from text alone, or restore the files from a copy",
            )
        print(
            f"{store.root.name}: {store.commit.seq} commits, {store.commit.blocks} blocks, "
            f"{store.commit.sentences} sentences are what was written"
        )


STAGE = Stage(name="memory_verify", run=run, is_endpoint=True)

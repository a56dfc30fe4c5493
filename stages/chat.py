"""One answer on the terminal: text on stdout, then what it cost on stderr."""

from __future__ import annotations

import json
import logging
import sys

from runtime import hardware
from runtime.engine import Engine
from runtime.session import FinishReason, Session
from runtime.stats import RunSummary, TokenStats, format_summary, summarize
from stages.core import Stage, StageContext
from stages.opening import open_engine

log = logging.getLogger("stages")


def run(ctx: StageContext) -> None:
    """Answer `prompt`, print the answer as it comes, then the figures."""
    cfg = ctx.cfg
    assert cfg.prompt is not None, "the schema asks for a prompt"
    messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
    messages.append({"role": "user", "content": cfg.prompt})
    engine = open_engine(cfg, ctx.inputs, ctx.runner)
    try:
        log.info("%s", engine.plan.format())
        summary = answer(engine, messages, cfg.max_tokens)
    finally:
        engine.close()
    print(format_summary(summary), file=sys.stderr)
    log.debug("%s", json.dumps(summary.to_dict()))


def answer(engine: Engine, messages: list[dict[str, str]], max_tokens: int) -> RunSummary:
    """Stream one answer to stdout and return its figures."""
    from dataclasses import replace

    rates = engine.measure_rates()
    session = Session(engine)
    params = replace(engine.default_sampling(), max_tokens=max_tokens)
    prompt = engine.codec.encode_chat(messages)
    tokens: list[TokenStats] = []
    finish: FinishReason | None = None
    for piece in session.generate(prompt, params):
        print(piece.text, end="", flush=True)
        if piece.stats is not None:
            tokens.append(piece.stats)
        finish = piece.finish
    print(flush=True)
    if finish is FinishReason.length:
        print(f"(cut at {max_tokens} tokens: max_tokens=... allows more)", file=sys.stderr)
    return summarize(
        session.prefill_stats,
        tokens,
        len(prompt),
        engine.dense_nbytes,
        rates,
        hardware.peak_rss_nbytes(),
    )


STAGE = Stage(name="chat", run=run, needs=lambda cfg: tuple(cfg.model.setup), is_endpoint=True)

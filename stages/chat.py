"""One answer on the terminal: its content on stdout, its reasoning and what it cost on stderr."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, replace

from runtime import hardware
from runtime.answers import Content, Reasoning
from runtime.engine import Engine
from runtime.session import FinishReason, Session
from runtime.stats import Rates, RunSummary, TokenStats, format_summary, summarize
from runtime.text import ChatOptions
from stages.files import write_atomically
from stages.opening import open_engine, setup_stages, warm_up
from stages.stage import Stage, StageContext

log = logging.getLogger("stages")

RESULT_NAME = "result.json"  # in the folder of the run


def run(ctx: StageContext) -> None:
    """Answer `prompt`, print the answer as it comes, then the figures."""
    cfg = ctx.cfg
    assert cfg.prompt is not None, "the schema asks for a prompt"
    messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
    messages.append({"role": "user", "content": cfg.prompt})
    engine = open_engine(cfg, ctx.inputs, ctx.runner)
    try:
        for line in engine.format_plan().splitlines():
            log.info("%s", line)
        options = ChatOptions(cfg.thinking, cfg.effort)
        rates = engine.measure_rates()  # before anything is read in the background
        warm_up(engine, ctx.inputs)
        summary, tokens = answer(engine, rates, messages, options, cfg.max_tokens)
    finally:
        engine.close()
    print(format_summary(summary), file=sys.stderr)
    if ctx.runner.run_dir is not None:
        path = ctx.runner.run_dir / RESULT_NAME
        result = {"summary": summary.to_dict(), "tokens": [asdict(token) for token in tokens]}
        write_atomically(path, json.dumps(result, indent=1) + "\n")
        print(f"every token's figures: {path}", file=sys.stderr)


def answer(
    engine: Engine,
    rates: Rates,
    messages: list[dict[str, str]],
    options: ChatOptions,
    max_tokens: int,
) -> tuple[RunSummary, list[TokenStats]]:
    """Stream one answer to stdout and return its figures: of the run, and of each decoded token."""
    session = Session(engine)
    params = replace(engine.default_sampling(), max_tokens=max_tokens)
    prompt = engine.codec.encode_chat(messages, options)
    parser = engine.codec.parser(options)
    tokens: list[TokenStats] = []
    finish: FinishReason | None = None
    for piece in session.generate(prompt, params, parser=parser):
        for event in piece.events:
            if isinstance(event, (Content, Reasoning)):
                where = sys.stdout if isinstance(event, Content) else sys.stderr
                print(event.text, end="", flush=True, file=where)
        if piece.stats is not None:
            tokens.append(piece.stats)
        finish = piece.finish
    print(flush=True)
    if finish is FinishReason.length:
        print(f"(cut at {max_tokens} tokens: max_tokens=... allows more)", file=sys.stderr)
    summary = summarize(
        session.prefill_stats,
        tokens,
        len(prompt),
        engine.dense_nbytes,
        rates,
        hardware.peak_rss_nbytes(),
        hardware.peak_vram_nbytes(),
    )
    return summary, tokens


STAGE = Stage(name="chat", run=run, needs=setup_stages, is_endpoint=True)

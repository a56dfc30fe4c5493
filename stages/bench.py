"""How fast this machine decodes, and where the time goes: a fixed number of greedy tokens, several times over."""

from __future__ import annotations

import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.schema import BenchConfig, RunConfig
from runtime import hardware
from runtime.drafts.passes import Drafting
from runtime.energy import GpuEnergy
from runtime.engine import Counters, Engine
from runtime.errors import UserError
from runtime.sampling import Sampler, SamplingParams
from runtime.stats import Rates, RunSummary, TokenStats, summarize
from runtime.text import TextCodec
from stages.bench_acceptance import KnownAnswer
from stages.bench_report import Bench, Drafted, Repeat, document, draw, format_report
from stages.bench_together import decode_together
from stages.files import write_atomically
from stages.opening import open_engine, setup_stages
from stages.progress import Progress
from stages.stage import Stage, StageContext

log = logging.getLogger("stages")

DRIVE_SECONDS = 2.0  # that the drive is measured for
AGAIN_SECONDS = 1.0  # behind each repeat that read from it
RESULT_NAME, PLOT_NAME = "bench.json", "bench.png"  # in the folder of the run


def run(ctx: StageContext) -> None:
    """Measure, print the table, and leave every number and a plot in the run's folder."""
    check_window(ctx.cfg)
    engine = open_engine(ctx.cfg, ctx.inputs, ctx.runner)
    try:
        bench = measure(engine, ctx.cfg.bench)
    finally:
        engine.close()
    print(format_report(bench), flush=True)
    if not bench.is_repeatable:
        log.warning("the repeats decoded different tokens: run stages=[verify] force=[verify]")
    if ctx.runner.run_dir is None:
        return
    path = ctx.runner.run_dir / RESULT_NAME
    write_atomically(path, json.dumps(document(bench, ctx.cfg, ctx.out), indent=1) + "\n")
    print(f"every token's figures: {path}", file=sys.stderr)
    plot = ctx.runner.run_dir / PLOT_NAME
    if ctx.cfg.bench.plot and draw(bench, plot):
        print(f"plot: {plot}", file=sys.stderr)


def check_window(cfg: RunConfig) -> None:
    """Raise UserError when prompt, warm-up and counted tokens do not fit into the context window."""
    bench, window = cfg.bench, cfg.model.context_tokens
    need = bench.prompt_length + bench.warmup_tokens + bench.tokens
    if need > window:
        raise UserError(
            f"bench takes {need} tokens (prompt {bench.prompt_length}, warm-up {bench.warmup_tokens}, counted "
            f"{bench.tokens}), the context window has {window}",
            f"set model.context_tokens={need} or more, or lower bench.prompt_length or bench.tokens",
        )


def measure(engine: Engine, config: BenchConfig) -> Bench:
    """Measure the machine's rates, then every repeat, and the drive again behind each."""
    around = _Around(engine)
    prompt = random_prompt(engine.codec, config.prompt_length, config.seed)
    num_steps = config.warmup_tokens + config.tokens
    repeats: list[Repeat] = []
    plain: list[Repeat] = []  # without drafts, where the others have some
    is_drafting = engine.drafting is not None
    known = None
    if engine.drafting is not None and config.acceptance is not None:
        vocab_size = engine.codec.vocab_size
        known = KnownAnswer(engine.drafting, config.acceptance, vocab_size, config.seed)
    energy = GpuEnergy.open()
    with Progress("bench: tokens", (1 + is_drafting) * config.repeats * num_steps) as bar:
        for number in range(config.repeats):
            if engine.shared is not None:
                repeats.append(_repeat_together(engine, config, around, bar))
                continue
            # in turn, and each first as often: what else the machine does, and who warms what, meets both alike
            variants = [True, False] if is_drafting else [False]
            for has_drafts in variants if number % 2 else variants[::-1]:
                if has_drafts and known is not None:  # the first repeat without drafts came first
                    known.start(prompt, plain[0].token_ids)
                done = _repeat(engine, config, prompt, around, bar, energy, has_drafts)
                (repeats if has_drafts == is_drafting else plain).append(done)
    joules = [repeat.joules for repeat in repeats if repeat.joules is not None]
    num_tokens = sum(token.num_tokens for repeat in repeats for token in repeat.tokens)
    rates = around.overall
    total = _summary(engine, None, [token for r in repeats for token in r.tokens], rates)
    drafted = None
    if engine.drafting is not None:
        tokens = [token for repeat in plain for token in repeat.tokens]
        drafted = Drafted(engine.drafting.report(), plain, _summary(engine, None, tokens, rates))
    return Bench(
        rates,
        engine.format_plan(),
        repeats,
        total,
        torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
        hardware.peak_rss_nbytes(),
        hardware.peak_vram_nbytes(),
        drafted,
        sum(joules) / num_tokens if joules else None,
        engine.config.serve.max_batch,
        engine.head_report(),
        around.drive_gib_s,
    )


class _Around:
    """The machine's rates around what is measured: a drive may slow down from one minute to the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rates = engine.measure_rates(DRIVE_SECONDS)
        self.drive_gib_s = [self._rates.drive_gib_s]  # each time that it was measured

    def behind(self, steps: Sequence[TokenStats]) -> Rates:
        """Return the rates for what has just run: the drive's is the mean of before and after, if that read from it."""
        before = self.drive_gib_s[-1]
        if not any(step.read_nbytes for step in steps):
            return replace(self._rates, drive_gib_s=before)
        after = self._engine.measure_drive(AGAIN_SECONDS)
        self.drive_gib_s.append(after)
        return replace(self._rates, drive_gib_s=(before + after) / 2)

    @property
    def overall(self) -> Rates:
        """The rates for all that was measured."""
        return replace(self._rates, drive_gib_s=statistics.mean(self.drive_gib_s))


def random_prompt(codec: TextCodec, length: int, seed: int) -> list[int]:
    """Return token ids drawn evenly from those that stand for text; the same for the same seed."""
    generator = random.Random(seed)
    prompt: list[int] = []
    while len(prompt) < length:
        token = generator.randrange(codec.vocab_size)
        if token not in codec.stop_ids and codec.decode([token]):  # a marker has no text
            prompt.append(token)
    return prompt


def _repeat(
    engine: Engine,
    config: BenchConfig,
    prompt: list[int],
    around: _Around,
    bar: Progress,
    energy: GpuEnergy | None,
    is_drafting: bool,
) -> Repeat:
    """Read the prompt into an empty state, then decode; a stop token is a token like any other."""
    if config.is_cold:
        engine.forget_experts()
    steps = _Steps(engine, engine.drafting if is_drafting else None)
    token, prefill = steps.take(prompt)
    token_ids = [token]
    stats: list[TokenStats] = []
    counts = []
    joules_at = [] if energy is None else [energy.joules()]
    for wanted in (config.warmup_tokens, config.tokens):
        while wanted:
            following, cost = steps.go_on(token_ids[-1], wanted)
            token_ids += following
            stats.append(cost)
            wanted -= len(following)
            bar.advance(len(following))
        counts.append(len(stats))
        if energy is not None:
            joules_at.append(energy.joules())
    first = 0 if config.is_cold else counts[0]
    tokens = stats[first:]
    summary = _summary(engine, prefill, tokens, around.behind(stats))
    joules = joules_at[-1] - joules_at[0 if config.is_cold else 1] if joules_at else None
    return Repeat(prefill, stats[:first], tokens, token_ids, summary, joules)


def _repeat_together(engine: Engine, config: BenchConfig, around: _Around, bar: Progress) -> Repeat:
    """As `_repeat`, for serve.max_batch conversations of different prompts."""
    if config.is_cold:
        engine.forget_experts()
    count = engine.config.serve.max_batch
    prompts = [
        random_prompt(engine.codec, config.prompt_length, config.seed + number)
        for number in range(count)
    ]
    prefill, passes, token_ids = decode_together(engine, config, prompts, bar.advance)
    first = 0 if config.is_cold else config.warmup_tokens
    summary = _summary(engine, prefill, passes[first:], around.behind(passes))
    return Repeat(prefill, passes[:first], passes[first:], token_ids, summary)


class _Steps:
    """One token timeline; each step's time ends when the next token is known to the host."""

    def __init__(self, engine: Engine, drafting: Drafting | None) -> None:
        self._engine, self._drafting = engine, drafting
        self._state: Any = engine.new_state()
        self._tokens: list[int] = []  # that were fed
        self._greedy = Sampler(SamplingParams(temperature=0.0), engine.num_tokens)

    def take(self, tokens: Sequence[int]) -> tuple[int, TokenStats]:
        """Feed tokens; return the greedy next one and what this cost."""
        engine, size = self._engine, self._engine.prefill_tokens
        before, started = engine.counters(), time.perf_counter()
        for start in range(0, len(tokens), size):
            piece = list(tokens[start : start + size])
            if len(piece) == 1:
                logits = engine.model.decode(piece[0], self._state)
            else:
                logits = engine.model.prefill(piece, self._state)
        computed = time.perf_counter()
        following = self._greedy(logits)
        return following, self._cost(tokens, started, computed, before, logits)

    def go_on(self, token: int, wanted: int) -> tuple[list[int], TokenStats]:
        """Feed a token; return what follows it, at most `wanted` tokens where drafts give several, and its cost."""
        engine = self._engine
        if self._drafting is None:
            following, cost = self.take([token])
            return [following], cost
        before, started = engine.counters(), time.perf_counter()
        found = self._drafting.run(self._tokens, token, self._state, wanted, self._greedy)
        computed = time.perf_counter()
        return found.drawn, self._cost(found.tokens, started, computed, before, found.logits)

    def _cost(
        self, fed: Sequence[int], started: float, computed: float, before: Counters, logits: Tensor
    ) -> TokenStats:
        # a GPU is still at the last layers when the host has nothing left to do
        wait_ms = (time.perf_counter() - computed) * 1e3 if logits.is_cuda else 0.0
        self._tokens += fed
        stats = self._engine.token_stats(len(self._tokens), len(fed), started, before)
        return replace(stats, device_wait_ms=stats.device_wait_ms + wait_ms)


def _summary(
    engine: Engine, prefill: TokenStats | None, tokens: Sequence[TokenStats], rates: Rates
) -> RunSummary:
    return summarize(
        prefill,
        tokens,
        0 if prefill is None else prefill.num_tokens,
        engine.dense_nbytes,
        rates,
        hardware.peak_rss_nbytes(),
        hardware.peak_vram_nbytes(),
    )


STAGE = Stage(name="bench", run=run, needs=setup_stages, is_endpoint=True)

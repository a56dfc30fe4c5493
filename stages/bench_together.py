"""`bench` with several conversations decoded together: a pass is one token of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from conf.schema import BenchConfig
from runtime.engine import Engine
from runtime.sampling import Sampler, SamplingParams
from runtime.stats import TokenStats
from runtime.together import Together


class Writer:
    """A conversation that decodes greedily; a stop token is a token like any other."""

    def __init__(self, engine: Engine, prompt: Sequence[int], num_tokens: int) -> None:
        self._engine, self._state = engine, engine.new_state()
        self._greedy = Sampler(SamplingParams(temperature=0.0), engine.num_tokens)
        self._num_tokens = num_tokens
        self.token_ids = [self._read(prompt)]

    def _read(self, prompt: Sequence[int]) -> int:
        engine, size = self._engine, self._engine.prefill_tokens
        for start in range(0, len(prompt), size):
            piece = list(prompt[start : start + size])
            if len(piece) == 1:
                logits = engine.model.decode(piece[0], self._state)
            else:
                logits = engine.model.prefill(piece, self._state)
        return self._greedy(logits)

    def write(self) -> None:
        """Decode all of its tokens."""
        for _ in range(self._num_tokens):
            logits = self._engine.model.decode(self.token_ids[-1], self._state)
            self.token_ids.append(self._greedy(logits))


def decode_together(
    engine: Engine,
    config: BenchConfig,
    prompts: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> tuple[TokenStats, list[TokenStats], list[int]]:
    """Read the prompts one after the other, then decode warm-up and counted tokens of all of them in step.

    Returns what the prompts cost, what each pass cost, and all tokens, conversation by conversation.
    """
    assert engine.shared is not None
    num_steps = config.warmup_tokens + config.tokens
    before, started = engine.counters(), time.perf_counter()
    writers = [Writer(engine, prompt, num_steps) for prompt in prompts]
    read = sum(len(prompt) for prompt in prompts)
    prompt_stats = engine.token_stats(0, read, started, before)
    together = Together(engine.shared)
    for writer in writers:
        together.start(writer.write)
    together.join()
    passes: list[TokenStats] = []
    while len(together):
        before, started = engine.counters(), time.perf_counter()
        together.round()
        passes.append(engine.token_stats(len(passes), len(writers), started, before))
        advance(1)
    return prompt_stats, passes, [token for writer in writers for token in writer.token_ids]

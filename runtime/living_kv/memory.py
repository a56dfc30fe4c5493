"""The living memory of one dense model: take text in, answer from what is stored, go on in another process.

Owns the order of things: text is read, then found, then answered from. A question is read twice: once to find what it
asks for, once with that in sight. Knows files only through the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from conf.schema import AnswerMode, MemoryConfig
from runtime.living_kv.answer import Answer
from runtime.living_kv.answerer import Answerer
from runtime.living_kv.confidence import Estimator
from runtime.living_kv.finder import Finder
from runtime.living_kv.hot import HotState
from runtime.living_kv.index import VectorIndex
from runtime.living_kv.lexical import LexicalIndex
from runtime.living_kv.opened import Opened
from runtime.living_kv.reader import Reader
from runtime.living_kv.select import Selection
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel
from runtime.sampling import SamplingParams
from runtime.text import TextCodec


class Memory:
    """One store, opened with its model."""

    def __init__(
        self,
        model: DenseModel,
        codec: TextCodec,
        store: Store,
        config: MemoryConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """The store's identity must have been checked. Raises UserError for settings that cannot work."""
        self.opened = Opened(model, codec, store, config)
        self.model, self.text, self.store = model, codec, store
        self.codec, self.cold = self.opened.codec, self.opened.cold
        self._reader = Reader(self.opened, clock)
        self._finder = Finder(self.opened)
        self._answerer = Answerer(self.opened, self._finder)

    # ---- what may be replaced between calls -----------------------------------------------------------------------

    @property
    def config(self) -> MemoryConfig:
        return self.opened.config

    @config.setter
    def config(self, config: MemoryConfig) -> None:
        self.opened.config = config

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since 1970, when a session is begun."""
        return self._reader.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._reader.clock = clock

    @property
    def after_layer(self) -> Callable[[], None]:
        """Called again and again while a question is answered."""
        return self.opened.after_layer

    @after_layer.setter
    def after_layer(self, after_layer: Callable[[], None]) -> None:
        self.opened.after_layer = after_layer

    # ---- the hot tier, and what was read --------------------------------------------------------------------------

    @property
    def state(self) -> HotState:
        """The timeline: restored exactly from its snapshot, else from cold blocks and the exact tail."""
        return self.opened.state

    @property
    def scratch(self) -> HotState:
        """The buffers in which questions are answered; the timeline stays as it is."""
        return self.opened.scratch

    @property
    def hot_nbytes(self) -> int:
        """Bytes of the hot buffers that are made."""
        return self.opened.hot_nbytes

    @property
    def was_rebuilt(self) -> bool:
        """Whether the hot tier came from cold blocks, not from its snapshot."""
        return self.opened.was_rebuilt

    @property
    def read_tokens(self) -> int:
        """Tokens of source text that went through the model."""
        return self._reader.read_tokens

    @property
    def asked_tokens(self) -> int:
        """Tokens of questions and prompts that went through the model."""
        return self.opened.asked_tokens

    # ---- taking text in -------------------------------------------------------------------------------------------

    def ingest(
        self,
        data: bytes,
        session: str,
        tag: str = "",
        source: str = "",
        progress: Callable[[int], None] = lambda _nbytes: None,
    ) -> int:
        """Append text as a session, as `Reader.ingest` does, so that it can be found. Returns the tokens read."""
        count = self._reader.ingest(data, session, tag, source, progress)
        self._finder.refresh()
        return count

    # ---- finding --------------------------------------------------------------------------------------------------

    @property
    def lexical(self) -> LexicalIndex:
        """The words of all stored sentences."""
        return self._finder.lexical

    @property
    def index(self) -> VectorIndex:
        """The vectors of all stored sentences."""
        return self._finder.index

    def probe(self, question: str) -> np.ndarray[Any, Any]:
        """Return a question's vector, as `Finder.probe` does."""
        return self._finder.probe(question)

    def find(
        self, question: str, hidden: int | None = None, is_probed: bool = True
    ) -> Selection | None:
        """Choose the sentences for a question, as `Finder.find` does.  None: nothing in scope."""
        return self._finder.find(question, hidden, is_probed)

    def calibrate(self, count: int | None = None) -> Estimator | None:
        """Fit the confidence to the store's own sentences, as `Finder.calibrate` does."""
        return self._finder.calibrate(count)

    # ---- answering ------------------------------------------------------------------------------------------------

    def prompt(self, question: str) -> list[int]:
        """Return the tokens that are answered: through the chat template, or the bare text."""
        return self._answerer.prompt(question)

    def attend(self, prompt: Sequence[int], found: Selection | None) -> Tensor:
        """Read a prompt with the chosen sentences in sight: fp32 logits [1, vocab] of what comes next."""
        return self._answerer.attend(prompt, found)

    def generate(
        self, logits: Tensor, params: SamplingParams
    ) -> Generator[tuple[int, str], None, str]:
        """Draw an answer behind `attend`, as `Answerer.generate` does."""
        return self._answerer.generate(logits, params)

    def ask(self, question: str, params: SamplingParams, mode: AnswerMode | None = None) -> Answer:
        """Answer from what is stored. The store does not change.  mode: None is the config's."""
        return self._answerer.ask(question, params, mode)

    # ---- conversations --------------------------------------------------------------------------------------------

    def turn(self, question: str, session: str, params: SamplingParams) -> Answer:
        """Answer, and take question and answer into the timeline: the next turn, here or elsewhere, remembers them."""
        answer = self._answerer.reply(question, params)
        said = f"{question.strip()}\n{answer.text.strip()}\n"
        self._reader.add_turn(said.encode(), session)
        self._finder.lexical.save()
        return answer

    def close_session(self) -> None:
        """Commit an exact snapshot of the hot tier, so that another process goes on with the same numbers."""
        if self.store.commit.tokens and self.store.commit.hot is None:
            self._reader.add_snapshot()
            self._finder.lexical.save()

    def close(self) -> None:
        """Let go of the store and of pinned RAM."""
        self.cold.close()
        self.store.close()

"""What is stored that a question asks for: by words and by hidden states; and the fit that says how sure.

A question is read with sinks and the last tokens in sight, for its vector; the confidence is fitted to the store's own
sentences, asked the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.living_kv import confidence as sure
from runtime.living_kv.index import VectorIndex
from runtime.living_kv.lexical import LexicalIndex
from runtime.living_kv.means import SentenceMeans
from runtime.living_kv.opened import Opened
from runtime.living_kv.quote import StoredTexts, in_scope, open_lexical, readable_text
from runtime.living_kv.select import Selection, select


class Finder:
    """Chooses sentences of one store for a question."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._model, self._store = opened.model, opened.store
        self._index: VectorIndex | None = None
        self._lexical: LexicalIndex | None = None

    @property
    def lexical(self) -> LexicalIndex:
        """The words of all stored sentences."""
        if self._lexical is None:
            self._lexical = open_lexical(self._store)
        count = len(self._store.sentences)
        self._lexical.add(
            [readable_text(self._store, i) for i in range(self._lexical.count, count)]
        )
        return self._lexical

    @property
    def index(self) -> VectorIndex:
        """The vectors of all stored sentences."""
        if self._index is None:
            h = self._store.header
            self._index = VectorIndex(
                self._store.vectors(), len(h.index_layers), self._opened.config.remove_pc
            )
        elif self._index.count < len(self._store.sentences):
            self._index.update(self._store.vectors())
        return self._index

    def probe(self, question: str) -> np.ndarray[Any, Any]:
        """Return a question's vector: the mean of its tokens' hidden states with sinks and the last tokens in sight."""
        ids, _ = self._opened.tokenize(question)
        scratch = self._opened.start_scratch()
        self._opened.check_room(len(ids))
        means = SentenceMeans(
            self._store.header.index_layers, self._opened.matrix, [0] * len(ids), 1
        )
        scratch.observer = means
        try:
            for at in range(0, len(ids), self._opened.config.chunk):
                means.at = at
                self._model.run(
                    ids[at : at + self._opened.config.chunk], scratch, self._opened.after_layer
                )
        finally:
            scratch.observer = None
        self._opened.asked_tokens += len(ids)
        found: np.ndarray[Any, Any] = means.vectors()[0]
        return found

    def find(
        self, question: str, hidden: int | None = None, is_probed: bool = True
    ) -> Selection | None:
        """Choose the sentences for a question.  hidden: a sentence that must not be found.  None: nothing in scope."""
        c, sentences = self._opened.config, self._store.sentences
        allowed = in_scope(self._store, c.scope)
        if hidden is not None:
            allowed[hidden] = False
        if not allowed.any():
            return None
        dense = self.index.scores(self.probe(question)) if is_probed else None
        lengths = (sentences["hi"] - sentences["lo"]).astype(np.int64)
        return select(
            dense,
            self.lexical.scores(question),
            lengths,
            allowed,
            c.budget,
            c.gap,
            c.min_sentence,
            c.fuse.value,
            c.width.value,
            question,
            is_all=bool(lengths[allowed].sum() <= c.budget),
        )

    def calibrate(self, count: int | None = None) -> sure.Estimator | None:
        """Fit the confidence to the store's own sentences, and keep the fit beside it."""
        texts = StoredTexts(self._store)
        count = self._opened.config.calibration if count is None else count
        found = sure.calibrate(
            texts, self.find, self.lexical.rarest, count, self._opened.config.confidence_target
        )
        if found is not None:
            sure.save_estimator(self._store.root, found)
        return found

    def refresh(self) -> None:
        """Save the word index, and fit the confidence when the store has doubled."""
        self.lexical.save()
        count = len(self._store.sentences)
        fitted = sure.load_estimator(self._store.root)
        if count >= sure.MIN_SENTENCES and (fitted is None or count >= 2 * fitted.sentences):
            self.calibrate()

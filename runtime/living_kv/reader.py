"""Text into a store: pieces through the model, sessions begun and gone on with, everything committed in order.

A piece is tokenised, cut into sentences, run through the model with sinks and window in sight, encoded block by block,
and committed as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from blake3 import blake3

from runtime.errors import UserError
from runtime.living_kv import exact
from runtime.living_kv.errors import MemoryUsageError
from runtime.living_kv.hot import HotState
from runtime.living_kv.intake import BlockEncoder, Committer
from runtime.living_kv.layout import TEXT
from runtime.living_kv.means import SentenceMeans
from runtime.living_kv.opened import Opened
from runtime.living_kv.sentences import (
    Sentence,
    byte_offsets,
    cut_pieces,
    split_text,
    to_token_spans,
)
from runtime.living_kv.store import Update

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4  # a piece of text is cut at about commit_tokens of these


@dataclass(slots=True)
class _Place:
    """Where the next piece of a session goes; pieces before it may still be on their way to the drive."""

    session: int
    border: int  # hot tokens before it are not seen
    blocks: int
    text_nbytes: int


class Reader:
    """Takes text into one store: the only one who appends to it."""

    def __init__(self, opened: Opened, clock: Callable[[], float]) -> None:
        """clock: seconds since 1970, when a session is begun."""
        self._opened, self.clock = opened, clock
        self._model, self._store = opened.model, opened.store
        self.read_tokens = 0  # of source text, through the model

    def ingest(
        self, data: bytes, session: str, tag: str, source: str, progress: Callable[[int], None]
    ) -> int:
        """Append text as a session; each piece is committed as a whole. Returns the tokens that were read.

        The same bytes again under the same name, after an interruption, go on behind the last committed piece.
        progress: called with the bytes that are done.
        """
        if not data.strip():
            raise MemoryUsageError(
                "there is no text to take in", "give a file with text: memory.file=notes.txt"
            )
        digest = blake3(data).hexdigest(length=16)
        before = self.read_tokens
        number, done = self._open_session(session, tag, source, digest)
        pieces = list(cut_pieces(data, CHARACTERS_PER_TOKEN * self._opened.config.commit_tokens))
        place, state = self._place(number), self._opened.state
        try:
            with Committer(self._append) as committer:
                at = 0
                for i, piece in enumerate(pieces):
                    at += len(piece)
                    if at <= done:
                        continue
                    start = [self._session_line(session, tag, source, digest, number)]
                    is_last = i == len(pieces) - 1
                    end = [{"id": number, "finished": True}] if is_last else []
                    lines = [*(start if at == len(piece) else []), *end]
                    update = self._read_piece(piece, state, place, lines, with_snapshot=is_last)
                    committer.put(update, partial(progress, at))
        except BaseException:
            if state.position != self._store.commit.tokens:
                self._opened.drop_state()  # it holds tokens that are not committed
            raise
        return self.read_tokens - before

    def add_turn(self, said: bytes, session: str) -> None:
        """Append what was said in a conversation, as it stands; its session is begun where there is none yet."""
        sessions = self._store.sessions
        known = [s for s in sessions if s.name == session and s.source == "chat"]
        lines = [] if known else [self._session_line(session, "chat", "chat", "", len(sessions))]
        number = known[-1].id if known else len(sessions)
        place = self._place(number)
        self._append(self._read_piece(said, self._opened.state, place, lines, with_snapshot=False))

    def add_snapshot(self) -> None:
        """Commit an exact snapshot of the hot tier."""
        update = Update()
        self._add_exact(update, self._opened.state, self._store.commit.blocks, with_snapshot=True)
        self._append(update)

    def _place(self, session: int) -> _Place:
        """Return where the next piece of a session goes, with everything committed."""
        commit = self._store.commit
        border = self._border(session) if self._opened.config.isolate else 0
        return _Place(session, border, commit.blocks, commit.lengths.get(TEXT, 0))

    def _open_session(self, name: str, tag: str, source: str, digest: str) -> tuple[int, int]:
        """Return the session's number, and how many of its bytes are committed already."""
        sessions = self._store.sessions
        if sessions:
            last = sessions[-1]
            if not last.is_finished:
                if (last.name, last.tag, last.source, last.digest) == (name, tag, source, digest):
                    mine = self._store.sentences["session"] == last.id
                    return last.id, int(self._store.sentences["text_len"][mine].sum())
                log.warning(
                    "session %s was not finished: %s starts behind what is stored of it",
                    last.name,
                    name,
                )
        return len(sessions), 0

    def _session_line(
        self, name: str, tag: str, source: str, digest: str, number: int
    ) -> dict[str, Any]:
        return {
            "id": number, "name": name, "tag": tag, "started": self.clock(), "source": source, "digest": digest,
        }  # fmt: skip

    def _read_piece(
        self, piece: bytes, state: HotState, place: _Place, lines: Sequence[dict[str, Any]],
        with_snapshot: bool,
    ) -> Update:  # fmt: skip
        """Run one piece through the model: what it adds to the store. The place moves behind it."""
        text = piece.decode("utf-8", "surrogateescape")
        ids, offsets = self._opened.tokenize(text)
        if not ids:
            raise MemoryUsageError(
                "the text holds nothing that the tokenizer knows", "give other text"
            )
        spans = to_token_spans(split_text(text), offsets)
        self._check_range(state.position + len(ids))
        state.border = place.border
        first = state.position
        means = SentenceMeans(
            self._store.header.index_layers, self._opened.matrix, _owners(spans), len(spans)
        )
        update = Update(tokens=ids, text=piece, sessions=lines)
        encoder = BlockEncoder(self._opened.codec, self._store.header.block, place.blocks, update)
        state.observer = means
        try:
            for at in range(0, len(ids), self._opened.config.chunk):
                means.at = at
                self._model.run(ids[at : at + self._opened.config.chunk], state)
                encoder.follow(state)
            encoder.finish()
            self._add_exact(update, state, place.blocks + len(update.blocks), with_snapshot)
        except BaseException:
            self._opened.drop_state()  # half of a chunk is in it
            raise
        finally:
            state.observer = None
        self.read_tokens += len(ids)
        bytes_at, text_at = byte_offsets(text), place.text_nbytes
        update.sentences = [
            (
                first + s.lo,
                first + s.hi,
                text_at + int(bytes_at[s.start]),
                int(bytes_at[s.end] - bytes_at[s.start]),
                place.session,
            )
            for s in spans
        ]
        update.vectors = means.vectors().tobytes()
        place.blocks += len(update.blocks)
        place.text_nbytes += len(piece)
        return update

    def _border(self, session: int) -> int:
        """Return where the present stretch of a session begins: its text goes on from there, or begins here."""
        others = np.flatnonzero(self._store.sentences["session"] != session)
        at = int(others[-1]) + 1 if len(others) else 0
        lows = self._store.sentences["lo"]
        return int(lows[at]) if at < len(lows) else self._opened.state.position

    def _add_exact(self, update: Update, state: HotState, blocks: int, with_snapshot: bool) -> None:
        """Add what is stored exactly: the tokens behind the last of all blocks, and the hot tier where it is asked for.

        blocks: of the store, with this update.
        """
        tail_at = blocks * self._store.header.block
        if tail_at < state.position:
            update.tail = exact.to_bytes(*state.hot(tail_at, state.position))
        if with_snapshot:
            update.hot = exact.snapshot(state)

    def _append(self, update: Update) -> None:
        """Commit an update. On a thread of its own while a text is taken in: nothing else reads the store then."""
        number = self._store.commit.blocks
        try:
            self._store.append(update)
        except BaseException:
            self._opened.drop_state()  # it holds tokens that are not committed
            raise
        for i, (_, _, payload) in enumerate(update.blocks):
            self._opened.cold.put(number + i, payload)

    def _check_range(self, end: int) -> None:
        spec, wanted = self._model.spec, self._opened.config.position.value
        if end > spec.max_positions and wanted == "absolute":
            raise UserError(
                f"E-RANGE: the timeline would reach position {end:,}, the model was made for {spec.max_positions:,}",
                "set memory.position=near, or begin another store",
            )


def _owners(spans: Sequence[Sentence]) -> list[int]:
    return [i for i, s in enumerate(spans) for _ in range(s.lo, s.hi)]

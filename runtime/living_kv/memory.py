"""The living memory of one dense model: take text in, answer from what is stored, go on in another process.

Owns the order of things: a piece of text is tokenised, cut into sentences, run through the model with sinks and window
in sight, encoded block by block, and committed as a whole. A question is read twice: once to find what it asks for,
once with that in sight. Knows files only through the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from conf.schema import AnswerMode, MemoryConfig
from runtime.errors import UserError
from runtime.living_kv import confidence as sure
from runtime.living_kv import exact
from runtime.living_kv.answer import Answer
from runtime.living_kv.codec import Codec
from runtime.living_kv.cold import ColdBlocks
from runtime.living_kv.confidence import Verdict
from runtime.living_kv.errors import MemoryUsageError, StoreRefusedError
from runtime.living_kv.hot import HotState, scratch_budget
from runtime.living_kv.identity import REREAD
from runtime.living_kv.index import VectorIndex, projection, projection_digest
from runtime.living_kv.intake import BlockEncoder, Committer
from runtime.living_kv.layout import TEXT, Header
from runtime.living_kv.lexical import LexicalIndex
from runtime.living_kv.means import SentenceMeans
from runtime.living_kv.positions import Mode, choose_mode
from runtime.living_kv.quote import (
    StoredTexts,
    in_scope,
    open_lexical,
    quote_sentences,
    readable_text,
)
from runtime.living_kv.select import Selection, select
from runtime.living_kv.sentences import (
    Sentence,
    byte_offsets,
    cut_pieces,
    readable,
    split_text,
    to_token_spans,
)
from runtime.living_kv.store import Store, Update
from runtime.models.dense import DenseModel
from runtime.sampling import Sampler, SamplingParams
from runtime.text import ChatOptions, StopFilter, StreamDecoder, TemplateCodec, TextCodec

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4  # a piece of text is cut at about commit_tokens of these


_Scored = Sequence[tuple[int, float]]  # sentences and their scores, best first


def _best(found: Selection | None, count: int) -> _Scored:
    return [] if found is None else list(zip(found.ranked, found.scores, strict=True))[:count]


@dataclass(slots=True)
class _Place:
    """Where the next piece of a session goes; pieces before it may still be on their way to the drive."""

    session: int
    border: int  # hot tokens before it are not seen
    blocks: int
    text_nbytes: int


@dataclass(slots=True)
class _Drawn:
    """What a model said, and why it ended."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = "stop"


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
        _check_config(config, store.header)
        self.model, self.text, self.store, self.config, self.clock = (
            model,
            codec,
            store,
            config,
            clock,
        )
        h = store.header
        self.codec = Codec(h.codec, h.layers, h.kv_heads, h.head_dim)
        self.cold = ColdBlocks(store, self.codec, int(config.ram_gib * 2**30), model.device)
        dim = h.vector_values // len(h.index_layers)
        matrix = projection(model.spec.hidden, dim, h.projection_seed)
        if projection_digest(matrix) != h.projection_digest:
            raise StoreRefusedError(
                "E-EMBED: this machine computes another projection than the store's", REREAD
            )
        self._matrix = torch.from_numpy(matrix).to(model.device)
        self._state: HotState | None = None  # the timeline's hot tier
        self._scratch: HotState | None = None
        self.was_rebuilt = False  # the hot tier came from cold blocks, not from its snapshot
        self.read_tokens = 0  # of source text, through the model
        self.asked_tokens = 0  # of questions and prompts, through the model
        self.after_layer: Callable[[], None] = lambda: None  # called while a question is answered
        self._index: VectorIndex | None = None
        self._lexical: LexicalIndex | None = None

    # ---- the hot tier ---------------------------------------------------------------------------------------------

    def _hot_state(self, budget: int) -> HotState:
        c = self.config
        return HotState(
            self.model.spec, c.sinks, budget, c.window, c.chunk, self.model.dtype, self.model.device
        )

    @property
    def state(self) -> HotState:
        """The timeline: restored exactly from its snapshot, else from cold blocks and the exact tail."""
        if self._state is None:
            self._state = self._restored(self._hot_state(0), self.config.window)
        return self._state

    @property
    def hot_nbytes(self) -> int:
        """Bytes of the hot buffers that are made."""
        return sum(s.nbytes for s in (self._state, self._scratch) if s is not None)

    def _restored(self, state: HotState, window: int) -> HotState:
        self.was_rebuilt |= not exact.restore(state, window, self.store, self.cold)
        return state

    # ---- taking text in -------------------------------------------------------------------------------------------

    def ingest(
        self,
        data: bytes,
        session: str,
        tag: str = "",
        source: str = "",
        progress: Callable[[int], None] = lambda _nbytes: None,
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
        pieces = list(cut_pieces(data, CHARACTERS_PER_TOKEN * self.config.commit_tokens))
        place, state = self._place(number), self.state
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
            if state.position != self.store.commit.tokens:
                self._state = None  # it holds tokens that are not committed
            raise
        self._refresh()
        return self.read_tokens - before

    def _place(self, session: int) -> _Place:
        """Return where the next piece of a session goes, with everything committed."""
        commit = self.store.commit
        border = self._border(session) if self.config.isolate else 0
        return _Place(session, border, commit.blocks, commit.lengths.get(TEXT, 0))

    def _open_session(self, name: str, tag: str, source: str, digest: str) -> tuple[int, int]:
        """Return the session's number, and how many of its bytes are committed already."""
        sessions = self.store.sessions
        if sessions:
            last = sessions[-1]
            if not last.is_finished:
                if (last.name, last.tag, last.source, last.digest) == (name, tag, source, digest):
                    mine = self.store.sentences["session"] == last.id
                    return last.id, int(self.store.sentences["text_len"][mine].sum())
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

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.text.encode_with_offsets(readable(text))

    def _read_piece(
        self, piece: bytes, state: HotState, place: _Place, lines: Sequence[dict[str, Any]],
        with_snapshot: bool,
    ) -> Update:  # fmt: skip
        """Run one piece through the model: what it adds to the store. The place moves behind it."""
        text = piece.decode("utf-8", "surrogateescape")
        ids, offsets = self._tokenize(text)
        if not ids:
            raise MemoryUsageError(
                "the text holds nothing that the tokenizer knows", "give other text"
            )
        spans = to_token_spans(split_text(text), offsets)
        self._check_range(state.position + len(ids))
        state.border = place.border
        first = state.position
        means = SentenceMeans(
            self.store.header.index_layers, self._matrix, _owners(spans), len(spans)
        )
        update = Update(tokens=ids, text=piece, sessions=lines)
        encoder = BlockEncoder(self.codec, self.store.header.block, place.blocks, update)
        state.observer = means
        try:
            for at in range(0, len(ids), self.config.chunk):
                means.at = at
                self.model.run(ids[at : at + self.config.chunk], state)
                encoder.follow(state)
            encoder.finish()
            self._add_exact(update, state, place.blocks + len(update.blocks), with_snapshot)
        except BaseException:
            self._state = None  # half of a chunk is in it
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
        others = np.flatnonzero(self.store.sentences["session"] != session)
        at = int(others[-1]) + 1 if len(others) else 0
        lows = self.store.sentences["lo"]
        return int(lows[at]) if at < len(lows) else self.state.position

    def _add_exact(self, update: Update, state: HotState, blocks: int, with_snapshot: bool) -> None:
        """Add what is stored exactly: the tokens behind the last of all blocks, and the hot tier where it is asked for.

        blocks: of the store, with this update.
        """
        tail_at = blocks * self.store.header.block
        if tail_at < state.position:
            update.tail = exact.to_bytes(*state.hot(tail_at, state.position))
        if with_snapshot:
            update.hot = exact.snapshot(state)

    def _append(self, update: Update) -> None:
        """Commit an update. On a thread of its own while a text is taken in: nothing else reads the store then."""
        number = self.store.commit.blocks
        try:
            self.store.append(update)
        except BaseException:
            self._state = None  # it holds tokens that are not committed
            raise
        for i, (_, _, payload) in enumerate(update.blocks):
            self.cold.put(number + i, payload)

    def _check_range(self, end: int) -> None:
        spec, wanted = self.model.spec, self.config.position.value
        if end > spec.max_positions and wanted == "absolute":
            raise UserError(
                f"E-RANGE: the timeline would reach position {end:,}, the model was made for {spec.max_positions:,}",
                "set memory.position=near, or begin another store",
            )

    def _refresh(self) -> None:
        """Save the word index, and fit the confidence when the store has doubled."""
        self.lexical.save()
        count = len(self.store.sentences)
        fitted = sure.load_estimator(self.store.root)
        if count >= sure.MIN_SENTENCES and (fitted is None or count >= 2 * fitted.sentences):
            self.calibrate()

    # ---- finding --------------------------------------------------------------------------------------------------

    @property
    def lexical(self) -> LexicalIndex:
        if self._lexical is None:
            self._lexical = open_lexical(self.store)
        count = len(self.store.sentences)
        self._lexical.add([readable_text(self.store, i) for i in range(self._lexical.count, count)])
        return self._lexical

    @property
    def index(self) -> VectorIndex:
        if self._index is None:
            h = self.store.header
            self._index = VectorIndex(
                self.store.vectors(), len(h.index_layers), self.config.remove_pc
            )
        elif self._index.count < len(self.store.sentences):
            self._index.update(self.store.vectors())
        return self._index

    @property
    def scratch(self) -> HotState:
        """The buffers in which questions are answered; the timeline stays as it is."""
        if self._scratch is None:
            self._scratch = self._hot_state(scratch_budget(self.config))
        return self._scratch

    def _start_scratch(self) -> HotState:
        """Return the scratch state with sinks and the last tokens in sight, as the timeline stands."""
        scratch, tail = self.scratch, self.config.recency_tail
        scratch.mode = Mode.absolute
        if self._state is None:
            self._restored(scratch, tail)
        else:
            state = self._state
            first = max(state.hot_start, state.position - tail)
            keys, values = state.hot(first, state.position)
            scratch.put_hot(keys, values, first)
            if first:
                k, v = state.sink_rows()
                n = min(k.shape[1], first)
                scratch.put_sinks(k[:, :n], v[:, :n])
        scratch.floor = scratch.hot_start
        return scratch

    def probe(self, question: str) -> np.ndarray[Any, Any]:
        """Return a question's vector: the mean of its tokens' hidden states with sinks and the last tokens in sight."""
        ids, _ = self._tokenize(question)
        scratch = self._start_scratch()
        self._check_room(len(ids))
        means = SentenceMeans(self.store.header.index_layers, self._matrix, [0] * len(ids), 1)
        scratch.observer = means
        try:
            for at in range(0, len(ids), self.config.chunk):
                means.at = at
                self.model.run(ids[at : at + self.config.chunk], scratch, self.after_layer)
        finally:
            scratch.observer = None
        self.asked_tokens += len(ids)
        found: np.ndarray[Any, Any] = means.vectors()[0]
        return found

    def find(
        self, question: str, hidden: int | None = None, is_probed: bool = True
    ) -> Selection | None:
        """Choose the sentences for a question.  hidden: a sentence that must not be found.  None: nothing in scope."""
        c, sentences = self.config, self.store.sentences
        allowed = in_scope(self.store, c.scope)
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
        texts = StoredTexts(self.store)
        count = self.config.calibration if count is None else count
        found = sure.calibrate(
            texts, self.find, self.lexical.rarest, count, self.config.confidence_target
        )
        if found is not None:
            sure.save_estimator(self.store.root, found)
        return found

    # ---- answering ------------------------------------------------------------------------------------------------

    def prompt(self, question: str) -> list[int]:
        """Return the tokens that are answered: through the chat template, or the bare text."""
        if self.config.template.value == "none" or not isinstance(self.text, TemplateCodec):
            return self._tokenize(question)[0]
        return self.text.encode_chat([{"role": "user", "content": question}], ChatOptions())

    def attend(self, prompt: Sequence[int], found: Selection | None) -> Tensor:
        """Read a prompt with the chosen sentences in sight: fp32 logits [1, vocab] of what comes next."""
        scratch = self._start_scratch()
        spans = []
        for i in found.sentences if found else ():
            lo, hi = int(self.store.sentences["lo"][i]), int(self.store.sentences["hi"][i])
            spans.append((max(lo, scratch.num_sinks), min(hi, scratch.hot_start)))
        keys, values, places = self.cold.fetch(spans)
        scratch.retrieve(keys, values, places)
        self._check_room(len(prompt))
        mode = choose_mode(
            self.config.position.value,
            self.model.spec,
            scratch.largest_distance + len(prompt),
            self.config.near_beyond,
        )
        if mode is Mode.near:
            scratch.bring_near()
        elif mode is Mode.dca:
            scratch.bring_into_chunks()
        logits = None
        for at in range(0, len(prompt), self.config.chunk):
            logits = self.model.run(prompt[at : at + self.config.chunk], scratch, self.after_layer)
        self.asked_tokens += len(prompt)
        assert logits is not None, "an empty prompt"
        return self.model.logits(logits[-1:])

    @property
    def _room(self) -> int:
        """Tokens that still fit behind what the scratch state holds."""
        scratch = self.scratch
        return self.config.window + self.config.chunk - (scratch.position - scratch.hot_start)

    def _check_room(self, tokens: int) -> None:
        if tokens >= self._room:
            raise UserError(
                f"E-RANGE: the question has {tokens} tokens, there is room for {self._room} with its answer",
                "shorten it, or raise memory.window",
            )

    def generate(
        self, logits: Tensor, params: SamplingParams
    ) -> Generator[tuple[int, str], None, str]:
        """Draw an answer behind `attend`: (token, text that has become certain). Returns why it ended: stop, length.

        Stop strings are never given out. What was held back comes last, with token -1.
        """
        scratch = self.scratch
        sampler = Sampler(params, self.text.vocab_size)
        stream, stops = StreamDecoder(self.text), StopFilter(params.stop)
        room = self._room
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        reason = "length"
        for count in range(limit):
            token = sampler(logits)
            if token in self.text.stop_ids:
                reason = "stop"
                break
            yield token, stops.push(stream.push(token))
            if stops.is_stopped:
                return "stop"
            if count + 1 < limit:
                logits = self.model.logits(self.model.run([token], scratch, self.after_layer))
        rest = stops.push(stream.flush())
        if stops.is_stopped:
            reason = "stop"
        rest += stops.flush()
        if rest:
            yield -1, rest
        return reason

    def ask(self, question: str, params: SamplingParams, mode: AnswerMode | None = None) -> Answer:
        """Answer from what is stored. The store does not change.  mode: None is the config's."""
        if not question.strip():
            raise MemoryUsageError("the question is empty", 'give one: memory.question="..."')
        before = self._before()
        found = self.find(question)
        verdict = sure.judge(found, sure.load_estimator(self.store.root))
        mode = mode or self.config.mode
        best = _best(found, self.config.k)
        if mode is AnswerMode.quote or (
            mode is AnswerMode.auto and (verdict.is_low or found is None)
        ):
            return self._quoted(best, verdict, before)
        drawn = self._answer(self.prompt(question), found, params)
        share, used = self._support(drawn.text, found), AnswerMode.kv
        if mode is AnswerMode.ground or (mode is AnswerMode.auto and share < sure.MIN_SUPPORT):
            used = AnswerMode.ground
            grounded = "\n".join(
                readable_text(self.store, i).strip() for i in (found.sentences if found else ())
            )
            drawn = self._answer(self.prompt(f"{grounded}\n\n{question}"), None, params)
            share = self._support(drawn.text, found)
        if share < sure.MIN_SUPPORT:
            verdict = Verdict(
                min(verdict.confidence, 0.5), True, verdict.reason or "unsupported_answer"
            )
            if mode is AnswerMode.auto:
                return self._quoted(best, verdict, before)
        return self._result(drawn, verdict, used, best, share, before)

    def _before(self) -> tuple[int, int]:
        return self.store.read_nbytes, self.asked_tokens

    def _answer(
        self, prompt: Sequence[int], found: Selection | None, params: SamplingParams
    ) -> _Drawn:
        drawn = _Drawn()
        steps = self.generate(self.attend(prompt, found), params)
        while True:
            try:
                token, text = next(steps)
            except StopIteration as end:
                drawn.finish = end.value
                return drawn
            drawn.text += text
            drawn.tokens += [token] if token >= 0 else []

    def _support(self, answer: str, found: Selection | None) -> float:
        texts = [readable_text(self.store, i) for i in (found.sentences if found else ())]
        return sure.support(answer, "\n".join(texts))

    def _quoted(self, best: _Scored, verdict: Verdict, before: tuple[int, int]) -> Answer:
        text = "\n".join(readable_text(self.store, i).strip() for i, _ in best[:3])
        share = 1.0 if best else 0.0
        return self._result(_Drawn(text), verdict, AnswerMode.quote, best, share, before)

    def _result(
        self, drawn: _Drawn, verdict: Verdict, mode: AnswerMode, best: _Scored, share: float,
        before: tuple[int, int],
    ) -> Answer:  # fmt: skip
        scratch, (read, asked) = self.scratch, before
        quotes = [
            q.to_dict()
            for q in quote_sentences(self.store, [i for i, _ in best], [score for _, score in best])
        ]
        return Answer(
            drawn.text, drawn.tokens, drawn.finish, verdict, mode.value, quotes, scratch.mode.value,
            scratch.largest_distance, share, scratch.num_retrieved, self.store.read_nbytes - read,
            self.asked_tokens - asked,
        )  # fmt: skip

    # ---- conversations --------------------------------------------------------------------------------------------

    def turn(self, question: str, session: str, params: SamplingParams) -> Answer:
        """Answer, and take question and answer into the timeline: the next turn, here or elsewhere, remembers them."""
        if len(self.store.sentences):
            # a turn need not be about what is stored: unsure, the model answers, flagged, and no quote takes its place
            mode = AnswerMode.kv if self.config.mode is AnswerMode.auto else self.config.mode
            answer = self.ask(question, params, mode)
        else:
            answer = self._first_turn(question, params)
        sessions = self.store.sessions
        known = [s for s in sessions if s.name == session and s.source == "chat"]
        lines = [] if known else [self._session_line(session, "chat", "chat", "", len(sessions))]
        number = known[-1].id if known else len(sessions)
        said = f"{question.strip()}\n{answer.text.strip()}\n"
        place = self._place(number)
        self._append(self._read_piece(said.encode(), self.state, place, lines, with_snapshot=False))
        self.lexical.save()
        return answer

    def _first_turn(self, question: str, params: SamplingParams) -> Answer:
        before = self._before()
        drawn = self._answer(self.prompt(question), None, params)
        return self._result(
            drawn, Verdict(0.0, True, "empty_store"), AnswerMode.kv, [], 0.0, before
        )

    def close_session(self) -> None:
        """Commit an exact snapshot of the hot tier, so that another process goes on with the same numbers."""
        if self.store.commit.tokens and self.store.commit.hot is None:
            update = Update()
            self._add_exact(update, self.state, self.store.commit.blocks, with_snapshot=True)
            self._append(update)
            self.lexical.save()

    def close(self) -> None:
        """Let go of the store and of pinned RAM."""
        self.cold.close()
        self.store.close()


def _check_config(config: MemoryConfig, header: Header) -> None:
    faults = []
    if config.window < config.chunk:
        faults.append(f"memory.window={config.window} is below memory.chunk={config.chunk}")
    if config.window < header.block + config.sinks:
        faults.append(
            f"memory.window={config.window} is below a block of {header.block} tokens and the sinks"
        )
    if config.recency_tail < header.block or config.recency_tail > config.window:
        faults.append(
            f"memory.recency_tail={config.recency_tail} must be {header.block} to memory.window"
        )
    if faults:
        raise MemoryUsageError(
            "; ".join(faults), "the defaults fit each other: leave these keys out"
        )


def _owners(spans: Sequence[Sentence]) -> list[int]:
    return [i for i, s in enumerate(spans) for _ in range(s.lo, s.hi)]

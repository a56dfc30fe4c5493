"""Answers out of a store: a prompt is read with what was found in sight, a text drawn behind it, and judged."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from conf.schema import AnswerMode
from runtime.living_kv import confidence as sure
from runtime.living_kv.answer import Answer
from runtime.living_kv.confidence import Verdict
from runtime.living_kv.errors import MemoryUsageError
from runtime.living_kv.finder import Finder
from runtime.living_kv.opened import Opened
from runtime.living_kv.positions import Mode, choose_mode
from runtime.living_kv.quote import quote_sentences, readable_text
from runtime.living_kv.select import Selection
from runtime.sampling import Sampler, SamplingParams
from runtime.text import ChatOptions, StopFilter, StreamDecoder, TemplateCodec

_Scored = Sequence[tuple[int, float]]  # sentences and their scores, best first


def _best(found: Selection | None, count: int) -> _Scored:
    return [] if found is None else list(zip(found.ranked, found.scores, strict=True))[:count]


@dataclass(slots=True)
class _Drawn:
    """What a model said, and why it ended."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = "stop"


class Answerer:
    """Answers from one store, and leaves it as it is."""

    def __init__(self, opened: Opened, finder: Finder) -> None:
        self._opened, self._finder = opened, finder
        self._model, self._text, self._store = opened.model, opened.text, opened.store

    def prompt(self, question: str) -> list[int]:
        """Return the tokens that are answered: through the chat template, or the bare text."""
        if self._opened.config.template.value == "none" or not isinstance(
            self._text, TemplateCodec
        ):
            return self._opened.tokenize(question)[0]
        return self._text.encode_chat([{"role": "user", "content": question}], ChatOptions())

    def attend(self, prompt: Sequence[int], found: Selection | None) -> Tensor:
        """Read a prompt with the chosen sentences in sight: fp32 logits [1, vocab] of what comes next."""
        scratch = self._opened.start_scratch()
        spans = []
        for i in found.sentences if found else ():
            lo, hi = int(self._store.sentences["lo"][i]), int(self._store.sentences["hi"][i])
            spans.append((max(lo, scratch.num_sinks), min(hi, scratch.hot_start)))
        keys, values, places = self._opened.cold.fetch(spans)
        scratch.retrieve(keys, values, places)
        self._opened.check_room(len(prompt))
        mode = choose_mode(
            self._opened.config.position.value,
            self._model.spec,
            scratch.largest_distance + len(prompt),
            self._opened.config.near_beyond,
        )
        if mode is Mode.near:
            scratch.bring_near()
        elif mode is Mode.dca:
            scratch.bring_into_chunks()
        logits = None
        for at in range(0, len(prompt), self._opened.config.chunk):
            logits = self._model.run(
                prompt[at : at + self._opened.config.chunk], scratch, self._opened.after_layer
            )
        self._opened.asked_tokens += len(prompt)
        assert logits is not None, "an empty prompt"
        return self._model.logits(logits[-1:])

    def generate(
        self, logits: Tensor, params: SamplingParams
    ) -> Generator[tuple[int, str], None, str]:
        """Draw an answer behind `attend`: (token, text that has become certain). Returns why it ended: stop, length.

        Stop strings are never given out. What was held back comes last, with token -1.
        """
        scratch = self._opened.scratch
        sampler = Sampler(params, self._text.vocab_size)
        stream, stops = StreamDecoder(self._text), StopFilter(params.stop)
        room = self._opened.room
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        reason = "length"
        for count in range(limit):
            token = sampler(logits)
            if token in self._text.stop_ids:
                reason = "stop"
                break
            yield token, stops.push(stream.push(token))
            if stops.is_stopped:
                return "stop"
            if count + 1 < limit:
                logits = self._model.logits(
                    self._model.run([token], scratch, self._opened.after_layer)
                )
        rest = stops.push(stream.flush())
        if stops.is_stopped:
            reason = "stop"
        rest += stops.flush()
        if rest:
            yield -1, rest
        return reason

    def ask(self, question: str, params: SamplingParams, mode: AnswerMode | None) -> Answer:
        """Answer from what is stored. The store does not change.  mode: None is the config's."""
        if not question.strip():
            raise MemoryUsageError("the question is empty", 'give one: memory.question="..."')
        before = self._before()
        found = self._finder.find(question)
        verdict = sure.judge(found, sure.load_estimator(self._store.root))
        mode = mode or self._opened.config.mode
        best = _best(found, self._opened.config.k)
        if mode is AnswerMode.quote or (
            mode is AnswerMode.auto and (verdict.is_low or found is None)
        ):
            return self._quoted(best, verdict, before)
        drawn = self._answer(self.prompt(question), found, params)
        share, used = self._support(drawn.text, found), AnswerMode.kv
        if mode is AnswerMode.ground or (mode is AnswerMode.auto and share < sure.MIN_SUPPORT):
            used = AnswerMode.ground
            grounded = "\n".join(
                readable_text(self._store, i).strip() for i in (found.sentences if found else ())
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

    def reply(self, question: str, params: SamplingParams) -> Answer:
        """Answer a turn of a conversation. The store does not change."""
        if len(self._store.sentences):
            # a turn need not be about what is stored: unsure, the model answers, flagged, and no quote takes its place
            config = self._opened.config
            mode = AnswerMode.kv if config.mode is AnswerMode.auto else config.mode
            return self.ask(question, params, mode)
        return self._first_turn(question, params)

    def _first_turn(self, question: str, params: SamplingParams) -> Answer:
        before = self._before()
        drawn = self._answer(self.prompt(question), None, params)
        return self._result(
            drawn, Verdict(0.0, True, "empty_store"), AnswerMode.kv, [], 0.0, before
        )

    def _before(self) -> tuple[int, int]:
        return self._store.read_nbytes, self._opened.asked_tokens

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
        texts = [readable_text(self._store, i) for i in (found.sentences if found else ())]
        return sure.support(answer, "\n".join(texts))

    def _quoted(self, best: _Scored, verdict: Verdict, before: tuple[int, int]) -> Answer:
        text = "\n".join(readable_text(self._store, i).strip() for i, _ in best[:3])
        share = 1.0 if best else 0.0
        return self._result(_Drawn(text), verdict, AnswerMode.quote, best, share, before)

    def _result(
        self, drawn: _Drawn, verdict: Verdict, mode: AnswerMode, best: _Scored, share: float,
        before: tuple[int, int],
    ) -> Answer:  # fmt: skip
        scratch, (read, asked) = self._opened.scratch, before
        quotes = [
            q.to_dict()
            for q in quote_sentences(
                self._store, [i for i, _ in best], [score for _, score in best]
            )
        ]
        return Answer(
            drawn.text, drawn.tokens, drawn.finish, verdict, mode.value, quotes, scratch.mode.value,
            scratch.largest_distance, share, scratch.num_retrieved, self._store.read_nbytes - read,
            self._opened.asked_tokens - asked,
        )  # fmt: skip

"""The rows of `verify`, part by part: what is computed, and what it must be."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch

from conf.schema import CacheConfig, ComputeDtype, DirectIo, DraftsConfig, PrefetchConfig, RunConfig
from runtime.budget import MemoryPlan
from runtime.engine import Engine, EngineFiles, load_family
from runtime.models.checks import FamilyChecks
from runtime.session import Session
from runtime.units import GIB
from stages.verify_measures import divergence, greedy_answer, perplexity, read_documents

GOLDEN = "golden_answers.json"
CONTROL_RATIO = 1.5  # a control has broken something when the perplexity is this much worse
PIECE_TOKENS = 16  # of a prompt in pieces, whose divergence is that of other orders of sums
QUESTIONS = ("What is a whale?", "Какая столица Италии?", "Tell me a short story about a fox.")
QUESTION_TOKENS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    found: str
    wanted: str
    is_ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is verified, and against what."""

    cfg: RunConfig
    files: EngineFiles
    golden: Mapping[str, Any]  # recorded by a reference; empty for a model without
    checks: FamilyChecks

    @classmethod
    def open(cls, cfg: RunConfig, files: EngineFiles) -> Self:
        """Read a snapshot's golden answers, and find what its family says about them."""
        path = files.snapshot / GOLDEN
        golden = json.loads(path.read_text()) if path.exists() else {}
        return cls(cfg, files, golden, family_checks(cfg.model.family))

    @contextmanager
    def engine(self, cfg: RunConfig | None = None, is_resident: bool = False) -> Iterator[Engine]:
        """Open an engine, with other settings if `cfg` is given; without drafts, which change no number."""
        plain = dataclasses.replace(cfg or self.cfg, drafts=DraftsConfig())
        engine = Engine.open(plain, self.files, is_resident)
        try:
            yield engine
        finally:
            engine.close()

    @property
    def spec(self) -> Any:
        """The model's sizes, of its family's own type."""
        return load_family(self.cfg.model.family).read_spec(self.files.snapshot)

    def documents(self, language: str, count: int) -> list[str]:
        """Return the first `count` held-out documents."""
        return read_documents(self.files.snapshot, language)[:count]


def family_checks(family: str) -> FamilyChecks:
    """Return what `runtime/models/<family>_checks.py` says."""
    checks: FamilyChecks = importlib.import_module(f"runtime.models.{family}_checks").CHECKS
    return checks


def expert_rows(case: Case) -> Iterator[Row]:
    """The expert operation on real weights against float64, from the same bytes by another way."""
    checks, spec, worst = case.checks, case.spec, 0.0
    with case.engine() as engine:
        generator = torch.Generator().manual_seed(0)
        for layer in range(spec.num_layers):
            expert = layer * 7 % spec.num_experts
            error = checks.expert_error(engine.model, case.files.snapshot, layer, expert, generator)
            worst = max(worst, math.inf if math.isnan(error) else error)
    yield Row(
        "expert arithmetic against float64",
        f"{worst:.1e}",
        f"below {checks.expert_tolerance:.0e}",
        worst < checks.expert_tolerance,
    )


def answer_rows(case: Case) -> Iterator[Row]:
    """Greedy answers against those of the reference implementation, token for token."""
    greedy = case.golden.get("greedy", [])
    if not greedy:
        return
    # the reference computed in fp32, so the comparison does too; what bf16 changes is not an error
    hw = dataclasses.replace(case.cfg.hw, dtype=ComputeDtype.float32)
    same, differences = 0, []
    with case.engine(dataclasses.replace(case.cfg, hw=hw)) as engine:
        for question in greedy:
            session, wanted = Session(engine), question[case.checks.answer_key]
            logits = session.sync(question["prompt_ids"])[0]
            differences += [
                abs(float(logits[i]) - value)
                for i, value in question.get("last_prompt_logits_top5", ())
            ]
            same += greedy_answer(session, question["prompt_ids"], len(wanted)) == wanted
    yield Row(
        "greedy answers as the reference's", f"{same} of {len(greedy)}", "all", same == len(greedy)
    )
    if differences:
        worst = max(differences)
        yield Row(
            "logits after the prompts, largest difference",
            f"{worst:.1e}",
            "below 1e-03",
            worst < 1e-3,
        )


def setting_rows(case: Case) -> Iterator[Row]:
    """The same questions under other cache, prefetch and drive settings: every token equal."""
    with case.engine() as engine:
        plan, wanted = engine.plan, fixed_answers(engine)
    for name, other in other_settings(case, plan).items():
        with case.engine(other) as engine:
            yield same_answers(name, fixed_answers(engine), wanted)
    if plan.cache_rows == case.spec.num_layers * case.spec.num_experts:  # they fit in memory
        with case.engine(is_resident=True) as engine:
            yield same_answers("all experts in memory", fixed_answers(engine), wanted)


def other_settings(case: Case, plan: MemoryPlan) -> dict[str, RunConfig]:
    """Return what a run is compared with: name -> config."""
    cfg, spec = case.cfg, case.spec
    # one and a half tokens' experts
    some = 1.5 * spec.num_layers * spec.top_k * (plan.record_nbytes / GIB)
    settings = {
        "no cache, no prefetch": (CacheConfig(ram_gib=0), PrefetchConfig(experts=0), DirectIo.auto),
        "no cache, prefetch 4": (CacheConfig(ram_gib=0), PrefetchConfig(experts=4), DirectIo.auto),
        "small cache, prefetch 2": (
            CacheConfig(ram_gib=some),
            PrefetchConfig(experts=2),
            DirectIo.auto,
        ),
        "small cache, through the page cache": (
            CacheConfig(ram_gib=some),
            PrefetchConfig(),
            DirectIo.buffered,
        ),
    }
    configs = {}
    for name, (cache, prefetch, direct) in settings.items():
        drive = dataclasses.replace(cfg.hw.drive, direct=direct)
        hw = dataclasses.replace(cfg.hw, drive=drive)
        configs[name] = dataclasses.replace(cfg, cache=cache, prefetch=prefetch, hw=hw)
    return configs


def fixed_answers(engine: Engine, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    """Return greedy answers to the fixed questions, as tokens."""
    prompts = [
        engine.codec.encode_chat([{"role": "user", "content": question}]) for question in questions
    ]
    return [greedy_answer(Session(engine), prompt, QUESTION_TOKENS) for prompt in prompts]


def same_answers(name: str, found: list[list[int]], wanted: list[list[int]]) -> Row:
    """Say how many tokens are equal; all must be."""
    total = sum(map(len, wanted))
    same = sum(
        a == b for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=False)
    )
    return Row(f"same tokens: {name}", f"{same} of {total}", "all", found == wanted)


def perplexity_rows(case: Case) -> Iterator[Row]:
    """Perplexity of held-out text, against the reference's where it has one."""
    tolerance = case.checks.perplexity_tolerance
    with case.engine() as engine:
        for language in ("en", "ru"):
            count, expected = recorded_perplexity(case.golden, language, case.cfg.verify.documents)
            documents = case.documents(language, count)
            found, num_tokens = perplexity(engine, documents, case.checks.document_tokens)
            name = f"perplexity {language}, {len(documents)} documents, {num_tokens} tokens"
            if expected is None:
                yield Row(name, f"{found:.4f}", "a number (no reference)", math.isfinite(found))
                continue
            is_ok = abs(found / expected["ppl"] - 1) <= tolerance
            is_ok = is_ok and num_tokens == expected["predicted_tokens"]
            wanted = f"{expected['ppl']} within {tolerance:.1%}"
            if num_tokens != expected["predicted_tokens"]:
                wanted += f", {expected['predicted_tokens']} tokens"
            yield Row(name, f"{found:.4f}", wanted, is_ok)


def recorded_perplexity(
    golden: Mapping[str, Any], language: str, count: int
) -> tuple[int, Mapping[str, Any] | None]:
    """Return (number of documents, recorded figure): the largest recorded number that is at most `count`.

    Without one the number is `count`, the figure None.
    """
    recorded = golden.get("perplexity", {})
    for fewer in range(count, 0, -1):
        figure = recorded.get(f"heldout_{language}.txt, first {fewer} documents")
        if figure is not None:
            return fewer, figure
    return count, None


def control_rows(case: Case) -> Iterator[Row]:
    """Damage on purpose: each control must show in a measure that a right model passes."""
    checks = case.checks
    with case.engine() as engine:
        documents = case.documents("en", case.cfg.verify.control_documents)
        healthy, _ = perplexity(engine, documents, checks.document_tokens)
        if checks.subtle_controls:
            yield _undamaged_row(engine, documents, checks)
        for name, damage in checks.controls.items():
            with damage(engine.model):
                damaged, _ = perplexity(engine, documents, checks.document_tokens)
            ratio = damaged / healthy
            if name in checks.subtle_controls:
                yield _subtle_row(engine, documents, checks, name, ratio)
                continue
            is_broken = not ratio < CONTROL_RATIO  # not a number counts as broken
            yield Row(
                f"control, must break: {name}",
                f"{damaged:.4g} is {ratio:.3g} times {healthy:.4f}",
                f"at least {CONTROL_RATIO} times",
                is_broken,
            )


def _undamaged_row(engine: Engine, documents: Sequence[str], checks: FamilyChecks) -> Row:
    """The same measure without damage: how far other orders of sums alone move the probabilities."""
    found = divergence(engine, documents, checks.document_tokens, nullcontext, PIECE_TOKENS)
    return Row(
        f"divergence of a prompt in pieces of {PIECE_TOKENS}",
        f"{found:.1e} a token",
        f"below {checks.least_divergence:.0e}",
        found < checks.least_divergence,
    )


def _subtle_row(
    engine: Engine, documents: Sequence[str], checks: FamilyChecks, name: str, ratio: float
) -> Row:
    found = divergence(
        engine, documents, checks.document_tokens, lambda: checks.controls[name](engine.model)
    )
    return Row(
        f"control, must show: {name}",
        f"divergence {found:.1e} a token, perplexity {ratio:.4g} times",
        f"divergence at least {checks.least_divergence:.0e}",
        not found < checks.least_divergence,
    )


PARTS: dict[str, Callable[[Case], Iterator[Row]]] = {
    "experts": expert_rows,
    "answers": answer_rows,
    "settings": setting_rows,
    "perplexity": perplexity_rows,
    "controls": control_rows,
}

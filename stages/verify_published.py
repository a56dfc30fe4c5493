"""The rows of `verify` where a release's own code computes: kernels, streaming, states, the native one beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from conf.schema import Arithmetic, Kernels, RunConfig
from runtime.engine import Engine, load_family
from runtime.experts.plain import PlainExperts
from runtime.models.checks import relative_error
from runtime.models.damage import damaged_experts, replaced
from runtime.session import Session
from stages.verify_measures import document_ids, greedy_answer, perplexity
from stages.verify_rows import (
    CONTROL_RATIO,
    QUESTION_TOKENS,
    QUESTIONS,
    Case,
    Row,
    answer_rows,
    family_checks,
    fixed_answers,
    other_settings,
    perplexity_rows,
    same_answers,
)

FOUR_QUESTIONS = (*QUESTIONS, "What is 8 + 9?")
LAYER_TOLERANCE = 0.05  # of the streams behind a layer, median over tokens: more is a mistake
TOKENS_EQUAL = 0.95  # the order of fp32 sums alone moves 3 of 100 where weights are random
STATE_STEPS = 4


def kernel_rows(case: Case) -> Iterator[Row]:
    """Every kernel against plain torch on real weights, at row counts that have failed, five times each."""
    from kernels import deepseek_published
    from runtime.models import deepseek_backends as backends

    with case.engine() as engine:
        model: Any = engine.model
        kernels: dict[str, Any] = {"ours": deepseek_published}
        if model.parts.kernels is Kernels.tilelang:
            # as the model calls it: heads in groups where shared memory is short
            kernels["tilelang"] = _AsCalled(model.parts.package)
        for backend, kernel in kernels.items():
            findings = model.probe_kernels(kernel)
            for name in dict.fromkeys(finding.name for finding in findings):
                of_name = [finding for finding in findings if finding.name == name]
                bad = [str(finding.rows) for finding in of_name if not finding.is_ok]
                steady = all(finding.is_steady for finding in of_name)
                worst = max(finding.error for finding in of_name)
                yield Row(
                    f"kernel {name}, {backend}, {', '.join(str(f.rows) for f in of_name)} rows",
                    f"{worst:.1e}, {'the same bits' if steady else 'OTHER BITS'} each time"
                    + (f", wrong at {', '.join(bad)}" if bad else ""),
                    f"at most {_tolerance(name):.0e}",
                    not bad,
                )
        if "tilelang" not in kernels:
            fault = backends.tilelang_fault(backends.tilelang_version(), backends.capability())
            yield Row(
                "kernels of the release (TileLang)", "not run", fault or "not asked for", True
            )


class _AsCalled:
    """The kernels of a loaded package, attention as its model calls it."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.sparse_attn = package.model.sparse_attn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package.kernel, name)


def _tolerance(name: str) -> float:
    from runtime.models.deepseek_probe import TOLERANCES

    return TOLERANCES[name]


def expert_rows(case: Case) -> Iterator[Row]:
    """The published expert on real weights against float64, from the same bytes by another way."""
    from runtime.checkpoint import Checkpoint
    from runtime.experts.layout import ExpertKey
    from runtime.models import deepseek_checks as checks

    spec, worst = case.spec, 0.0
    checkpoint = Checkpoint.open(case.files.snapshot)
    generator = torch.Generator().manual_seed(0)
    with case.engine() as engine:
        model: Any = engine.model
        for layer in range(spec.num_layers):
            expert = layer * 7 % spec.num_experts
            loudness = torch.tensor(checks.LOUDNESS).unsqueeze(1)
            x = torch.randn(len(loudness), spec.hidden, generator=generator) * loudness
            weights = torch.full((len(x), 1), checks.ROUTE_WEIGHT)
            found = model.expert_output(layer, expert, x.to(torch.bfloat16), weights).cpu().double()
            gate, down, up = checks.matrices_in_float64(checkpoint, ExpertKey(layer, expert))
            rows = x.to(torch.bfloat16).double()
            wanted = checks.expert_in_float64(
                rows, gate, up, down, spec.swiglu_limit, checks.ROUTE_WEIGHT
            )
            errors = [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
            worst = max(worst, *errors)
    tolerance = case.checks.expert_tolerance
    yield Row(
        "expert arithmetic against float64", f"{worst:.1e}", f"below {tolerance:.0e}", worst < tolerance
    )  # fmt: skip


def setting_rows(case: Case) -> Iterator[Row]:
    """The plain path, one expert after the other read when it is needed, against every way of being faster."""
    layout = load_family(case.cfg.model.family).expert_layout(case.spec, case.files)
    plain = PlainExperts(layout)
    with case.engine() as engine:
        plan = engine.plan
        with replaced((engine.model, "experts", plain)):
            wanted = fixed_answers(engine, FOUR_QUESTIONS)
    plain.close()
    settings: dict[str, tuple[RunConfig, bool]] = {"as configured": (case.cfg, False)}
    settings |= {name: (cfg, False) for name, cfg in other_settings(case, plan).items()}
    if plan.cache_rows == case.spec.num_layers * case.spec.num_experts:
        settings["all experts in memory"] = (case.cfg, True)
    for name, (cfg, is_resident) in settings.items():
        with case.engine(cfg, is_resident) as engine:
            found = fixed_answers(engine, FOUR_QUESTIONS)
        yield same_answers(f"plain path against {name}", found, wanted)


def state_rows(case: Case) -> Iterator[Row]:
    """A conversation taken up from its copy: every logit equal, at an odd and at an even position."""
    with case.engine() as engine:
        model, same = engine.model, 0
        tokens = document_ids(engine, case.documents("en", 1)[0], 80)
        for position in (len(tokens) - STATE_STEPS - 1, len(tokens) - STATE_STEPS):
            state, copy = engine.new_state(), engine.new_state()
            model.prefill(tokens[:position], state)
            kept = state.tensors()
            wanted = [model.decode(token, state) for token in tokens[position:]]
            copy.restore(kept)
            found = [model.decode(token, copy) for token in tokens[position:]]
            same += torch.equal(torch.cat(found), torch.cat(wanted))
    yield Row(
        "a restored conversation goes on with the same bits", f"{same} of 2", "all", same == 2
    )


def index_key_rows(case: Case) -> Iterator[Row]:
    """Say whose index keys are read."""
    is_fixed = case.cfg.deepseek.fix_index_keys
    yield Row(
        "index keys at even positions",
        "each source's own" if is_fixed else "what the last source left, as released",
        f"deepseek.fix_index_keys={str(is_fixed).lower()}",
        True,
    )


def recorded_rows(case: Case) -> Iterator[Row]:
    """Recorded answers, of the keys that are on."""
    key = "answer_own_keys_ids" if case.cfg.deepseek.fix_index_keys else "answer_as_released_ids"
    checks = dataclasses.replace(case.checks, answer_key=key)
    yield from answer_rows(dataclasses.replace(case, checks=checks))


def native_rows(case: Case) -> Iterator[Row]:
    """The native arithmetic fed with the reference's tokens: each layer's streams, and the tokens it would have drawn.

    Both read each source's own index keys.
    """
    fixed = dataclasses.replace(case.cfg.deepseek, fix_index_keys=True)
    with case.engine(dataclasses.replace(case.cfg, deepseek=fixed)) as engine:
        texts = _answered(engine)
        wanted = [_reference_run(engine, *text) for text in texts]
    native = dataclasses.replace(case.cfg.deepseek, arithmetic=Arithmetic.native)
    with case.engine(dataclasses.replace(case.cfg, deepseek=native)) as engine:
        found = [_native_run(engine, *text) for text in texts]
    for layer in range(case.spec.num_layers):
        errors = torch.cat(
            [_row_errors(f[0][layer], w[0][layer]) for f, w in zip(found, wanted, strict=True)]
        )
        median = float(errors.median())
        yield Row(
            f"layer {layer}, native against reference",
            f"{median:.1e} (median of {len(errors)} tokens), at most {float(errors.max()):.1e}",
            f"median below {LAYER_TOLERANCE}",
            median < LAYER_TOLERANCE,
        )
    drawn = torch.cat([f[1] == w[1] for f, w in zip(found, wanted, strict=True)])
    same, total = int(drawn.sum()), len(drawn)
    yield Row(
        "next tokens, native against reference",
        f"{same} of {total}",
        f"at least {TOKENS_EQUAL:.0%}",
        same >= TOKENS_EQUAL * total,
    )


def _answered(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Return the reference's (prompt, answer) of each question."""
    prompts = [
        engine.codec.encode_chat([{"role": "user", "content": question}])
        for question in FOUR_QUESTIONS
    ]
    return [(p, greedy_answer(Session(engine), p, QUESTION_TOKENS)) for p in prompts]


def _run(engine: Engine, prompt: list[int], answer: Sequence[int]) -> Tensor:
    """Feed a prompt and its answer: the tokens that greedy draws after each of the answer's."""
    state = engine.new_state()
    rows = [engine.model.prefill(prompt, state)]
    rows += [engine.model.decode(token, state) for token in answer]
    return torch.cat(rows).argmax(-1).cpu()


def _reference_run(
    engine: Engine, prompt: list[int], answer: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Return each layer's streams over the prompt [T, S, d], and the tokens drawn."""
    model: Any = engine.model
    streams: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _m, _a, out: streams.append(out[0][0].cpu()))
        for block in model.transformer.layers
    ]
    model.prefill(prompt, engine.new_state())
    for hook in hooks:
        hook.remove()
    return streams, _run(engine, prompt, answer)


def _native_run(
    engine: Engine, prompt: list[int], answer: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    model: Any = engine.model
    streams: list[Tensor] = []
    good = model._run

    def run(*args: Any) -> Any:
        out = good(*args)
        streams.append(out[0].clone().cpu())
        return out

    with replaced((model, "_run", run)):
        model.prefill(prompt, engine.new_state())
    return streams, _run(engine, prompt, answer)


def _row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Return each token's relative error: [T]."""
    a, b = found.double().flatten(1), wanted.double().flatten(1)
    errors: Tensor = (a - b).norm(dim=1) / b.norm(dim=1)
    return errors


def control_rows(case: Case) -> Iterator[Row]:
    """Damage that must show: without the routed experts the text is worse."""
    checks = family_checks(case.cfg.model.family)
    with case.engine() as engine:
        documents = case.documents("en", min(2, case.cfg.verify.control_documents))
        length = min(checks.document_tokens, engine.prefill_tokens)
        healthy, _ = perplexity(engine, documents, length)
        with damaged_experts(engine.model, torch.zeros_like):
            damaged, _ = perplexity(engine, documents, length)
    yield Row(
        "control, must break: routed experts removed",
        f"{damaged:.4g} is {damaged / healthy:.3g} times {healthy:.4f}",
        f"at least {CONTROL_RATIO} times",
        not damaged / healthy < CONTROL_RATIO,
    )


PUBLISHED_PARTS: dict[str, Callable[[Case], Iterator[Row]]] = {
    "kernels": kernel_rows,
    "experts": expert_rows,
    "index keys": index_key_rows,
    "answers": recorded_rows,
    "settings": setting_rows,
    "states": state_rows,
    "perplexity": perplexity_rows,
    "native": native_rows,
    "controls": control_rows,
}

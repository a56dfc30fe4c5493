"""Numbers against references: perplexity, greedy answers, the same tokens for every setting, and controls that must
break.

A red row is recorded, shown, and stops `serve` and `chat` until it is mended (or force=true).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from conf.schema import CacheConfig, ComputeDtype, DirectIo, PrefetchConfig, RunConfig
from kernels import formats, reference
from runtime.engine import Engine, EngineFiles, load_family
from runtime.errors import VerificationError
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.units import GIB
from stages.core import Output, Stage, StageContext
from stages.download import PROJECT
from stages.opening import engine_files

GOLDEN = "golden_answers.json"
MAX_DOCUMENT_TOKENS = 700  # as the golden perplexities were computed
PERPLEXITY_TOLERANCE = 0.005
CONTROL_RATIO = 1.5  # a control has broken something when the perplexity is this much worse
EXPERT_TOLERANCE = 2e-5  # fp32 sums of up to 2,560 products against float64
QUESTIONS = ("What is a whale?", "Какая столица Италии?", "Tell me a short story about a fox.")
QUESTION_TOKENS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    found: str
    wanted: str
    is_ok: bool


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides what is computed."""
    return {**dataclasses.asdict(cfg.verify), "device": cfg.hw.device, "dtype": cfg.hw.dtype.value}


def run(ctx: StageContext) -> None:
    """Compute every row; none is skipped because an earlier one is red."""
    files = engine_files(ctx.inputs)
    golden_path = files.snapshot / GOLDEN
    golden = json.loads(golden_path.read_text()) if golden_path.exists() else {}
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "experts": lambda: _expert_rows(ctx.cfg, files),
        "answers": lambda: _answer_rows(ctx.cfg, files, golden),
        "settings": lambda: _setting_rows(ctx.cfg, files),
        "perplexity": lambda: _perplexity_rows(ctx.cfg, files, golden),
        "controls": lambda: _control_rows(ctx.cfg, files),
    }
    for part in ctx.todo(list(parts), "parts"):
        ctx.done(part, rows=[dataclasses.asdict(row) for row in parts[part]()])
    rows = [row for part in parts for row in ctx.units[part]["rows"]]
    ctx.facts = {"rows": rows, "red": [row["name"] for row in rows if not row["is_ok"]]}


def show(_cfg: RunConfig, output: Output) -> None:
    """Print the table; raise VerificationError when a row is red."""
    rows = output.facts["rows"]
    widths = [max(len(row[column]) for row in rows) for column in ("name", "found", "wanted")]
    for row in rows:
        cells = (
            row[column].ljust(width)
            for column, width in zip(("name", "found", "wanted"), widths, strict=True)
        )
        print("  ".join((*cells, "ok" if row["is_ok"] else "RED")))
    if output.facts["red"]:
        raise VerificationError(
            f"{len(output.facts['red'])} of {len(rows)} rows are red: {', '.join(output.facts['red'])}",
            "find the cause, then run again with force=[verify]",
        )


@contextmanager
def _opened(cfg: RunConfig, files: EngineFiles, is_resident: bool = False) -> Iterator[Engine]:
    engine = Engine.open(cfg, files, is_resident)
    try:
        yield engine
    finally:
        engine.close()


def _expert_rows(cfg: RunConfig, files: EngineFiles) -> Iterator[Row]:
    """The expert operation on real weights against float64, from the same bytes by another way."""
    with _opened(cfg, files) as engine:
        spec = load_family(cfg.model.family).read_spec(files.snapshot)
        worst = 0.0
        generator = torch.Generator().manual_seed(0)
        for layer in range(spec.num_layers):
            expert = layer * 7 % spec.num_experts
            x = torch.randn(3, spec.hidden, generator=generator)
            scales = engine.model.expert_scales(layer, expert).cpu()
            for _, record in engine.model.experts.fetch(layer, [expert]):
                found = reference.nvfp4_swiglu_expert(x, record, scales, spec.intermediate).double()
                wanted = _expert_in_float64(
                    x.double(), bytes(record.numpy()), scales.double(), spec.intermediate
                )
                worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    yield Row(
        "expert arithmetic against float64",
        f"{worst:.1e}",
        f"below {EXPERT_TOLERANCE:.0e}",
        worst < EXPERT_TOLERANCE,
    )


def _expert_in_float64(
    x: torch.Tensor, record: bytes, scales: torch.Tensor, intermediate: int
) -> torch.Tensor:
    """x: [T, H] float64.  Decodes value by value from the bytes, with no table of the kernels."""
    hidden = x.shape[1]
    codes_nbytes, scales_nbytes = hidden * intermediate // 2, hidden * intermediate // 16
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    matrices = []
    for i, (rows, columns) in enumerate(sizes):
        codes = torch.tensor(list(record[i * codes_nbytes : (i + 1) * codes_nbytes]))
        nibbles = torch.stack([codes % 16, codes // 16], dim=1).view(rows, columns)
        exponent, mantissa = (nibbles % 8) // 2, nibbles % 2
        value = torch.where(
            exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0)
        )
        value = torch.where(nibbles >= 8, -value, value).double()
        start = 3 * codes_nbytes + i * scales_nbytes
        raw = torch.tensor(list(record[start : start + scales_nbytes])).view(
            rows, columns // formats.NVFP4_GROUP
        )
        exponent, mantissa = raw // 8, raw % 8
        step = torch.where(
            exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
        )
        matrices.append(
            value * step.double().repeat_interleave(formats.NVFP4_GROUP, dim=1) * scales[i]
        )
    gate, up, down = matrices
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def _answer_rows(cfg: RunConfig, files: EngineFiles, golden: Mapping[str, Any]) -> Iterator[Row]:
    """Greedy answers against those of the reference implementation, token for token."""
    greedy = golden.get("greedy", [])
    if not greedy:
        return
    # the reference computed in fp32, so the comparison does too; what bf16 changes is not an error
    exact = dataclasses.replace(cfg, hw=dataclasses.replace(cfg.hw, dtype=ComputeDtype.float32))
    with _opened(exact, files) as engine:
        same, worst = 0, 0.0
        for question in greedy:
            session = Session(engine)
            logits = session.sync(question["prompt_ids"])[0]
            worst = max(
                worst,
                *(
                    abs(float(logits[i]) - value)
                    for i, value in question["last_prompt_logits_top5"]
                ),
            )
            same += (
                greedy_answer(session, question["prompt_ids"], len(question["answer_ids"]))
                == question["answer_ids"]
            )
    yield Row(
        "greedy answers as the reference's", f"{same} of {len(greedy)}", "all", same == len(greedy)
    )
    yield Row(
        "logits after the prompts, largest difference", f"{worst:.1e}", "below 1e-03", worst < 1e-3
    )


def greedy_answer(session: Session, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens of a greedy answer, stop token included."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [piece.token for piece in session.generate(prompt, params) if piece.token is not None]


def _setting_rows(cfg: RunConfig, files: EngineFiles) -> Iterator[Row]:
    """The same questions under other cache, prefetch and drive settings: every token equal."""
    with _opened(cfg, files) as engine:
        record_gib = engine.plan.record_nbytes / GIB
        wanted = _fixed_answers(engine)
    spec = load_family(cfg.model.family).read_spec(files.snapshot)
    some = 1.5 * spec.num_layers * spec.top_k * record_gib  # one and a half tokens' experts
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
    for name, (cache, prefetch, direct) in settings.items():
        drive = dataclasses.replace(cfg.hw.drive, direct=direct)
        other = dataclasses.replace(
            cfg, cache=cache, prefetch=prefetch, hw=dataclasses.replace(cfg.hw, drive=drive)
        )
        with _opened(other, files) as engine:
            yield _same_answers(name, _fixed_answers(engine), wanted)
    if _fits_in_memory(cfg, files):
        with _opened(cfg, files, is_resident=True) as engine:
            yield _same_answers("all experts in memory", _fixed_answers(engine), wanted)


def _fits_in_memory(cfg: RunConfig, files: EngineFiles) -> bool:
    with _opened(cfg, files) as engine:
        plan = engine.plan
    spec = load_family(cfg.model.family).read_spec(files.snapshot)
    return bool(plan.cache_rows == spec.num_layers * spec.num_experts)


def _fixed_answers(engine: Engine) -> list[list[int]]:
    prompts = [
        engine.codec.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    return [greedy_answer(Session(engine), prompt, QUESTION_TOKENS) for prompt in prompts]


def _same_answers(name: str, found: list[list[int]], wanted: list[list[int]]) -> Row:
    total = sum(map(len, wanted))
    same = sum(
        a == b for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=False)
    )
    return Row(f"same tokens: {name}", f"{same} of {total}", "all", found == wanted)


def _perplexity_rows(
    cfg: RunConfig, files: EngineFiles, golden: Mapping[str, Any]
) -> Iterator[Row]:
    with _opened(cfg, files) as engine:
        for language in ("en", "ru"):
            documents = read_documents(files.snapshot, language)[: cfg.verify.documents]
            found, num_tokens = perplexity(engine, documents)
            expected = golden.get("perplexity", {}).get(
                f"heldout_{language}.txt, first {len(documents)} documents"
            )
            name = f"perplexity {language}, {len(documents)} documents, {num_tokens} tokens"
            if expected is None:
                yield Row(name, f"{found:.4f}", "a number (no reference)", math.isfinite(found))
                continue
            is_ok = abs(found / expected["ppl"] - 1) <= PERPLEXITY_TOLERANCE
            is_ok = is_ok and num_tokens == expected["predicted_tokens"]
            yield Row(
                name, f"{found:.4f}", f"{expected['ppl']} within {PERPLEXITY_TOLERANCE:.1%}", is_ok
            )


def _control_rows(cfg: RunConfig, files: EngineFiles) -> Iterator[Row]:
    controls = importlib.import_module(f"runtime.models.{cfg.model.family}_controls").CONTROLS
    with _opened(cfg, files) as engine:
        documents = read_documents(files.snapshot, "en")[: cfg.verify.control_documents]
        healthy, _ = perplexity(engine, documents)
        for name, damage in controls.items():
            with damage(engine.model):
                damaged, _ = perplexity(engine, documents)
            ratio = damaged / healthy
            is_broken = not ratio < CONTROL_RATIO  # not a number counts as broken
            yield Row(
                f"control, must break: {name}",
                f"{damaged:.4g} is {ratio:.3g} times {healthy:.4f}",
                f"at least {CONTROL_RATIO} times",
                is_broken,
            )


def read_documents(snapshot: Path, language: str) -> list[str]:
    """Return the held-out documents shipped with a model, or the bundled ones for a model without."""
    path = snapshot / f"heldout_{language}.txt"
    if not path.exists():
        path = PROJECT / "runtime" / "bundled" / "tiny-qwen" / path.name
    return [text.strip() for text in path.read_text().split("<|endoftext|>") if text.strip()]


def perplexity(engine: Engine, documents: Sequence[str]) -> tuple[float, int]:
    """Return exp(mean negative log-likelihood) over all predicted tokens, and their number."""
    total, count = 0.0, 0
    for document in documents:
        tokens = engine.codec.encode(f"{document}\n<|endoftext|>")[:MAX_DOCUMENT_TOKENS]
        state = engine.new_state()
        for start in range(0, len(tokens) - 1, engine.prefill_tokens):
            piece = tokens[start : min(start + engine.prefill_tokens, len(tokens) - 1)]
            logits = engine.model.prefill(piece, state, all_logits=True)
            targets = torch.tensor(tokens[start + 1 : start + 1 + len(piece)], device=logits.device)
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            total, count = total + float(losses), count + len(piece)
    mean = total / count
    return (math.exp(mean) if mean < 700 else math.inf), count


STAGE = Stage(
    name="verify",
    run=run,
    params=params,
    show=show,
    needs=lambda _cfg: ("download", "repack", "residents"),
)

"""The published kernels against plain torch: at the row counts where they have failed, again and again.

Of TileLang 0.1.8 on sm_120 is known: noise from the FP4 product, NaN from the FP8 one at 17 rows; of the unpatched
`act_quant` a race beyond 64 rows, now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from kernels.formats import MX_GROUP, e8m0_values, fp8_blocks_dequantize, mxfp4_dequantize

ROWS = (1, 17, 64, 65, 300, 1024)
TIMES = 5
E8M0 = torch.float8_e8m0fnu
ATTENTION_HEADS, ATTENTION_DIM, ATTENTION_LIST = 64, 512, 96
# relative error of a row: a bf16 result alone is up to 2^-9 off
TOLERANCES = {
    "act_quant": 0.0,
    "fp4_act_quant": 0.0,
    "fp8_gemm": 1e-2,
    "fp4_gemm": 1e-2,
    "sparse_attn": 1e-2,
}

Weight = tuple[Tensor, Tensor]  # as stored: (values, scales)


@dataclass(frozen=True, slots=True)
class Finding:
    """One kernel at one row count."""

    name: str
    rows: int
    error: float  # the worst row of all times; infinite for NaN
    is_steady: bool  # the same bits every time

    @property
    def is_ok(self) -> bool:
        return self.is_steady and self.error <= TOLERANCES[self.name]


def probe(
    kernel: Any,
    fp8: Weight,
    fp4: Weight,
    device: torch.device,
    rows: Sequence[int] | None = None,
    times: int = TIMES,
) -> Iterator[Finding]:
    """Run every kernel `times` times at each row count, ROWS if None.

    kernel: has the published names.  fp8: values [N, K] E4M3 and scales; fp4: codes [N, K / 2] and scales.  On the
    caller's device and with bf16 as torch's default dtype.
    """
    generator = torch.Generator().manual_seed(0)
    for count in rows or ROWS:
        for name, run, wanted in _cases(kernel, fp8, fp4, device, count, generator):
            found = [run() for _ in range(times)]
            is_steady = all(torch.equal(_bits(found[0]), _bits(other)) for other in found[1:])
            error = max(_error(one, wanted) for one in found)
            yield Finding(name, count, error, is_steady)


def _cases(
    kernel: Any, fp8: Weight, fp4: Weight, device: torch.device, rows: int, generator: torch.Generator
) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:  # fmt: skip
    """Yield (name, a call, its result by plain torch)."""
    columns = fp8[0].shape[1]
    groups = (rows, columns // MX_GROUP)
    loud = torch.exp2(torch.randint(-4, 5, (*groups, 1), generator=generator, device="cpu"))
    x = _normal((*groups, MX_GROUP), generator)
    x = (x * loud).flatten(1).to(torch.bfloat16).to(device)
    rounded = _in_fp32(lambda: ops.act_rounded(x))

    def quantized(y: Tensor) -> Tensor:
        values, scales = kernel.act_quant(y.clone(), MX_GROUP, "ue8m0", E8M0)
        blocks = values.float().unflatten(-1, (-1, MX_GROUP))
        numbers: Tensor = blocks * e8m0_values(scales).unsqueeze(-1)
        return numbers.flatten(-2)

    yield "act_quant", lambda: quantized(x), rounded
    entries = x[:, : columns // 16 * 16].contiguous()
    wanted = _in_fp32(lambda: ops.fp4_rounded(entries, is_kv=True)).float()
    yield (
        "fp4_act_quant",
        lambda: kernel.fp4_act_quant(entries.clone(), 16, True, torch.float8_e4m3fn).float(),
        wanted,
    )
    for name, (weight, scale) in (("fp8_gemm", fp8), ("fp4_gemm", fp4)):
        matrix = _in_fp32(partial(_dequantized, name, weight, scale))
        part = x[:, : matrix.shape[1]].contiguous()
        values, scales = _in_fp32(partial(ops.act_quant, part))
        inputs = (values, scales.to(E8M0), weight, scale, E8M0, MX_GROUP)
        wanted = (rounded[:, : matrix.shape[1]].double() @ matrix.double().T).float()
        yield name, partial(_as_fp32, getattr(kernel, name), inputs), wanted
    yield _attention(kernel, device, rows, generator)


def _attention(
    kernel: Any, device: torch.device, rows: int, generator: torch.Generator
) -> tuple[str, Callable[[], Tensor], Tensor]:
    heads, dim = ATTENTION_HEADS, ATTENTION_DIM
    rows = min(rows, 65)  # the model hands it few at once
    q, kv = (
        _normal((1, n, dim), generator).to(torch.bfloat16).to(device) for n in (rows * heads, 192)
    )
    q = q.view(1, rows, heads, dim)
    listed = torch.randint(-1, 192, (1, rows, ATTENTION_LIST), generator=generator, device="cpu")
    listed = listed.to(torch.int32).to(device)
    sink = _normal((heads,), generator).to(device)
    places = listed[0].long()
    entries = kv[0].double()[places.clamp(min=0)]
    scores = torch.einsum("thd,tnd->thn", q[0].double(), entries) * dim**-0.5
    scores = scores.masked_fill((places < 0).unsqueeze(1), -math.inf)
    with_sink = torch.cat([scores, sink.double().view(1, -1, 1).expand(rows, -1, 1)], dim=-1)
    wanted = torch.einsum("thn,tnd->thd", with_sink.softmax(-1)[..., :-1], entries)[None].float()
    return "sparse_attn", lambda: kernel.sparse_attn(q, kv, sink, listed, dim**-0.5).float(), wanted


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal numbers, fp32, from the host: the caller's default device may be a GPU."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _dequantized(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """Return a stored weight as numbers: [N, K] fp32."""
    if name == "fp4_gemm":
        return mxfp4_dequantize(weight.view(torch.uint8), scale)
    return fp8_blocks_dequantize(weight, scale)


def _as_fp32(function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
    return function(*inputs).float()


def _in_fp32(compute: Callable[[], Any]) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return compute()
    finally:
        torch.set_default_dtype(before)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)  # NaN equals itself


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the worst relative error of a row; infinite where something is no number."""
    if not bool(found.isfinite().all()):
        return math.inf
    difference = (found - wanted).flatten(0, -2).norm(dim=-1)
    return float((difference / wanted.flatten(0, -2).norm(dim=-1).clamp(min=1e-30)).max())

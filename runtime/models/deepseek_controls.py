"""Damage on purpose: each control breaks one thing that could be silently wrong, and must show.

Two of them leave the perplexity of the bundled model as it is (1.004 and 0.999 times): what sees them is how far each
token's probabilities move, against how far they move when nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from kernels.deepseek_prompt import Fp4Weight
from runtime.experts.layout import ExpertKey
from runtime.models.damage import damaged_experts, replaced
from runtime.models.deepseek_matrices import Matrices
from runtime.models.deepseek_model import DeepseekModel, HyperConnection


def _swapped(matrix: ops.Packed | Tensor) -> ops.Packed | Tensor:
    """Swap the columns of each byte."""
    if isinstance(matrix, Tensor):
        swapped: Tensor = matrix.unflatten(1, (-1, 2)).flip(2).flatten(1)
        return swapped
    assert isinstance(matrix, Fp4Weight)
    return Fp4Weight(matrix.codes << 4 | matrix.codes >> 4, matrix.scale)


def nibbles_swapped(model: DeepseekModel) -> AbstractContextManager[None]:
    """Take the high nibble of each byte for the first column: the two share a scale."""
    good = model.open_expert

    def swapped(key: ExpertKey, record: Tensor) -> Matrices:
        gate, up, down = (_swapped(matrix) for matrix in good(key, record))
        return gate, up, down

    return replaced((model, "open_expert", swapped))


def experts_removed(model: DeepseekModel) -> AbstractContextManager[None]:
    """Take every routed expert for zero; the shared one stays."""
    return damaged_experts(model, torch.zeros_like)


@contextmanager
def experts_shifted(model: DeepseekModel) -> Iterator[None]:
    """Take expert e + 1 where e was asked for; where its payload lies in the record is its own, too."""
    good, count = model.open_expert, model.spec.num_experts

    def shifted(key: ExpertKey, record: Tensor) -> Matrices:
        return good(ExpertKey(key.layer, (key.expert + 1) % count), record)

    experts = damaged_experts(model, change_id=lambda e: (e + 1) % count)
    with experts, replaced((model, "open_expert", shifted)):
        yield


def engram_off(model: DeepseekModel) -> AbstractContextManager[None]:
    """Take every Engram row for zero: then the layer adds nothing."""
    good = model.engram_rows

    def nothing(layer: int, ids: Sequence[int]) -> Tensor:
        return torch.zeros_like(good(layer, ids))

    return replaced((model, "engram_rows", nothing))


def engram_rows_wrong(model: DeepseekModel) -> AbstractContextManager[None]:
    """Take the row behind the right one, in every table."""
    good, sizes = model.row_ids, model.spec.engram_rows

    def behind(tokens: Sequence[int], context: Sequence[int]) -> Sequence[Sequence[int]]:
        found = zip(good(tokens, context), sizes, strict=True)
        return [[(row + 1) % size for row in rows] for rows, size in found]

    return replaced((model, "row_ids", behind))


class _NotTransposed(HyperConnection):
    """Another hyper-connection, its mixing matrix the other way round."""

    def __init__(self, right: HyperConnection) -> None:
        self.spec, self.fn, self.base, self.scale = right.spec, right.fn, right.base, right.scale

    def mixes(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = super().mixes(streams)
        return pre, post, comb.transpose(-1, -2)


def mixing_not_transposed(model: DeepseekModel) -> AbstractContextManager[None]:
    """Give stream k sum_j C_kj X_j instead of sum_j C_jk X_j."""
    return replaced(
        *(
            (block, name, _NotTransposed(getattr(block, name)))
            for block in model.blocks
            for name in ("hc_attn", "hc_ffn")
        )
    )


def sink_dropped(model: DeepseekModel) -> AbstractContextManager[None]:
    """Leave the sink out of attention's denominator."""
    attentions = [block.attention for block in model.blocks]
    return replaced(*((a, "sink", torch.full_like(a.sink, -torch.inf)) for a in attentions))


_rotate_pairs = ops.rotate


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """As `ops.rotate`, but m turns with m + R / 2 instead of 2 m with 2 m + 1."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = _rotate_pairs(torch.cat([x[..., :-width], pairs], dim=-1), cos, sin, inverse)
    halves = turned[..., -width:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([x[..., :-width], halves], dim=-1)


def rope_in_halves(_model: DeepseekModel) -> AbstractContextManager[None]:
    """Rotate half against half instead of adjacent pairs, everywhere, forth and back."""
    return replaced((ops, "rotate", _rotate_halves))


CONTROLS: dict[str, Callable[[DeepseekModel], AbstractContextManager[None]]] = {
    "nibbles swapped": nibbles_swapped,
    "routed experts removed": experts_removed,
    "experts shifted by one": experts_shifted,
    "Engram off": engram_off,
    "Engram rows wrong": engram_rows_wrong,
    "hyper-connection not transposed": mixing_not_transposed,
    "attention sink dropped": sink_dropped,
    "RoPE in halves": rope_in_halves,
}
# what perplexity does not see
SUBTLE = frozenset({"hyper-connection not transposed", "attention sink dropped"})

"""The experts of a prompt's pairs in plain torch: the definition of `nvfp4_grouped`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.reference import nvfp4_swiglu_expert


def grouped_experts(
    x: Tensor, pair_tokens: Tensor, starts: Tensor, records: Sequence[Tensor], global_scales: Tensor, intermediate: int,
    y: Tensor,
) -> None:  # fmt: skip
    """Apply n experts to their pairs; y gets each pair's output, not weighted.

    x: [T, H].  pair_tokens: [P] int32, the token of each pair, one expert's pairs together.  starts: [n + 1] int32,
    expert i has the pairs starts[i] up to starts[i + 1].  records: n of uint8, on x's device.
    global_scales: [n, 3] fp32.  y: [P, H] fp32, filled.
    """
    bounds = starts.tolist()
    for i, record in enumerate(records):
        pairs = slice(bounds[i], bounds[i + 1])
        if pairs.start < pairs.stop:
            chosen = x[pair_tokens[pairs].long()]
            y[pairs] = nvfp4_swiglu_expert(chosen, record, global_scales[i], intermediate)


def add_pairs(out: Tensor, y: Tensor, where: Tensor, weights: Tensor, first: int) -> None:
    """Add the weighted rows of one batch of pairs to their tokens, for a token in ascending order of place.

    out: [T, H] fp32, changed.  y: [P, H] fp32, the pairs at places first up to first + P of the layer's list.
    where: [T, k] int32, each token's places in that list, ascending.  weights: [T, k] fp32 in the same order.
    """
    places = where.long() - first
    is_here = (places >= 0) & (places < len(y))
    for j in range(where.shape[1]):  # a token has one place in a column: no two rows meet
        tokens = is_here[:, j].nonzero().squeeze(1)
        out[tokens] += weights[tokens, j].unsqueeze(1) * y[places[tokens, j]]

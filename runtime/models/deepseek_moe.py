"""The sparse layer of DeepSeek-V4.1-Flash: router, routed and shared experts, guesses of the next layer's experts.

Owns which experts a token takes and how their outputs become one; letters are those of `deepseek_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.experts.layout import ExpertKey
from runtime.experts.source import ExpertSource, fetch_union
from runtime.models.deepseek_matrices import Matrices, fp8_matrix
from runtime.models.deepseek_weights import DeepseekSpec

if TYPE_CHECKING:
    from runtime.experts.slots import BatchedSource

# record of an expert -> its matrices gate, up, down: dequantised on a CPU, as they are on a GPU
OpenExpert = Callable[[ExpertKey, Tensor], Matrices]

CHUNK_TOKENS = 128  # of a prompt, through everything but the experts at once, on a GPU


class Moe:
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.ffn"
        self.spec, self.layer = spec, layer
        self.router, self.bias = weights[f"{name}.gate.weight"], weights[f"{name}.gate.bias"]
        if not self.router.is_cuda:
            self.router = self.router.float()
        self.shared = tuple(
            fp8_matrix(weights, f"{name}.shared_experts.{w}") for w in ("w1", "w3", "w2")
        )
        self.next_router: Tensor | None = None
        self.next_bias, self.num_guesses = self.bias, 0

    def expect(self, after: Moe, norm: Tensor, next_norm: Tensor, num_guesses: int) -> None:
        """Guess the next layer's experts from this layer's input, rescaled by the ratio of the two norms' weights."""
        ratio = next_norm.float() / norm.float()
        self.next_router, self.next_bias = after.router * ratio, after.bias
        self.num_guesses = num_guesses

    def guess(self, u: Tensor) -> list[int]:
        """u: [1, d].  Returns likely experts of the next layer, best first; none behind the last."""
        if self.next_router is None:
            return []
        scores = F.softplus(F.linear(u.float(), self.next_router)).sqrt() + self.next_bias
        guesses: list[int] = ops.best_places(scores, self.num_guesses)[0].tolist()
        return guesses

    def __call__(self, u: Tensor, experts: ExpertSource, open_expert: OpenExpert) -> Tensor:
        """u: [T, d].  Returns [T, d]."""
        if u.is_cuda:
            return self._on_gpu(u, cast("BatchedSource", experts), open_expert)
        if len(u) == 1:
            return self.rows([u], experts, open_expert)[0]
        ids, weights = self.route(u)
        out = torch.zeros(u.shape, dtype=torch.float32)
        for expert, y, tokens in self._outputs(u, ids, weights, experts, open_expert):
            del expert
            out[tokens] += y.float()
        return self._with_shared(u, out)

    def rows(
        self, us: Sequence[Tensor], experts: ExpertSource, open_expert: OpenExpert
    ) -> list[Tensor]:
        """As `__call__` for each of several tokens [1, d] alone, to the bit; each expert is fetched once for all."""
        chosen = [self.route(u) for u in us]
        routes: list[list[int]] = [ids[0].tolist() for ids, _ in chosen]
        shares = [
            dict(zip(route, weights[0].split(1), strict=True))
            for route, (_, weights) in zip(routes, chosen, strict=True)
        ]
        by_rank = zip(*(self.guess(u) for u in us), strict=True)
        guesses = list(dict.fromkeys(expert for same_rank in by_rank for expert in same_rank))
        limit = self.spec.swiglu_limit
        found: list[dict[int, Tensor]] = [{} for _ in us]
        for expert, record in fetch_union(experts, self.layer, routes, guesses):
            matrices = open_expert(ExpertKey(self.layer, expert), record)
            for u, share, ys in zip(us, shares, found, strict=True):
                if expert in share:
                    ys[expert] = ops.swiglu_expert(u, *matrices, limit, share[expert].unsqueeze(1))
        outs = []
        for u, ys in zip(us, found, strict=True):
            out = torch.zeros(u.shape, dtype=torch.float32)
            for expert in sorted(ys):  # whatever arrives first
                out += ys[expert].float()
            outs.append(self._with_shared(u, out))
        return outs

    def _with_shared(self, u: Tensor, out: Tensor) -> Tensor:
        """Add the shared expert to the sums of the routed ones, out [T, d] fp32.  Returns [T, d] bf16."""
        gate, up, down = self.shared
        out += ops.swiglu_expert(u, gate, up, down, self.spec.swiglu_limit).float()
        return out.to(torch.bfloat16)

    def _on_gpu(self, u: Tensor, experts: BatchedSource, open_expert: OpenExpert) -> Tensor:
        """Run the experts of a prompt in batches, each on the tokens that chose it."""
        from kernels.deepseek_prompt import rounded, swiglu_expert

        ids, weights = self.route(u)
        x, limit = rounded(u), self.spec.swiglu_limit
        # for each expert, by ascending id, its tokens: one trip to the host
        order = ids.flatten().argsort(stable=True)
        tokens, weights = order // ids.shape[1], weights.flatten()[order]
        touched, counts = (part.tolist() for part in ids.unique(return_counts=True))
        pairs = zip(tokens.split(counts), weights.split(counts), strict=True)
        out = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
        for wave in experts.batches(self.layer, touched):
            for expert, record in wave:
                at, share = next(pairs)
                matrices = cast(
                    "tuple[ops.Packed, ...]", open_expert(ExpertKey(self.layer, expert), record)
                )
                gate, up, down = matrices
                y = swiglu_expert(x[at], gate, up, down, limit, share)
                out.index_add_(0, at, y.float())
        gate, up, down = self.shared
        for part, total in zip(x.split(CHUNK_TOKENS), out.split(CHUNK_TOKENS), strict=True):
            total += swiglu_expert(part, gate, up, down, limit).float()
        return out.to(torch.bfloat16)

    def route(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, k], best first, and their weights [T, k] fp32."""
        logits = ops.steady_linear(u, self.router)
        return ops.route(logits, self.bias, self.spec.top_k, self.spec.route_scale)

    def _outputs(
        self,
        u: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertSource,
        open_expert: OpenExpert,
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return a prompt's (expert, outputs [n, d], their tokens [n]) by ascending expert, whatever arrives first."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for expert, record in experts.sweep(self.layer, sorted(set(ids.flatten().tolist()))):
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            matrices = open_expert(ExpertKey(self.layer, expert), record)
            limit, weight = self.spec.swiglu_limit, weights[tokens, place].unsqueeze(1)
            found[expert] = (ops.swiglu_expert(u[tokens], *matrices, limit, weight), tokens)
        return [(expert, *found[expert]) for expert in sorted(found)]

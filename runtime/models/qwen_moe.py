"""The sparse layer of Qwen3.8-Flash-Next: router, routed and shared experts, guesses of the next layer's experts.

Owns which experts a token takes and how their outputs become one; letters are those of `qwen_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from runtime.experts.routes import Guesses
from runtime.experts.slots import BatchedSource
from runtime.experts.source import ExpertSource, fetch_union
from runtime.models.qwen_weights import QwenSpec

if TYPE_CHECKING:
    from runtime.models.qwen_model import Mixer

MAX_PAIRS = 4096  # (token, expert) pairs of a prompt that are computed in one launch


def _cut_pairs(counts: Sequence[int], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Cut experts with these numbers of pairs into launches of at most `limit` pairs: [(which expert, how many)]."""
    launch: list[tuple[int, int]] = []
    room = limit
    for number, count in enumerate(counts):
        left = count
        while left:
            taken = min(left, room)
            launch.append((number, taken))
            left, room = left - taken, room - taken
            if not room:
                yield launch
                launch, room = [], limit
    if launch:
        yield launch


class Moe:
    """Router, routed experts and shared expert of one layer."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, spec: QwenSpec, scales: Tensor
    ) -> None:
        """scales: [E, 3] fp32, the global scales (gate, up, down) of this layer's experts."""
        name = f"layers.{layer}.mlp"
        self.spec, self.layer, self.scales = spec, layer, scales
        self.router = weights[f"{name}.gate.weight"]
        self.shared = tuple(
            weights[f"{name}.shared_expert.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        self.shared_gate = weights[f"{name}.shared_expert_gate.weight"]
        self.next_router: Tensor | None = None
        self.next_ratio: Tensor | None = None

    def expect(self, after: Moe, mixer: Mixer, next_mixer: Mixer) -> None:
        """Guess the next layer's experts from this layer's input.

        The two inputs are read from nearly the same residual by norms of different gains, so the input is
        rescaled by the ratio of the gains (mean over the streams) before the next router sees it.
        """
        self.next_router = after.router
        self.next_ratio = (next_mixer.gain.mean(0) / mixer.gain.mean(0)).to(self.router.dtype)

    def __call__(self, x: Tensor, experts: ExpertSource, num_guesses: int) -> Tensor:
        """x: [T, H].  Returns [T, H]."""
        if x.shape[0] == 1:
            return self.rows([x], experts, num_guesses)[0]
        routed = self._prefill(x, *self.route(x), experts)
        return routed.add_(self.share(x)).to(x.dtype)

    def rows(self, xs: Sequence[Tensor], experts: ExpertSource, num_guesses: int) -> list[Tensor]:
        """As `__call__` for each of several tokens [1, H] alone, to the bit; each expert is fetched once for all."""
        # the sum runs by ascending expert id, as in a prompt, whatever arrives first
        chosen = [self.route(x) for x in xs]
        routes = [ids[0].tolist() for ids, _ in chosen]  # the host waits here
        orders = [ids[0].argsort() for ids, _ in chosen]
        places = [{expert: row for row, expert in enumerate(sorted(route))} for route in routes]
        parts = [
            torch.empty(len(r), x.shape[1], dtype=torch.float32, device=x.device)
            for r, x in zip(routes, xs, strict=True)
        ]
        for expert, record in fetch_union(
            experts, self.layer, routes, self._guesses(xs, num_guesses)
        ):
            gate_up, down = self.matrices(expert, record.to(xs[0].device))
            for x, place, part in zip(xs, places, parts, strict=True):
                if expert in place:
                    part[place[expert]] = ops.scaled_swiglu_expert(
                        x, gate_up, down, self.scales[expert]
                    )[0]
        sums = [
            weights[0][order].unsqueeze(0) @ part
            for (_, weights), order, part in zip(chosen, orders, parts, strict=True)
        ]
        return [total.add_(self.share(x)).to(x.dtype) for total, x in zip(sums, xs, strict=True)]

    def matrices(self, expert: int, record: Tensor) -> tuple[Tensor, Tensor]:
        """Return an expert's gate and up [2 I, H] and down [H, I] in fp32, without their global scales."""
        del expert  # all records are alike
        return ops.nvfp4_expert_matrices(record, self.spec.hidden, self.spec.intermediate)

    def _guesses(self, xs: Sequence[Tensor], count: int) -> list[int]:
        """Return likely experts of the next layer: of one token best first, of several each one's best first."""
        ranked = [
            found for found in (self._rank(x, count) for x in xs if count) if found is not None
        ]
        if len(ranked) == 1:
            return Guesses(ranked[0][1].tolist(), ranked[0][0])
        by_rank = zip(*(ids.tolist() for _, ids in ranked), strict=True)
        return list(dict.fromkeys(expert for same_rank in by_rank for expert in same_rank))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, k] int64, best first, and their weights [T, k] fp32, which sum to one."""
        probabilities = F.linear(x, self.router).float().softmax(-1)
        top = probabilities.topk(self.spec.top_k, dim=-1)
        return top.indices, (top.values / top.values.sum(-1, keepdim=True)).to(x.dtype).float()

    def share(self, x: Tensor) -> Tensor:
        """Return the gated shared expert's output: [T, H]."""
        return torch.sigmoid(F.linear(x, self.shared_gate)) * ops.swiglu(x, *self.shared)

    def guess(self, x: Tensor, count: int) -> Tensor | None:
        """x: [1, H].  Returns likely experts of the next layer [count] int64, best first; None behind the last."""
        ranked = self._rank(x, count)
        return None if ranked is None else ranked[1]

    def _rank(self, x: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the next router's best logits for this input, and the experts [count] that they are of."""
        if self.next_router is None or self.next_ratio is None:
            return None
        top = F.linear(x * self.next_ratio, self.next_router)[0].topk(count)
        return top.values, top.indices

    def _prefill(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertSource) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        # (token, choice) pairs grouped by expert; each touched expert is read once
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        touched, counts = ids.flatten()[order].unique_consecutive(return_counts=True)
        split = dict(zip(touched.tolist(), counts.tolist(), strict=True))
        if isinstance(experts, BatchedSource):
            self._prefill_slots(out, x, order, weights, split, experts)
            return out
        pair_weights = weights.flatten()[order].unsqueeze(1)
        sizes = list(split.values())
        pairs = zip(tokens.split(sizes), pair_weights.split(sizes), strict=True)
        groups = dict(zip(split, pairs, strict=True))
        for expert, record in experts.sweep(self.layer, list(groups)):
            chosen, chosen_weights = groups[expert]
            out.index_add_(0, chosen, self._expert(x[chosen], expert, record) * chosen_weights)
        return out

    def _prefill_slots(
        self,
        out: Tensor,
        x: Tensor,
        order: Tensor,
        weights: Tensor,
        split: Mapping[int, int],
        experts: BatchedSource,
    ) -> None:
        """Add the routed experts' outputs to out [T, H] on a GPU, several experts a launch.

        order: [T * k], the pairs by expert.  split: expert -> number of its pairs, ascending.
        """
        from kernels.nvfp4_grouped import add_pairs, grouped_experts

        top_k = weights.shape[1]
        pair_tokens = (order // top_k).int()
        # a token's places in the list of pairs, and its weights in the same order
        where = torch.empty_like(order)
        where[order] = torch.arange(len(order), device=order.device)
        where, by_place = where.view(-1, top_k).sort(dim=1)
        where, by_weight = where.int(), weights.gather(1, by_place)
        limit = min(MAX_PAIRS, len(order))
        inner = out.new_empty(limit, self.spec.intermediate)
        y = out.new_empty(limit, self.spec.hidden)
        first = 0
        for wave in experts.batches(self.layer, list(split)):
            for part in _cut_pairs([split[expert] for expert, _ in wave], limit):
                numbers, counts = zip(*part, strict=True)
                chosen = [wave[number] for number in numbers]
                count = sum(counts)
                starts = torch.tensor([0, *counts]).cumsum(0).int().to(x.device)
                table = torch.tensor([record.data_ptr() for _, record in chosen], device=x.device)
                scales = self.scales[torch.tensor([e for e, _ in chosen], device=x.device)]
                tokens = pair_tokens[first : first + count]
                grouped_experts(
                    x, tokens, starts, table, scales, inner[:count], y[:count], max(counts)
                )
                add_pairs(out, y[:count], where, by_weight, first)
                first += count

    def _expert(self, x: Tensor, expert: int, record: Tensor) -> Tensor:
        return ops.nvfp4_swiglu_expert(
            x, record.to(x.device), self.scales[expert], self.spec.intermediate
        )

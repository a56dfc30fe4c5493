"""The memory plans of RAM and VRAM, made before anything is loaded. Pure arithmetic: sizes in, sizes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runtime.errors import UserError
from runtime.units import GIB, format_nbytes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model needs, in bytes and counts."""

    residents_nbytes: int  # without the embedding table
    state_nbytes: int  # one conversation at the full window
    record_nbytes: int
    num_layers: int
    num_experts: int
    top_k: int
    embedding_nbytes: int = 0  # always in RAM, with what else the GPU reads there
    host_read_nbytes: int = 0  # of it, what every token reads over the link
    # staging rows that a prompt can use; None: as many as are asked for
    staged_experts: int | None = None
    # VRAM slots for copies on their way; None: as the route and early copies need
    passing_slots: int | None = None
    smaller: str = "model.deltanet=fp8_rows"  # what to set for a smaller model
    # what computing holds beside these is the largest of several lines: (bytes, bytes for each token of a prompt piece)
    scratch: tuple[tuple[int, int], ...] = ((0, 0),)

    def staging_rows(self, wanted: int) -> int:
        """Return the staging rows of a prompt, of those that are asked for."""
        limits = [wanted, self.num_experts]
        return min(limits if self.staged_experts is None else [*limits, self.staged_experts])

    def scratch_nbytes(self, prompt_tokens: int) -> int:
        """Return what a prompt piece of this many tokens holds beside weights and state."""
        return max(fixed + each * prompt_tokens for fixed, each in self.scratch)

    def fitting_tokens(self, room_nbytes: int, wanted: int) -> int:
        """Return the longest prompt piece, at most `wanted`, whose scratch has room."""
        fits = [(room_nbytes - fixed) // each for fixed, each in self.scratch if each]
        return min([wanted, *fits])

    def for_conversations(self, count: int) -> ModelSizes:
        """Return what `count` conversations need that are decoded together: their states, a route for each."""
        route = min(count * self.top_k, self.num_experts)
        return replace(self, state_nbytes=count * self.state_nbytes, top_k=route)

    def for_rows(self, count: int) -> ModelSizes:
        """Return what passes of `count` tokens of one conversation need, whose experts are asked for at once."""
        return replace(self, top_k=min(count * self.top_k, self.num_experts))

    @property
    def token_experts(self) -> int:
        """Experts that a decoding step uses at most, over all layers."""
        return self.num_layers * self.top_k


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets which RAM."""

    limit_nbytes: int
    residents_nbytes: int
    state_nbytes: int
    record_nbytes: int
    cache_rows: int
    sweep_rows: int
    warnings: tuple[str, ...]

    @property
    def cache_nbytes(self) -> int:
        return self.cache_rows * self.record_nbytes

    @property
    def total_nbytes(self) -> int:
        return (
            self.residents_nbytes
            + self.state_nbytes
            + (self.cache_rows + self.sweep_rows) * self.record_nbytes
        )

    def rows(self) -> list[tuple[str, int, str]]:
        """Return the plan as rows of a table: what, bytes, remark; the total first."""
        return [
            ("RAM", self.total_nbytes, f"of {format_nbytes(self.limit_nbytes)} that may be used"),
            ("  residents", self.residents_nbytes, ""),
            ("  state", self.state_nbytes, ""),
            ("  expert cache", self.cache_nbytes, f"{self.cache_rows} experts"),
            (
                "  prompt staging",
                self.sweep_rows * self.record_nbytes,
                f"{self.sweep_rows} experts",
            ),
        ]


@dataclass(frozen=True, slots=True)
class VramPlan:
    """Who gets which GPU memory."""

    limit_nbytes: int  # for tensors: the card, or the part of it that may be used, less the reserve
    residents_nbytes: int
    state_nbytes: int
    scratch_nbytes: int
    prompt_tokens: int  # the largest prompt piece that the scratch holds
    record_nbytes: int
    passing_slots: int
    kept_slots: int

    @property
    def slots(self) -> int:
        return self.passing_slots + self.kept_slots

    @property
    def total_nbytes(self) -> int:
        fixed = self.residents_nbytes + self.state_nbytes + self.scratch_nbytes
        return fixed + self.slots * self.record_nbytes

    def rows(self) -> list[tuple[str, int, str]]:
        """Return the plan as rows of a table: what, bytes, remark; the total first."""
        kept, passing = (n * self.record_nbytes for n in (self.kept_slots, self.passing_slots))
        return [
            ("VRAM", self.total_nbytes, f"of {format_nbytes(self.limit_nbytes)} that may be used"),
            ("  residents", self.residents_nbytes, ""),
            ("  state", self.state_nbytes, ""),
            ("  scratch", self.scratch_nbytes, f"prompt pieces of {self.prompt_tokens} tokens"),
            ("  expert slots, kept", kept, f"{self.kept_slots} experts"),
            ("  expert slots, passing", passing, f"{self.passing_slots} experts"),
        ]


def format_plans(*plans: MemoryPlan | VramPlan | None) -> str:
    """Return plans as one table for a terminal."""
    rows = [row for plan in plans if plan is not None for row in plan.rows()]
    return "\n".join(
        f"{what:24} {format_nbytes(nbytes):>10}  {remark}".rstrip() for what, nbytes, remark in rows
    )


MIN_PROMPT_TOKENS = 128  # a card that cannot hold the scratch of such a piece is too small


def plan_vram(
    sizes: ModelSizes,
    limit_nbytes: int,
    prompt_tokens: int,
    passing_slots: int,
    kept_gib: float | None,
) -> VramPlan:
    """Share the GPU's memory out: residents, state and passing slots, then prompt pieces as asked for or as long as
    fits, and the rest to the slots that keep experts (or `kept_gib` of it). Refuses with numbers.
    """
    must = sizes.residents_nbytes + sizes.state_nbytes + passing_slots * sizes.record_nbytes
    least = min(MIN_PROMPT_TOKENS, prompt_tokens)
    need = must + sizes.scratch_nbytes(least)
    if need > limit_nbytes:
        raise UserError(
            f"this model needs {format_nbytes(need)} of GPU memory at least (residents "
            f"{format_nbytes(sizes.residents_nbytes)}, state {format_nbytes(sizes.state_nbytes)}, the rest scratch and "
            f"copies), the plan may use {format_nbytes(max(0, limit_nbytes))}",
            "raise hw.vram_gib, lower hw.vram_reserve_gib, model.context_tokens or prefetch.copy, or set "
            f"{sizes.smaller}",
        )
    prompt_tokens = sizes.fitting_tokens(limit_nbytes - must, prompt_tokens)
    scratch = sizes.scratch_nbytes(prompt_tokens)
    kept = (limit_nbytes - must - scratch) // sizes.record_nbytes
    if kept_gib is not None:
        wanted = int(kept_gib * GIB) // sizes.record_nbytes
        if wanted > kept:
            raise UserError(
                f"cache.vram_gib={kept_gib:g} asks for {format_nbytes(wanted * sizes.record_nbytes)} of expert slots, "
                f"{format_nbytes(kept * sizes.record_nbytes)} of GPU memory are left for them",
                f"set cache.vram_gib={int(kept * sizes.record_nbytes / GIB * 100) / 100:g} or less, or leave it out",
            )
        kept = wanted
    return VramPlan(
        limit_nbytes,
        sizes.residents_nbytes,
        sizes.state_nbytes,
        scratch,
        prompt_tokens,
        sizes.record_nbytes,
        passing_slots,
        min(kept, sizes.num_layers * sizes.num_experts),
    )


def vram_limit(
    wanted_gib: float | None, total_nbytes: int, free_nbytes: int, reserve_gib: float
) -> int:
    """Return the GPU memory that tensors may use in all: hw.vram_gib, or what is free, less the reserve."""
    if wanted_gib is None:
        return max(0, free_nbytes - int(reserve_gib * GIB))
    if wanted_gib * GIB > total_nbytes:
        raise UserError(
            f"hw.vram_gib is {wanted_gib:g} GiB, but this GPU has {total_nbytes / GIB:.2f} GiB",
            f"set hw.vram_gib={math.floor(total_nbytes / GIB * 100) / 100:g} or less, or leave it out",
        )
    return max(0, int((wanted_gib - reserve_gib) * GIB))


def ram_limit(
    wanted_gib: float | None, total: tuple[int, str], available: tuple[int, str], reserve_gib: float
) -> int:
    """Return the RAM that a run may use in all: hw.ram_gib, or what is available, less the reserve.

    total, available: (bytes, where the number comes from).
    """
    if wanted_gib is None:
        return max(0, available[0] - int(reserve_gib * GIB))
    if wanted_gib * GIB > total[0]:
        raise UserError(
            f"hw.ram_gib is {wanted_gib:g} GiB, but this machine has {total[0] / GIB:.1f} GiB ({total[1]})",
            f"set hw.ram_gib={math.floor(total[0] / GIB * 100) / 100:g} or less, or leave it out",
        )
    return max(0, int((wanted_gib - reserve_gib) * GIB))


def describe_ram_limit(
    wanted_gib: float | None, available: tuple[int, str], reserve_gib: float
) -> str:
    """Return where `ram_limit` has its number from."""
    source = f"{format_nbytes(available[0])}, {available[1]}"
    if wanted_gib is not None:
        source = f"hw.ram_gib={wanted_gib:g}"
    return f"{source}, less hw.reserve_gib={reserve_gib:g}"


def plan_memory(
    sizes: ModelSizes,
    limit_nbytes: int,
    cache_gib: float | None,
    sweep_experts: int,
    has_gpu: bool = False,
    guess_rows: int = 0,
) -> MemoryPlan:
    """Give the expert cache what was asked for, or all that is left; refuse with numbers when it cannot fit.

    The cache has at least one layer's route (top-k) and at most every expert. With a GPU the residents (all but the
    embedding table) and the state are not in RAM.

    guess_rows: beside a route, for guesses that are read ahead, where there is room: a cache that the route fills has
    no row for a guess, and the drive idles while a layer computes.
    """
    all_experts = sizes.num_layers * sizes.num_experts
    residents = sizes.embedding_nbytes + (0 if has_gpu else sizes.residents_nbytes)
    state = 0 if has_gpu else sizes.state_nbytes
    fixed = residents + state
    need = fixed + (sizes.top_k + 1) * sizes.record_nbytes
    if need > limit_nbytes:
        raise UserError(
            f"this model needs {format_nbytes(need)} of RAM at least, the plan may use "
            f"{format_nbytes(max(0, limit_nbytes))}",
            "free memory, raise hw.ram_gib, lower hw.reserve_gib or model.context_tokens",
        )
    if cache_gib is None:
        sweep_rows = sizes.staging_rows(sweep_experts)
        rows = min(all_experts, (limit_nbytes - fixed) // sizes.record_nbytes - sweep_rows)
        # little room: the prompt's staging gives way first
        if rows < sizes.top_k and sweep_rows > 1:
            sweep_rows = 1
            rows = min(all_experts, (limit_nbytes - fixed) // sizes.record_nbytes - sweep_rows)
    else:
        sweep_rows = sizes.staging_rows(sweep_experts)
        rows = min(all_experts, max(sizes.top_k, int(cache_gib * GIB) // sizes.record_nbytes))
        room_rows = (limit_nbytes - fixed) // sizes.record_nbytes - rows
        spare = min(sizes.top_k + guess_rows, all_experts) - rows
        if 0 < spare < room_rows:
            rows, room_rows = rows + spare, room_rows - spare
        # little room: the prompt's staging gives way first
        sweep_rows = max(1, min(sweep_rows, room_rows))
    plan = MemoryPlan(
        limit_nbytes,
        residents,
        state,
        sizes.record_nbytes,
        rows,
        sweep_rows,
        _warnings(sizes, rows, cache_gib),
    )
    if plan.total_nbytes > limit_nbytes:
        room = max(0, limit_nbytes - fixed - sizes.record_nbytes)
        raise UserError(
            f"cache.ram_gib={cache_gib:g} makes a plan of {format_nbytes(plan.total_nbytes)}, but "
            f"{format_nbytes(limit_nbytes)} of RAM may be used",
            f"set cache.ram_gib={int(room / GIB * 100) / 100:g} or less, or raise hw.ram_gib",
        )
    return plan


def _warnings(sizes: ModelSizes, rows: int, cache_gib: float | None) -> tuple[str, ...]:
    need = sizes.token_experts
    if rows >= need or cache_gib == 0:
        return ()
    gib = math.ceil(need * sizes.record_nbytes / GIB * 1e4) / 1e4
    advice = f"cache.ram_gib={gib:.4f} would hold a step's experts"
    if cache_gib is None:
        advice = f"a step's experts need {gib:.4f} GiB: raise hw.ram_gib, or lower hw.reserve_gib"
    return (
        f"the expert cache holds {rows} experts, a decoding step uses up to {need}: an LRU would find nothing again, "
        f"cache.policy=auto keeps those used most; {advice}",
    )

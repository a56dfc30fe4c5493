"""What a model will do on a machine, by the laws: floors, tokens a second, first token, and what would help.

Sizes, memory plan and rates in; lines with formula and inputs out. No torch, no file, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime import laws
from runtime.budget import ModelSizes
from runtime.laws import Law, law
from runtime.stats import Rates
from runtime.units import GIB, format_duration, format_nbytes

PROMPT_TOKENS = 512  # of the prompt that the time to the first token is for


@dataclass(frozen=True, slots=True)
class Line:
    """One number: what it is, its value in the law's unit, and what it was made from."""

    what: str
    value: float
    law: Law
    inputs: dict[str, float]

    @property
    def text(self) -> str:
        """The value for people."""
        unit = self.law.unit
        if unit in ("B", "B/tok"):
            return format_nbytes(self.value) + ("" if unit == "B" else " a token")
        if unit == "s/tok":
            return f"{self.value * 1e3:.1f} ms"
        if unit == "s":
            return format_duration(self.value)
        return f"{self.value:.2f} tok/s" if unit == "tok/s" else f"{self.value:.1%}"

    def explained(self) -> str:
        """The formula and its inputs, in the law's units."""
        inputs = ", ".join(
            f"{name} = {value:.6g}{'' if (u := self.law.inputs[name]) == '1' else ' ' + u}"
            for name, value in self.inputs.items()
        )
        return f"{self.law.id}: {self.law.text}; {inputs}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a prediction needs of a machine."""

    rates: Rates  # drive and memory, and the link of a GPU
    has_gpu: bool
    cache_nbytes: int  # of experts in RAM


def line(what: str, name: str, **inputs: float) -> Line:
    """Evaluate a law, given by its id."""
    found = law(name)
    return Line(what, found(**inputs), found, inputs)


def token_lines(sizes: ModelSizes, machine: Machine) -> list[Line]:
    """Return bytes, hit rate, floors and the time of a decoded token; the last line is its tokens a second' inverse."""
    rates = machine.rates
    disk, memory, pcie = (n * GIB for n in (rates.drive_gib_s, rates.memory_gib_s, rates.pcie_gib_s))  # fmt: skip
    routed_set = line(
        "all routed experts", "L03",
        moe_layers=sizes.num_layers, experts=sizes.num_experts, expert_bytes=sizes.record_nbytes,
    )  # fmt: skip
    routed = line(
        "routed experts of a token", "L04",
        moe_layers=sizes.num_layers, top_k=sizes.top_k, expert_bytes=sizes.record_nbytes,
    )  # fmt: skip
    hits = line(
        "found in RAM", "L13",
        cache_bytes=usable_cache(sizes, machine.cache_nbytes), routed_set_bytes=routed_set.value, a=laws.HIT_EXPONENT,
    )  # fmt: skip
    found = [routed_set, routed, hits]
    if hits.value < 1:
        found.append(
            line("ceiling of the drive", "L12", disk_bw=disk, h=hits.value, routed_bytes_per_token=routed.value)
        )  # fmt: skip
    # on a CPU experts and residents come over the bus of RAM, and the arithmetic comes on top: a lower bound
    link = pcie if machine.has_gpu else memory
    host_read = sizes.host_read_nbytes if machine.has_gpu else 0
    if machine.has_gpu:
        found += [
            line("ceiling of the link", "L11", pcie_bw=pcie, routed_bytes_per_token=routed.value,
                 host_read_bytes=host_read),
            line("ceiling of the GPU's memory", "L09", vram_bw=memory, active_resident_bytes=sizes.residents_nbytes,
                 routed_bytes_per_token=routed.value),
        ]  # fmt: skip
    residents = line(
        "residents of a token", "L14F",
        host_read_bytes=host_read, pcie_bw=link, active_resident_bytes=sizes.residents_nbytes, mem_bw=memory,
    )  # fmt: skip
    token = line(
        "a token" if machine.has_gpu else "a token, arithmetic not counted", "L14",
        B=routed.value, h=hits.value, disk_bw=disk, pcie_bw=link, layers=sizes.num_layers,
        t_layer=laws.LAYER_S if machine.has_gpu else 0, t_fixed=residents.value, s=laws.OVERLAP,
    )  # fmt: skip
    return [*found, residents, token]


def usable_cache(sizes: ModelSizes, cache_nbytes: int) -> int:
    """Return the cache that counts: what one smaller than a token's experts finds, no law says (an LRU: nothing)."""
    one_token = sizes.token_experts * sizes.record_nbytes
    return cache_nbytes if cache_nbytes >= one_token else 0


def tok_s(sizes: ModelSizes, machine: Machine) -> float:
    """Return the expected tokens a second."""
    return 1 / token_lines(sizes, machine)[-1].value


def prompt_line(sizes: ModelSizes, machine: Machine) -> Line:
    """Return the time to the first token of a prompt of `PROMPT_TOKENS`."""
    routed_set = law("L03")(
        moe_layers=sizes.num_layers, experts=sizes.num_experts, expert_bytes=sizes.record_nbytes
    )
    share = min(1.0, machine.cache_nbytes / routed_set)  # a sweep finds what happens to be there
    return line(
        f"first token after {PROMPT_TOKENS}", "L15", routed_set_bytes=routed_set, top_k=sizes.top_k,
        experts=sizes.num_experts, n=PROMPT_TOKENS, beta=laws.REPEAT_EXPONENT, h0=share,
        disk_bw=machine.rates.drive_gib_s * GIB, r=laws.PROMPT_TOK_S,
    )  # fmt: skip


def improvements(sizes: ModelSizes, machine: Machine) -> list[tuple[str, float]]:
    """Return what could be bought and the tokens a second with it, best first."""

    def faster(**factors: float) -> Machine:
        rates = {name: factor * getattr(machine.rates, name) for name, factor in factors.items()}
        return replace(machine, rates=replace(machine.rates, **rates))

    def larger(gib: int) -> Machine:
        return replace(machine, cache_nbytes=machine.cache_nbytes + gib * GIB)

    more = [(f"{gib} GiB more RAM for the cache", larger(gib)) for gib in (16, 32)]
    more.append(("a second drive as fast as this one", faster(drive_gib_s=2)))
    if machine.has_gpu:
        more.append(("a link twice as fast", faster(pcie_gib_s=2)))
    else:
        more.append(("memory twice as fast", faster(memory_gib_s=2)))
    found = [(what, tok_s(sizes, changed)) for what, changed in more]
    return sorted(found, key=lambda entry: -entry[1])


def format_lines(lines: Sequence[Line]) -> str:
    """Return one line a number, with its formula below it."""
    return "\n".join(f"{x.what:34} {x.text:>16}\n    {x.explained()}" for x in lines)

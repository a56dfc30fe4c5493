"""The laws of speed and size: formulas as text, evaluated in this one place with units that must fit. Pure arithmetic.

`plan` and `doctor` predict with them; nothing else may hold a second copy of a formula. A formula is one expression of
numbers, names, `+ - * / **`, comparisons and a few functions, parsed and checked, never executed as Python.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_NODES = 200
MAX_EXPONENT = 16

Dimensions = tuple[tuple[str, int], ...]  # sorted (unit, power), powers never 0


class LawError(ValueError):
    """A formula, a unit or an input that cannot be used."""


class Quantity(NamedTuple):
    """A number with its unit, as sorted powers of base units."""

    value: float
    unit: Dimensions


def parse_unit(text: str) -> Dimensions:
    """Return the powers of a unit such as `B`, `B/s`, `tok/s`; `1` has none."""
    powers: dict[str, int] = {}
    top, _, bottom = text.partition("/")
    for part, sign in ((top, 1), (bottom, -1)):
        for name in filter(None, part.split("*")):
            if name != "1":
                powers[name] = powers.get(name, 0) + sign
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def format_unit(unit: Dimensions) -> str:
    """Return a unit as text."""
    top = "*".join(name for name, power in unit for _ in range(power))
    bottom = "*".join(name for name, power in unit for _ in range(-power))
    return (top or "1") + (f"/{bottom}" if bottom else "")


@dataclass(frozen=True, slots=True)
class Law:
    """One formula. `inputs` has the unit of each name in it; `limits` says where it holds."""

    id: str
    name: str
    formula: str
    inputs: Mapping[str, str]
    unit: str
    limits: str

    def __call__(self, **values: float) -> float:
        """Return the result in `unit`. Raises LawError for inputs that are missing, unknown, negative or no number."""
        if values.keys() != self.inputs.keys():
            odd = sorted(values.keys() ^ self.inputs.keys())
            raise LawError(
                f"{self.id} wants {', '.join(self.inputs)}; {', '.join(odd)} does not fit"
            )
        for name, value in values.items():
            if not math.isfinite(value) or value < 0:
                raise LawError(f"{self.id}: {name} is {value}, it must be a number of at least 0")
        quantities = {
            name: Quantity(float(v), parse_unit(self.inputs[name])) for name, v in values.items()
        }
        result = evaluate(self.formula, quantities)
        if result.unit != parse_unit(self.unit):
            raise LawError(f"{self.id} gives {format_unit(result.unit)}, not {self.unit}")
        return result.value


# ---- the evaluator ---------------------------------------------------------------------------------------------------


def evaluate(formula: str, values: Mapping[str, Quantity]) -> Quantity:
    """Return what a formula gives for these values. Raises LawError, also when units do not fit."""
    try:
        tree = ast.parse(formula, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LawError(f"not a formula: {formula!r}") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise LawError(f"a formula of more than {MAX_NODES} parts")
    try:
        return _value(tree.body, values)
    except (ZeroDivisionError, OverflowError) as error:
        raise LawError(f"{formula}: {error}") from error


_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
}  # fmt: skip


def _value(node: ast.expr, values: Mapping[str, Quantity]) -> Quantity:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Quantity(float(number), ())
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _value(operand, values)
            return Quantity(-inner.value, inner.unit)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            a, b = _value(left, values), _value(right, values)
            _same("compare", a, b)
            return Quantity(float(_COMPARE[type(op)](a.value, b.value)), ())
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _call(name, [_value(arg, values) for arg in args])
    raise LawError(f"not allowed in a formula: {ast.unparse(node)}")


def _binary(op: ast.operator, a: Quantity, b: Quantity) -> Quantity:
    match op:
        case ast.Add() | ast.Sub():
            _same("add", a, b)
            return Quantity(a.value + (b.value if isinstance(op, ast.Add) else -b.value), a.unit)
        case ast.Mult():
            return Quantity(a.value * b.value, _joined(a.unit, b.unit, 1))
        case ast.Div():
            return Quantity(a.value / b.value, _joined(a.unit, b.unit, -1))
        case ast.Pow() if not a.unit and not b.unit:
            # the limit is for exponents that a formula writes; n**0.7 with a large n is no danger
            if abs(b.value) > MAX_EXPONENT and a.value > 1:
                raise LawError(f"an exponent of {b.value:g} is too large")
            result = a.value**b.value
            if isinstance(result, complex):
                raise LawError(f"{a.value:g} ** {b.value:g} is no real number")
            return Quantity(result, ())
    raise LawError("an operator that is not allowed, or a power of something with a unit")


def _call(name: str, args: list[Quantity]) -> Quantity:
    if name in ("min", "max") and args:
        for other in args[1:]:
            _same(name, args[0], other)
        return (min if name == "min" else max)(args, key=lambda q: q.value)
    if name == "where" and len(args) == 3:
        _same(name, args[1], args[2])
        return args[1] if args[0].value else args[2]
    plain = {"ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt, "log": math.log, "exp": math.exp}  # fmt: skip
    if name in plain and len(args) == 1 and not args[0].unit:
        try:
            return Quantity(float(plain[name](args[0].value)), ())
        except ValueError as error:
            raise LawError(f"{name}({args[0].value:g}): {error}") from error
    raise LawError(f"no function {name} of {len(args)} such values")


def _same(what: str, a: Quantity, b: Quantity) -> None:
    if a.unit != b.unit:
        raise LawError(f"cannot {what} {format_unit(a.unit)} and {format_unit(b.unit)}")


def _joined(a: Dimensions, b: Dimensions, sign: int) -> Dimensions:
    powers = dict(a)
    for name, power in b:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


# ---- the laws --------------------------------------------------------------------------------------------------------

ROUTED_SET = Law(
    "L03", "all routed experts", "layers * experts * expert_bytes",
    {"layers": "1", "experts": "1", "expert_bytes": "B"}, "B",
    "shared experts are residents",
)  # fmt: skip
ROUTED_PER_TOKEN = Law(
    "L04", "routed bytes of a token", "layers * top_k * expert_bytes / one_token",
    {"layers": "1", "top_k": "1", "expert_bytes": "B", "one_token": "tok"}, "B/tok",
    "one sequence, no drafts",
)  # fmt: skip
CEIL_PCIE = Law(
    "L11", "ceiling of the link", "pcie_bw / ((1 - h_vram) * routed + host_read)",
    {"pcie_bw": "B/s", "h_vram": "1", "routed": "B/tok", "host_read": "B/tok"}, "tok/s",
    "a measured rate, not the link's nominal one; host_read: what else is read in place in RAM, such as a head",
)  # fmt: skip
CEIL_DISK = Law(
    "L12", "ceiling of the drive", "disk_bw / ((1 - h) * routed)",
    {"disk_bw": "B/s", "h": "1", "routed": "B/tok"}, "tok/s",
    "guesses read in gaps cost nothing and are not counted",
)  # fmt: skip
CEIL_MEMORY = Law(
    "L09", "ceiling of the memory where it is computed", "mem_bw / (dense + routed)",
    {"mem_bw": "B/s", "dense": "B/tok", "routed": "B/tok"}, "tok/s",
    "dense: residents that every token reads, without the embedding table",
)  # fmt: skip
HIT_RATE = Law(
    "L13", "share of experts found in RAM", "min(1, cache / routed_set) ** a",
    {"cache": "B", "routed_set": "B", "a": "1"}, "1",
    "steady state of an LRU; a = 1 is independent routing, 0.15 to 0.50 was seen",
)  # fmt: skip
TIME_BESIDE_DRIVE = Law(
    "L14R", "time of a token beside the drive",
    "(routed + host_read) / pcie_bw + dense / mem_bw + layers * t_layer",
    {"routed": "B/tok", "host_read": "B/tok", "pcie_bw": "B/s", "dense": "B/tok", "mem_bw": "B/s",
     "layers": "1", "t_layer": "s/tok"}, "s/tok",
    "a GPU; all routed bytes cross the link once",
)  # fmt: skip
TIME_ON_CPU = Law(
    "L10R", "time of a token beside the drive, on a CPU", "(routed + dense) / mem_bw",
    {"routed": "B/tok", "dense": "B/tok", "mem_bw": "B/s"}, "s/tok",
    "only the reading of memory: the arithmetic comes on top, so this is a lower bound",
)  # fmt: skip
TIME_ON_DRIVE = Law(
    "L14D", "time of a token on the drive", "(1 - h) * routed / disk_bw",
    {"h": "1", "routed": "B/tok", "disk_bw": "B/s"}, "s/tok", "reads of whole experts",
)  # fmt: skip
TOKEN_TIME = Law(
    "L14", "time of a token", "max(t_disk, r) + s * min(t_disk, r)",
    {"t_disk": "s/tok", "r": "s/tok", "s": "1"}, "s/tok", "s = 0 is full overlap, 1 is none",
)  # fmt: skip
PROMPT_TIME = Law(
    "L15", "time to the first token of one prompt piece",
    "routed_set * (1 - (1 - top_k / experts) ** (n ** beta)) * (1 - h) / disk_bw + n * one_token / rate",
    {"routed_set": "B", "top_k": "1", "experts": "1", "n": "1", "beta": "1", "h": "1", "disk_bw": "B/s",
     "one_token": "tok", "rate": "tok/s"}, "s",
    "within 30 %; every further piece reads its experts again",
)  # fmt: skip
DOWNLOAD_TIME = Law(
    "L20", "time to fetch", "file_bytes * bits_per_byte / (line * 0.9)",
    {"file_bytes": "B", "bits_per_byte": "bit/B", "line": "bit/s"}, "s",
    "nine tenths of a line carry files",
)  # fmt: skip
COPY_TIME = Law(
    "L19T", "time to write what set-up makes", "(read_bytes + write_bytes) / disk_bw",
    {"read_bytes": "B", "write_bytes": "B", "disk_bw": "B/s"}, "s",
    "a drive that writes as fast as it reads: a lower bound",
)  # fmt: skip

LAWS = {
    law.id: law
    for law in (
        ROUTED_SET, ROUTED_PER_TOKEN, CEIL_MEMORY, CEIL_PCIE, CEIL_DISK, HIT_RATE, TIME_BESIDE_DRIVE, TIME_ON_CPU,
        TIME_ON_DRIVE, TOKEN_TIME, PROMPT_TIME, DOWNLOAD_TIME, COPY_TIME,
    )
}  # fmt: skip

# what no data sheet says. Each is of the published runs of both models on one machine (RTX 5060 8 GB, PCIe 28.6 GB/s,
# drive 8.2 GiB/s); none is fitted to what it predicts there but where it says so.
HIT_EXPONENT = 0.32  # of L13: from DeepSeek's runs with 14 and 16 GB of cache; Qwen's follow from it within 1 %
OVERLAP = 0.55  # s of L14: the middle of what the two models' drive-only runs give, 0.40 and 0.70
# t_layer of L14R: Qwen with all experts in RAM takes 86 ms, of which 46 ms are the link's and 14 ms its dense bytes'
LAYER_S = 0.53e-3
REPEAT_EXPONENT = (
    0.70  # beta of L15: 24 tokens of a prompt touch 17 % of the experts, 2451 touch 99 %
)
PROMPT_TOK_S = 200.0  # rate of L15: 130 (Qwen) to 400 (DeepSeek) were seen

"""The laws of size, speed and money: formulas from conf/advisor/laws.yaml, evaluated in this one place.

`plan`, `doctor` and the advisor predict with them; nothing else may hold a second copy of a formula. A law is refused
when it is loaded if its units do not fit, if a worked example does not come out, or if a stated property fails.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import formulas
from runtime.formulas import Evaluate, FormulaError
from runtime.quantities import MONEY, Unit, UnitError, convert, parse_quantity, parse_unit
from runtime.yaml_files import read_yaml

LAWS_PATH = Path(__file__).resolve().parents[1] / "conf" / "advisor" / "laws.yaml"
EXAMPLE_TOLERANCE = 0.005
CASES_AT_LOAD = 12  # the tests take hundreds
_SLACK = 1e-9  # relative, of comparisons between floats


class LawError(ValueError):
    """A formula, a unit or an input that cannot be used."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A fixed number with a unit, written in capitals in formulas."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Variable:
    """One input: its unit, where the advisor takes it from, and the range that properties are tried over."""

    unit: str
    low: float
    high: float
    is_whole: bool = False
    source: str | None = None  # a field such as `model.params_total`, or None: given by the caller
    meaning: str = ""
    default: float | None = None  # of an input that may be left out


@dataclass(frozen=True, slots=True)
class Law:
    """One formula. Called with its variables in base units (B, s, tok, ...), it gives its result in `unit`."""

    id: str
    name: str
    formula: str
    let: Mapping[str, str]  # names for parts of the formula
    variables: Mapping[str, Variable]
    constants: Mapping[str, Constant]
    unit: str
    validity: str
    never_when: str | None  # a condition under which the result is infinite: "never"
    examples: Sequence[Mapping[str, Any]]
    properties: Sequence[str]
    document: Mapping[str, Any]
    _steps: Sequence[tuple[str, Evaluate]] = field(repr=False)
    _result: Evaluate = field(repr=False)
    _never: Evaluate | None = field(repr=False)

    def __call__(self, **values: float) -> float:
        """Return the result in `unit`. Raises LawError for inputs that are missing, unknown, negative or no number."""
        return self._evaluate(self._scope(self._checked(values)))

    @property
    def inputs(self) -> dict[str, str]:
        """The unit of each variable."""
        return {name: variable.unit for name, variable in self.variables.items()}

    @property
    def text(self) -> str:
        """The formula with its parts."""
        return "; ".join([self.formula, *(f"{name} = {part}" for name, part in self.let.items())])

    def _checked(self, given: Mapping[str, float]) -> dict[str, float]:
        defaults = {n: v.default for n, v in self.variables.items() if v.default is not None}
        values = {**defaults, **given}
        if values.keys() != self.variables.keys():
            odd = sorted(values.keys() ^ self.variables.keys())
            raise LawError(
                f"{self.id} wants {', '.join(self.variables)}; {', '.join(odd)} does not fit"
            )
        for name, value in values.items():
            if isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise LawError(f"{self.id}: {name} is {value}, it must be a number of at least 0")
        return values

    def compute(self, inputs: Mapping[str, tuple[float, str]]) -> tuple[float, str]:
        """Return (result, unit) for inputs with written units, such as (8.2, "GiB/s").

        Raises LawError naming the input whose unit does not fit; money of two currencies does not either.
        """
        values, currencies = {}, set()
        for name, (value, unit) in inputs.items():
            if name not in self.variables:
                raise LawError(
                    f"{self.id} has no input {name!r}; it wants {', '.join(self.variables)}"
                )
            try:
                wanted = parse_unit(self.variables[name].unit)[1]
                values[name] = convert(float(value), unit, wanted)
                currencies.add(parse_unit(unit)[1].currency)
            except UnitError as error:
                raise LawError(f"{self.id}: {name}: {error}") from error
        if len(currencies - {None}) > 1:
            both = " and ".join(sorted(c for c in currencies if c))
            raise LawError(f"{self.id}: {both} are not compared without a dated exchange rate")
        currency = next((c for c in currencies if c), None)
        return self(**values), self.unit.replace(MONEY, currency) if currency else self.unit

    def parts(self, **values: float) -> dict[str, float]:
        """Return the named parts of the formula for these values, in base units."""
        scope = self._scope(self._checked(values))
        return {name: scope[name] for name in self.let}

    def _scope(self, values: Mapping[str, float]) -> dict[str, float]:
        scope = {name: c.value for name, c in self.constants.items()} | dict(values)
        try:
            for name, step in self._steps:
                scope[name] = step(scope)
        except FormulaError as error:
            raise LawError(f"{self.id}: {error}") from error
        return scope

    def _evaluate(self, scope: Mapping[str, float]) -> float:
        try:
            if self._never is not None and self._never(scope):
                return math.inf
            return self._result(scope)
        except FormulaError as error:
            raise LawError(f"{self.id}: {error}") from error

    # ---- what a law promises -------------------------------------------------------------------------------------

    def check(self) -> Iterator[str]:
        """Yield what is wrong: examples that do not come out, properties that fail on a few fixed cases."""
        if not self.examples:
            yield f"{self.id} has no worked example"
        if len(self.properties) < 2:
            yield f"{self.id} has {len(self.properties)} properties, at least 2 are wanted"
        for number, example in enumerate(self.examples, 1):
            yield from self._check_example(number, example)
        for stated in self.properties:
            generator = random.Random(f"{self.id} {stated}")
            for _ in range(CASES_AT_LOAD):
                fault = self.property_fault(stated, self.draw(generator), generator.random())
                if fault:
                    yield f"{self.id}: {fault}"
                    break

    def _check_example(self, number: int, example: Mapping[str, Any]) -> Iterator[str]:
        wanted_unit = parse_unit(self.unit)[1]
        try:
            values = {
                name: quantity(given, parse_unit(self.variables[name].unit)[1])
                for name, given in example["inputs"].items()
            }
            got = self(**values)
            stated = example["result"]
            wanted = math.inf if stated == "never" else quantity(stated, wanted_unit)
        except (KeyError, LawError, UnitError) as error:
            yield f"{self.id}: example {number} cannot be computed: {error}"
            return
        tolerance = float(example.get("tolerance", EXAMPLE_TOLERANCE))
        if got != wanted and not abs(got - wanted) <= tolerance * abs(wanted):
            yield f"{self.id}: example {number} gives {got:.6g} {self.unit}, it states {wanted:.6g}"

    def draw(self, generator: random.Random) -> dict[str, float]:
        """Return one random input within the ranges, even on a logarithmic scale."""
        values = {}
        for name, variable in self.variables.items():
            low, high = variable.low, variable.high
            if low > 0:
                value = math.exp(generator.uniform(math.log(low), math.log(high)))
            else:
                value = generator.uniform(low, high)
            values[name] = min(max(value, low), high)
            if variable.is_whole:
                values[name] = float(round(values[name]))
        return values

    def property_fault(self, stated: str, values: Mapping[str, float], u: float) -> str | None:
        """Return how a stated property fails for these inputs, or None. u in [0, 1) chooses how far an input is moved.

        Raises LawError for a sentence that is no property.
        """
        found = re.fullmatch(
            r"(grows with|falls with|never falls with|never grows with|linear in|at least|at most|is|never when) (.+)",
            stated,
        )
        if found is None:
            raise LawError(f"{self.id}: {stated!r} is no property")
        kind, subject = found.groups()
        if kind in ("at least", "at most", "is", "never when"):
            return self._bound_fault(kind, subject, values)
        if subject not in self.variables:
            raise LawError(f"{self.id}: the property {stated!r} names no variable")
        variable, factor = self.variables[subject], 1.05 + u
        moved = values[subject] * factor if values[subject] else u + 0.01
        if variable.is_whole:
            moved = max(moved, values[subject] + 1)
            moved = float(round(moved))
        if variable.high <= 1:
            moved = min(moved, variable.high)
        before, after = self(**values), self(**{**values, subject: moved})
        if math.inf in (before, after) or moved == values[subject]:
            return None
        slack = _SLACK * max(abs(before), abs(after), 1e-300)
        holds = {
            "grows with": after > before,
            "falls with": after < before,
            "never falls with": after >= before - slack,
            "never grows with": after <= before + slack,
            "linear in": abs(after * values[subject] - before * moved) <= slack * max(moved, 1),
        }[kind]
        if holds:
            return None
        return (
            f"it should hold that it {kind} {subject}, but {subject} {values[subject]:.6g} -> {moved:.6g} takes the "
            f"result from {before:.6g} to {after:.6g} {self.unit}"
        )

    def _bound_fault(self, kind: str, subject: str, values: Mapping[str, float]) -> str | None:
        scope = self._scope(values)
        bound = formulas.compile_formula(formulas.parse(subject))(scope)
        result = self(**values)
        slack = _SLACK * max(abs(bound), 1e-300)
        holds = {
            "at least": result >= bound - slack,
            "at most": result <= bound + slack,
            "is": abs(result - bound) <= slack,
            "never when": not bound or result == math.inf,
        }[kind]
        if holds:
            return None
        return f"{kind} {subject} fails: {result:.6g}, {bound:.6g} ({dict(values)})"


def quantity(given: Any, wanted: Unit) -> float:
    """Return a number, or a text such as `4.78 GiB`, in base units of `wanted`. Raises UnitError."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise UnitError(f"{given!r} is no number")
    return float(given) if not isinstance(given, str) else parse_quantity(given, wanted)


# ---- from documents --------------------------------------------------------------------------------------------------


def build_law(document: Mapping[str, Any], constants: Mapping[str, Constant]) -> Law:
    """Return a law from its document. Raises LawError when names or units do not fit."""
    name = document["id"]
    let = document.get("let", {})
    variables = {
        key: Variable(
            str(v["unit"]), float(v["range"][0]), float(v["range"][1]), bool(v.get("whole", False)),
            v.get("from"), v.get("meaning", ""), v.get("default"),
        )
        for key, v in document["variables"].items()
    }  # fmt: skip
    try:
        trees = {part: formulas.parse(text) for part, text in let.items()}
        tree = formulas.parse(document["formula"])
        never = document.get("never_when")
        never_tree = None if never is None else formulas.parse(never)
        used: set[str] = formulas.names_in(tree)
        for extra in [*trees.values(), *([] if never_tree is None else [never_tree])]:
            used |= formulas.names_in(extra)
        _check_names(name, used, variables, let, constants)
        units = {key: parse_unit(v.unit)[1] for key, v in variables.items()}
        units |= {key: parse_unit(c.unit)[1] for key, c in constants.items()}
        for part, part_tree in trees.items():
            units[part] = formulas.unit_of(part_tree, units)
        if never_tree is not None:
            formulas.unit_of(never_tree, units)
        wanted, found = parse_unit(str(document["unit"]))[1], formulas.unit_of(tree, units)
    except (FormulaError, UnitError) as error:
        raise LawError(f"{name}: {error}") from error
    except KeyError as error:
        raise LawError(
            f"{name}: unknown name {error}; a part is used before it is given"
        ) from error
    if found != wanted:
        raise LawError(f"{name}: the formula gives {found}, the law says {wanted}")
    used_constants = {key: c for key, c in constants.items() if key in used}
    return Law(
        name, document["name"], document["formula"], let, variables, used_constants, str(document["unit"]),
        document["validity"], never, document["examples"], document["properties"], document,
        [(part, formulas.compile_formula(part_tree)) for part, part_tree in trees.items()],
        formulas.compile_formula(tree),
        None if never_tree is None else formulas.compile_formula(never_tree),
    )  # fmt: skip


def _check_names(
    name: str,
    used: set[str],
    variables: Mapping[str, Variable],
    let: Mapping[str, str],
    constants: Mapping[str, Constant],
) -> None:
    unknown = sorted(used - variables.keys() - let.keys() - constants.keys())
    if unknown:
        raise LawError(f"{name}: the formula uses {', '.join(unknown)}, which is not declared")
    unused = sorted((variables.keys() | let.keys()) - used)
    if unused:
        raise LawError(f"{name}: {', '.join(unused)} is declared, but no formula uses it")


def build_laws(documents: Mapping[str, Any]) -> dict[str, Law]:
    """Return every law of a laws.yaml by its id, checked. Raises LawError with all faults, one a line."""
    constants = {
        key: Constant(key, float(c["value"]), str(c["unit"]))
        for key, c in documents["constants"].items()
    }
    laws, faults = {}, []
    for document in documents["laws"]:
        try:
            law = build_law(document, constants)
            faults += list(law.check())
            laws[law.id] = law
        except LawError as error:
            faults.append(str(error))
    if faults:
        raise LawError("\n".join(faults))
    return laws


@functools.cache
def laws() -> Mapping[str, Law]:
    """Return the project's laws by id."""
    return build_laws(read_yaml(LAWS_PATH))


def law(name: str) -> Law:
    """Return one of the project's laws."""
    return laws()[name]


# what no data sheet says, for this project's engine. Each is of the published runs of both models on one machine (RTX
# 5060 8 GB, PCIe 28.6 GB/s, drive 8.2 GiB/s); none is fitted to what it predicts there but where it says so.
HIT_EXPONENT = 0.32  # a of L13: from DeepSeek's runs with 14 and 16 GB of cache; Qwen's follow from it within 1 %
OVERLAP = 0.55  # s of L14: the middle of what the two models' drive-only runs give, 0.40 and 0.70
# t_layer of L14: Qwen with all experts in RAM takes 86 ms, of which 46 ms are the link's and 14 ms its dense bytes'
LAYER_S = 0.53e-3
# beta of L15: 24 tokens of a prompt touch 17 % of the experts, 2451 touch 99 %
REPEAT_EXPONENT = 0.70
PROMPT_TOK_S = 200.0  # r of L15: 130 (Qwen) to 400 (DeepSeek) were seen

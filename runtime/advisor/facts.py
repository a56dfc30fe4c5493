"""What is known of a question: the machine, the person's situation, and rules evaluated over such facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.advisor.kb import KnowledgeBase
from runtime.errors import UsageError
from runtime.quantities import GIB_BYTES, UnitError, parse_quantity, parse_unit

HEADROOM = 0.06  # of video memory, left free
SYSTEM_RAM = 8 * GIB_BYTES  # of RAM, left to the system, the server and the pinned ring
CACHE_SHARE = 0.5  # of RAM at most, by default: rule R20
HERE = "system-here"  # in runs: the machine that this runs on, which has no document
DISK_RULES = ("R02", "R03", "R04", "R05", "R18", "R20")


# ---- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine; None is what is not known. Rates in B/s, sizes in bytes, power in watts."""

    name: str
    system_id: str | None = None  # of the knowledge base, while nothing about it was changed
    calibrated_as: str | None = None  # the system whose calibrations still hold
    ram_bytes: float | None = None
    ram_bw: float | None = None
    pcie_bw: float | None = None
    gpus: tuple[Mapping[str, Any], ...] = ()
    cpu: Mapping[str, Any] | None = None
    drives: tuple[Mapping[str, Any], ...] = ()
    unified_memory_bytes: float | None = None
    gpu_slots: int | None = None
    psu_w: float | None = None
    load_w: float | None = None
    is_here: bool = False  # the machine that this runs on, as it is
    # here by `doctor`: when, and which rates are not steady
    measured: Mapping[str, Any] | None = None

    @property
    def runs_of(self) -> str | None:
        """The system whose measured runs hold for this machine; None where something about it was changed."""
        return HERE if self.is_here else self.system_id

    @property
    def gpu(self) -> Mapping[str, Any] | None:
        """The card with the least memory: that one bounds a split."""
        return min(self.gpus, key=lambda g: float(g["vram_bytes"])) if self.gpus else None

    @property
    def disk_bw(self) -> float | None:
        """Rate of all NVMe drives together, measured where it was, else by the data sheet; else of other drives."""
        rates = [
            d.get("read_bw_measured", d.get("read_bw_spec")) for d in self._fast() or self.drives
        ]
        known = [float(r) for r in rates if r is not None]
        return sum(known) if known else None

    @property
    def is_disk_measured(self) -> bool:
        read = self._fast() or self.drives
        return all("read_bw_measured" in d for d in read) and bool(read)

    def _fast(self) -> list[Mapping[str, Any]]:
        return [d for d in self.drives if str(d.get("interface")).startswith("nvme")]

    @property
    def drive(self) -> Mapping[str, Any] | None:
        return next(iter(self._fast() or self.drives), None)

    def default_cache(self) -> float:
        """Return the RAM that a cache takes by default: half of it, and no less than 8 GiB is left."""
        if self.ram_bytes is None:
            return 0.0
        return max(0.0, min(self.ram_bytes * CACHE_SHARE, self.ram_bytes - SYSTEM_RAM))

    def changed(self, **fields: Any) -> Machine:
        """Return this machine with something bought for it."""
        return replace(self, system_id=None, is_here=False, **fields)


def machine_of(kb: KnowledgeBase, name: str, **known: float | None) -> Machine:
    """Return a machine of the base by id, alias or the name of its file in conf/hw; `known` fields win.

    Raises UsageError with the machines that there are.
    """
    document = next((d for d in kb.all("system") if d.get("hw") == name), None)
    if document is None:
        match = kb.find("system", name)
        document = match.document
    if document is None:
        names = ", ".join(sorted(str(d.get("hw", d["aliases"][0])) for d in kb.all("system")))
        raise UsageError(f"there is no machine {name!r} in the knowledge base", f"known: {names}")
    return _machine(kb, document, known)


def _machine(
    kb: KnowledgeBase, document: Mapping[str, Any], known: Mapping[str, float | None]
) -> Machine:
    machine = Machine(
        document["name"],
        document["id"],
        document["id"],
        document["ram_bytes"],
        document.get("ram_bw"),
        document.get("pcie_bw"),
        tuple(kb.get("gpu", g) for g in document.get("gpu", ())),
        kb.get("cpu", document["cpu"]) if "cpu" in document else None,
        tuple(kb.get("drive", d) for d in document.get("drives", ())),
        document.get("unified_memory_bytes"),
        document.get("gpu_slots"),
        document.get("psu_w"),
        document.get("load_w"),
    )
    return with_known(machine, known)


def with_known(machine: Machine, known: Mapping[str, float | None]) -> Machine:
    """Return a machine with facts that were told or measured; 1 % off makes it another machine."""
    changes: dict[str, Any] = {}
    for name, value in known.items():
        if value is None:
            continue
        if name == "disk_bw":
            old = machine.disk_bw
            if old is None or abs(old - value) > 0.01 * old or not machine.is_disk_measured:
                base = dict(machine.drive or {"id": "drive-told"})
                changes["drives"] = ({**base, "read_bw_measured": value},)
        elif name == "disk_free":
            drives = changes.get("drives", machine.drives)
            changes["drives"] = tuple({**d, "free_bytes": value} for d in drives)
        else:
            old = getattr(machine, name)
            if old is None or abs(old - value) > 0.01 * abs(old):
                changes[name] = value
    if not changes:
        return machine
    is_other = bool(changes.keys() - {"drives"}) or machine.disk_bw is None
    after = replace(machine, **changes)
    if is_other or after.disk_bw != machine.disk_bw:
        after = replace(after, system_id=None, is_here=False)
    return after


def machine_from(
    kb: KnowledgeBase, given: Mapping[str, Any], base: Machine | None = None
) -> Machine:
    """Return a machine described by names and sizes: gpu, cpu, ram, ram_bw, pcie_bw, drive (an interface), disk_bw,
    disk_free, unified_memory, gpu_slots, psu_w. Sizes are bytes or texts with a unit. What is not given is as in
    `base`, or not known.

    Raises UsageError naming the field that cannot be used.
    """
    units = {
        "ram": "B",
        "ram_bw": "B/s",
        "pcie_bw": "B/s",
        "disk_bw": "B/s",
        "disk_free": "B",
        "unified_memory": "B",
        "psu_w": "W",
        "load_w": "W",
        "gpu_slots": "1",
    }
    unknown = sorted(given.keys() - units.keys() - {"name", "system", "gpu", "cpu", "drive"})
    if unknown:
        known = ", ".join(sorted([*units, "system", "gpu", "cpu", "drive"]))
        raise UsageError(f"hardware has no field {', '.join(unknown)}", f"known: {known}")
    sizes = {
        name: amount(given[name], unit, f"hardware.{name}")
        for name, unit in units.items()
        if name in given
    }
    machine = (
        machine_of(kb, str(given["system"]))
        if "system" in given
        else base or Machine("the machine described")
    )
    changes: dict[str, Any] = {}
    if "gpu" in given:
        names = given["gpu"] if isinstance(given["gpu"], list) else [given["gpu"]]
        gpus = tuple(_named(kb, "gpu", str(n)) for n in names)
        if gpus != machine.gpus:
            changes["gpus"] = gpus
    if "cpu" in given:
        cpu = _named(kb, "cpu", str(given["cpu"]))
        if machine.cpu != cpu:
            changes["cpu"] = cpu
    if "drive" in given:
        kinds = ("nvme-gen3", "nvme-gen4", "nvme-gen5", "sata", "hdd")
        if given["drive"] not in kinds:
            raise UsageError(f"hardware.drive is {given['drive']!r}", f"known: {', '.join(kinds)}")
        if machine.drive is None or machine.drive.get("interface") != given["drive"]:
            changes["drives"] = ({"id": "drive-told", "interface": given["drive"]},)
    if changes:
        machine = replace(machine, system_id=None, is_here=False, calibrated_as=None, **changes)
    fields = {"ram": "ram_bytes", "unified_memory": "unified_memory_bytes"}
    return with_known(machine, {fields.get(n, n): v for n, v in sizes.items()})


def amount(value: Any, unit: str, where: str) -> float:
    """Return a number at least 0 in base units from a number or a text with a unit. Raises UsageError naming it."""
    try:
        number = (
            parse_quantity(value, parse_unit(unit)[1]) if isinstance(value, str) else float(value)
        )
    except (UnitError, TypeError, ValueError) as error:
        raise UsageError(
            f"{where}: {error}", f"give a number in {unit}, or a text such as '8 GiB'"
        ) from error
    if not math.isfinite(number) or number < 0:
        raise UsageError(
            f"{where} is {value!r}, it must be a number of at least 0", f"give it in {unit}"
        )
    return number


def _named(kb: KnowledgeBase, kind: str, name: str) -> Mapping[str, Any]:
    match = kb.find(kind, name)
    if match.document is None:
        near = ", ".join(match.candidates) or ", ".join(d["id"] for d in kb.all(kind))
        raise UsageError(f"there is no {kind} {name!r} in the knowledge base", f"near it: {near}")
    return match.document


# ---- the situation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known, assumed and unknown of a person's situation, values in the units of situations.yaml."""

    values: Mapping[str, Any]
    status: Mapping[str, str]  # known, assumed or unknown
    units: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def currency(self) -> str:
        return self.values.get("currency") or "EUR"

    def document(self) -> dict[str, dict[str, Any]]:
        """Return it as an answer's situation block."""
        found = {}
        for name, status in self.status.items():
            entry: dict[str, Any] = {"value": self.values.get(name), "status": status}
            if name in self.units:
                entry["unit"] = self.units[name]
            found[name] = entry
        return found


def situation_of(kb: KnowledgeBase, given: Mapping[str, Any]) -> Situation:
    """Return the situation with what is assumed filled in. A value is plain, or {value, unit}.

    Raises UsageError for an unknown key, a wrong unit, or a value that cannot be.
    """
    documents = kb.documents["situation"]
    unknown = sorted(given.keys() - documents.keys())
    if unknown:
        raise UsageError(
            f"there is no situation key {', '.join(unknown)}", f"known: {', '.join(documents)}"
        )
    values: dict[str, Any] = {}
    status: dict[str, str] = {}
    units: dict[str, str] = {}
    currency = given.get("currency")
    if isinstance(currency, Mapping):
        currency = currency.get("value")
    for name, document in documents.items():
        told = given.get(name)
        unit = document.get("unit")
        if isinstance(told, Mapping):
            unit_told = told.get("unit")
            told = told.get("value")
            if (
                told is not None
                and unit_told not in (None, "", "1")
                and document["kind"] == "number"
            ):
                told = f"{told} {unit_told}"
        if told is not None:
            values[name] = _told(name, document, told)
            status[name] = "known"
            if name == "budget" and isinstance(given.get(name), Mapping) and not currency:
                currency = parse_unit(str(given[name].get("unit", "")))[1].currency
        elif "assumed" in document:
            values[name], status[name] = document["assumed"], "assumed"
        else:
            status[name] = "unknown"
        if unit:
            units[name] = unit
    if currency and "currency" not in values:
        values["currency"], status["currency"] = currency, "known"
    money = values.get("currency") or "EUR"
    units = {name: unit.replace("money", money) for name, unit in units.items()}
    return Situation(values, status, units)


def _told(name: str, document: Mapping[str, Any], told: Any) -> Any:
    where = f"situation.{name}"
    if document["kind"] == "flag":
        if not isinstance(told, bool):
            raise UsageError(f"{where} is {told!r}", "say true or false")
        return told
    if document["kind"] == "text":
        if "values" in document and told not in document["values"]:
            raise UsageError(f"{where} is {told!r}", f"known: {', '.join(document['values'])}")
        return str(told)
    unit = document["unit"]
    if unit == "Mbit/s" and not isinstance(told, str):
        return amount(told, "1", where)
    value = amount(told, unit, where)
    if isinstance(told, str) and unit == "Mbit/s":
        value /= 1e6
    if value < document.get("min", 0):
        raise UsageError(
            f"{where} is {value:g}, at least {document['min']:g} is wanted", document["question"]
        )
    return value


# ---- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What a rule found: pass, fail or unknown, both sides as compared."""

    rule: Mapping[str, Any]
    status: str
    left: Any
    right: Any

    @property
    def id(self) -> str:
        return str(self.rule["id"])

    def is_(self, status: str, *severities: str) -> bool:
        return self.status == status and self.rule["severity"] in severities


Facts = Mapping[str, Mapping[str, Any]]


def look(facts: Facts, path: str) -> Any:
    """Return a fact such as gpu.vram_bytes, or None."""
    kind, _, name = path.partition(".")
    return facts.get(kind, {}).get(name)


def evaluate_rules(kb: KnowledgeBase, names: Sequence[str], facts: Facts) -> list[RuleResult]:
    """Return the results of the rules that apply, in the order given."""
    results = []
    for name in names:
        rule = kb.get("rule", name)
        if all(_holds(condition, facts)[0] is True for condition in rule.get("applies_when", ())):
            held, left, right = _holds(rule, facts)
            status = {True: "pass", False: "fail", None: "unknown"}[held]
            results.append(RuleResult(rule, status, left, right))
    return results


def _holds(condition: Mapping[str, Any], facts: Facts) -> tuple[bool | None, Any, Any]:
    left = look(facts, condition["left"])
    op = condition["op"]
    if op == "is_known":
        return left is not None, left, None
    right = condition["right"]
    if isinstance(right, str) and "." in right:
        right = look(facts, right)
    if isinstance(right, (int, float)) and not isinstance(right, bool):
        right = right * condition.get("times", 1) + condition.get("plus", 0)
    if op == "!=":
        return left != right, left, right
    if left is None or right is None:
        return None, left, right
    match op:
        case ">=":
            return left >= right, left, right
        case "<=":
            return left <= right, left, right
        case "==":
            return left == right, left, right
        case "in":
            return left in right, left, right
        case "contains":
            return right in left, left, right
        case "not_contains":
            return right not in left, left, right
    raise AssertionError(op)

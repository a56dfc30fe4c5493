"""Formulas as text, evaluated by a small interpreter that knows an allow-list and nothing else.

A formula is one expression of names, numbers, `+ - * / **`, comparisons and a few functions. `unit_of` walks it with
units and refuses unlike ones; `compile_formula` gives a function of plain numbers in base units.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from runtime.quantities import NONE, Unit, UnitError

MAX_NODES, MAX_EXPONENT = 200, 16.0

Evaluate = Callable[[Mapping[str, float]], float]

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_SAME_UNIT = {"min": min, "max": max}  # any number of arguments of one unit
_WHOLE = {"ceil": math.ceil, "floor": math.floor}
_PLAIN = {"log": math.log, "exp": math.exp}


class FormulaError(ValueError):
    """A formula that is not allowed, or that cannot be evaluated for these numbers."""


def parse(text: str) -> ast.expr:
    """Return the checked tree of a formula. Raises FormulaError naming what is not allowed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError(f"{text!r} is no expression: {error}") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise FormulaError(f"a formula has at most {MAX_NODES} nodes")
    _check(tree)
    return tree


def _check(node: ast.AST) -> None:
    match node:
        case ast.Constant(value=value):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise FormulaError(f"{value!r} is not a number")
        case ast.Name():
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) not in _BINARY and not isinstance(op, ast.Pow):
                raise FormulaError(f"the operator {type(op).__name__} is not allowed")
            _check(left)
            _check(right)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if type(op) not in _COMPARE:
                raise FormulaError(f"the comparison {type(op).__name__} is not allowed")
            _check(left)
            _check(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            count = {"where": 3, "sqrt": 1, "log": 1, "exp": 1, "ceil": 1, "floor": 1}.get(name)
            if name not in ("min", "max") and count is None:
                raise FormulaError(f"the function {name!r} is not allowed")
            if (count is not None and len(args) != count) or not args:
                raise FormulaError(f"{name} takes {count or 'some'} arguments, got {len(args)}")
            for argument in args:
                _check(argument)
        case _:
            raise FormulaError(f"{type(node).__name__} is not allowed in a formula")


def names_in(tree: ast.expr) -> set[str]:
    """Return the variables of a formula."""
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called}


def unit_of(node: ast.expr, units: Mapping[str, Unit]) -> Unit:
    """Return the unit of a checked formula. Raises UnitError where unlike units are added, compared or chosen."""
    match node:
        case ast.Constant():
            return NONE
        case ast.Name(id=name):
            return units[name]
        case ast.UnaryOp(operand=operand):
            return unit_of(operand, units)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = unit_of(left, units), unit_of(right, units)
            if exponent != NONE:
                raise UnitError(f"an exponent has no unit, {ast.unparse(right)} is in {exponent}")
            if base == NONE:
                return NONE
            if not isinstance(right, ast.Constant):
                raise UnitError(f"{ast.unparse(left)} in {base} needs a fixed exponent")
            return base.to_the(float(right.value))  # type: ignore[arg-type]
        case ast.BinOp(left=left, op=op, right=right):
            a, b = unit_of(left, units), unit_of(right, units)
            if isinstance(op, (ast.Mult, ast.Div)):
                return a.times(b, 1 if isinstance(op, ast.Mult) else -1)
            return _same(node, (left, a), (right, b))
        case ast.Compare(left=left, comparators=[right]):
            _same(node, (left, unit_of(left, units)), (right, unit_of(right, units)))
            return NONE
        case ast.Call(func=ast.Name(id="where"), args=[test, yes, no]):
            unit_of(test, units)
            return _same(node, (yes, unit_of(yes, units)), (no, unit_of(no, units)))
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return unit_of(argument, units).to_the(0.5)
        case ast.Call(func=ast.Name(id=name), args=args):
            found = [(argument, unit_of(argument, units)) for argument in args]
            if name in _SAME_UNIT:
                return _same(node, *found)
            if name in _PLAIN and found[0][1] != NONE:
                raise UnitError(
                    f"{name} takes a plain number, {ast.unparse(args[0])} is in {found[0][1]}"
                )
            return found[0][1]
    raise AssertionError(node)


def _same(node: ast.expr, *parts: tuple[ast.expr, Unit]) -> Unit:
    """A literal zero goes with any unit."""
    real = [(part, unit) for part, unit in parts if not _is_zero(part)]
    for part, unit in real[1:]:
        if unit != real[0][1]:
            raise UnitError(
                f"{ast.unparse(node)}: {ast.unparse(real[0][0])} is in {real[0][1]}, "
                f"{ast.unparse(part)} in {unit}"
            )
    return real[0][1] if real else NONE


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def compile_formula(node: ast.expr) -> Evaluate:
    """Return a checked formula as a function of its variables. It raises FormulaError outside its domain."""
    run = _build(node)

    def evaluate(values: Mapping[str, float]) -> float:
        try:
            found = run(values)
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            raise FormulaError(f"{ast.unparse(node)} cannot be evaluated: {error}") from error
        if isinstance(found, complex) or math.isnan(found):
            raise FormulaError(f"{ast.unparse(node)} has no real value for these numbers")
        return found

    return evaluate


def _build(node: ast.expr) -> Evaluate:
    match node:
        case ast.Constant(value=value):
            number = float(value)  # type: ignore[arg-type]
            return lambda _v: number
        case ast.Name(id=name):
            return lambda v: v[name]
        case ast.UnaryOp(operand=operand):
            inner = _build(operand)
            return lambda v: -inner(v)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _build(left), _build(right)
            if isinstance(op, ast.Pow):
                return lambda v: _pow(a(v), b(v))
            binary = _BINARY[type(op)]
            return lambda v: binary(a(v), b(v))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            a, b, compare = _build(left), _build(right), _COMPARE[type(op)]
            return lambda v: float(compare(a(v), b(v)))
        case ast.Call(func=ast.Name(id="where"), args=args):
            test, yes, no = (_build(argument) for argument in args)
            return lambda v: yes(v) if test(v) else no(v)
        case ast.Call(func=ast.Name(id=name), args=args):
            built = [_build(argument) for argument in args]
            if name in _SAME_UNIT:
                choose = _SAME_UNIT[name]
                return lambda v: choose([f(v) for f in built])
            only = built[0]
            if name in _WHOLE:
                whole = _WHOLE[name]
                return lambda v: float(whole(only(v)))
            plain = math.sqrt if name == "sqrt" else _PLAIN[name]
            return lambda v: plain(only(v))
    raise AssertionError(node)


def _pow(base: float, exponent: float) -> float:
    # a formula's own exponents are small; (1 - share) ** n with a large n is no danger
    if abs(exponent) > MAX_EXPONENT and not 0 <= base <= 1:
        raise ValueError(f"the exponent {exponent:g} is beyond {MAX_EXPONENT:g}")
    found = base**exponent
    if isinstance(found, complex):
        raise ValueError(f"{base:g} to the power {exponent:g} is not real")
    return float(found)

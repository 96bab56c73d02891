"""Numbers that remember how they were made, so that one formula in Python is also the one in the page.

A formula uses + - * / and `**`, and the functions below where Python would branch. Called with numbers it gives a number; called
with symbols it gives an expression, which prints itself as JavaScript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Number: TypeAlias = Any  # int, float or Symbol


class Symbol:
    """A name, a constant, or an operation on symbols."""

    __slots__ = ("args", "form")

    def __init__(self, form: str, *args: Symbol) -> None:
        self.form, self.args = form, args

    def __str__(self) -> str:
        return self.form.format(*self.args)

    def __add__(self, other: Number) -> Symbol:
        return Symbol("({} + {})", self, _symbol(other))

    def __radd__(self, other: Number) -> Symbol:
        return Symbol("({} + {})", _symbol(other), self)

    def __sub__(self, other: Number) -> Symbol:
        return Symbol("({} - {})", self, _symbol(other))

    def __rsub__(self, other: Number) -> Symbol:
        return Symbol("({} - {})", _symbol(other), self)

    def __mul__(self, other: Number) -> Symbol:
        return Symbol("({} * {})", self, _symbol(other))

    def __rmul__(self, other: Number) -> Symbol:
        return Symbol("({} * {})", _symbol(other), self)

    def __truediv__(self, other: Number) -> Symbol:
        return Symbol("({} / {})", self, _symbol(other))

    def __rtruediv__(self, other: Number) -> Symbol:
        return Symbol("({} / {})", _symbol(other), self)

    def __pow__(self, other: Number) -> Symbol:
        return Symbol("Math.pow({}, {})", self, _symbol(other))

    def __bool__(self) -> bool:
        raise TypeError("a formula branched on a symbol; use choose(condition, then, otherwise)")


def _symbol(value: Number) -> Symbol:
    return value if isinstance(value, Symbol) else Symbol(repr(value * 1))  # True is 1


def _symbolic(*values: Number) -> bool:
    return any(isinstance(value, Symbol) for value in values)


def choose(condition: Number, then: Number, otherwise: Number) -> Number:
    """`then` where the condition (true, false, or a number that is not 0) holds."""
    if _symbolic(condition):
        return Symbol("({} ? {} : {})", _symbol(condition), _symbol(then), _symbol(otherwise))
    return then if condition else otherwise


def least(a: Number, b: Number) -> Number:
    return Symbol("Math.min({}, {})", _symbol(a), _symbol(b)) if _symbolic(a, b) else min(a, b)


def most(a: Number, b: Number) -> Number:
    return Symbol("Math.max({}, {})", _symbol(a), _symbol(b)) if _symbolic(a, b) else max(a, b)


def differs(a: Number, b: Number) -> Number:
    return Symbol("({} !== {})", _symbol(a), _symbol(b)) if _symbolic(a, b) else a != b


def ceil(a: Number) -> Number:
    return Symbol("Math.ceil({})", a) if _symbolic(a) else math.ceil(a)


def javascript(name: str, formula: Callable[..., Mapping[str, Number]], parameters: Sequence[str]) -> str:
    """`formula`, which maps names to numbers, as a JavaScript function of one object with these properties."""
    found = formula(*(Symbol(f"p.{parameter}") for parameter in parameters))
    lines = ",\n".join(f"    {key}: {_symbol(value)}" for key, value in found.items())
    return f"function {name}(p) {{\n  return {{\n{lines}\n  }};\n}}\n"

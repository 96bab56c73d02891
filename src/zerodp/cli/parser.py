"""How every command reads its options: errors in one line, near misses named, sizes such as `4M`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from ..config import PRECISIONS
from ..core.stages import STAGES

MOST = 10**15  # of anything that is counted
OWN = "the model's own"  # where nothing else is asked for
SCALE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class UsageError(Exception):
    """Wrong usage that shows only after parsing; a command raises it before it has done anything."""


class Parser(argparse.ArgumentParser):
    """An argument parser that ends wrong usage with status 2 and one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def add_stage(self, text: str = "ZeRO stage") -> None:
        told = f"{text} (default %(default)s)"
        self.add_argument("--stage", type=stage_number, default=max(STAGES), metavar="STAGE", help=told)

    def add_precision(self, default: str | None, text: str = "dtype of compute") -> None:
        told = f"{text}: {', '.join(PRECISIONS)} (default: {default or OWN})"
        self.add_argument("--precision", type=precision, default=default, metavar="DTYPE", help=told)

    def add_json(self, more: str = "") -> None:
        self.add_argument("--json", action="store_true", help=f"print one JSON object{more}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            self.error(f"unknown option {name}{near(name, self._option_string_actions)}")
        for name, value in vars(known).items():
            if value == []:  # what argparse makes of `--option=--`
                self.error(f"argument --{name.replace('_', '-')}: expected one argument")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split("\n"))  # what a user gave may have several
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")


def near(name: str, names: Iterable[str]) -> str:
    """The end of a message about a misspelt `name`."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {found[0]}?" if found else ""


def one_of(values: Sequence[str]) -> Callable[[str], str]:
    """The type of an option with these values."""

    def parse(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(values)}, got {text!r}{near(text, values)}")
        return text

    return parse


precision = one_of(list(PRECISIONS))


def stage_number(text: str) -> int:
    """The type of a ZeRO stage."""
    return int(one_of([str(stage) for stage in STAGES])(text))


def whole(least: int) -> Callable[[str], int]:
    """The type of a whole number."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,30}", text) or not least <= int(text) <= MOST:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """The type of a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def size(text: str) -> int:
    """The type of a count such as 4M, 350k or 7.5e9."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kKmMbBtT]?)", text)
    scale = SCALE[found[2].upper()] if found else 0
    if found is None or not 0 < float(found[1]) * scale < float("inf") or (exact := Fraction(found[1]) * scale) % 1:
        raise argparse.ArgumentTypeError(f"expected a count such as 4M, 350k or 7.5e9, got {text!r}")
    return int(exact)


def function(text: str) -> str:
    """The type of a function given as module:function; it is looked up, so that a mistake is told before anything starts."""
    try:
        look_up(text)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected module:function, got {text!r}: {error}") from None
    except Exception as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: importing it failed with {type(error).__name__}: {error}"
        ) from None
    return text


def look_up(text: str) -> Callable[..., Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, colon, name = text.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ValueError("a module, a colon and a function in it are needed")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function but {type(found).__name__}")
    return found  # type: ignore[no-any-return]

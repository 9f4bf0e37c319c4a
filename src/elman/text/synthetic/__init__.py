"""Texts made by a program, with their optimum known; `parse` turns ``markov,order=3,seed=1`` into its `Generator`."""

from __future__ import annotations

import re
from dataclasses import fields

from elman.errors import UserError, nearest
from elman.text.synthetic.base import VERSION, Bits, Generator, KnownAnswer, Span
from elman.text.synthetic.chance import Grammar, Markov, Zipf
from elman.text.synthetic.tasks import (
    Adding,
    Agreement,
    AnBn,
    AssociativeRecall,
    Copying,
    Dyck,
    ModularArithmetic,
    Parity,
    Quotes,
    Reversing,
    SelectiveCopying,
    Task,
)

__all__ = ["GENERATORS", "VERSION", "Bits", "Generator", "KnownAnswer", "Span", "Task", "parse"]

GENERATORS: dict[str, type[Generator]] = {
    generator.name: generator
    for generator in (
        Markov,
        Grammar,
        Zipf,
        Dyck,
        AnBn,
        Copying,
        Reversing,
        SelectiveCopying,
        AssociativeRecall,
        Parity,
        ModularArithmetic,
        Adding,
        Quotes,
        Agreement,
    )
}
"""Every generator by its name."""


def parse(specification: str) -> Generator:
    """The generator of a specification ``name[,parameter=number...]``, such as ``dyck,kinds=4,size=100000``.

    Raises:
        UserError: an unknown name or parameter, with the nearest one, or a value that is no whole number in range.
    """
    name, *settings = specification.split(",")
    if name not in GENERATORS:
        raise UserError(f"unknown generator 'synthetic:{name}'{nearest(name, GENERATORS)}")
    accepted = [parameter.name for parameter in fields(GENERATORS[name])]
    values: dict[str, int] = {}
    for setting in settings:
        parameter, _, value = setting.partition("=")
        if parameter not in accepted:
            raise UserError(f"synthetic:{name} has no parameter {parameter!r}{nearest(parameter, accepted)}")
        if not re.fullmatch(r"\d{1,19}", value, re.ASCII) or parameter in values:
            raise UserError(f"synthetic:{name}: {setting!r}; accepted: {parameter}=NUMBER, a whole number, once")
        values[parameter] = int(value)
    return GENERATORS[name](**values)

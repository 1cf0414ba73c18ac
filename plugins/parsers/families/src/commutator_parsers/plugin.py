"""Registers a parser for each family, and `auto`, which finds out the family by itself."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.parser import ParserConfig
from commutator.contract.registration import ParserRegister
from commutator_parsers.families import FAMILIES
from commutator_parsers.model import ModelParser


@hookimpl
def parser_register(register: ParserRegister) -> None:
    """Kinds: `auto`: as the chat template shows; `none`: no calls; the others: a family each."""
    for name in ("auto", "none", *FAMILIES):
        register(name, ParserConfig, ModelParser, "beta")

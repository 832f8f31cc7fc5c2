"""The table of plants: a row is a class and words, stages, what is wrong, what problems need."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tests.diagnose.plain import Kernel, Planted
from tests.diagnose.problems import Needs

Hooks = dict[str, Any]
Table = tuple[tuple[Any, ...], ...]  # of plants
FIELDS = {field.name for field in fields(Kernel)}
STAGES_OF = dict(zip("fbsj", ("forward", "backward", "second", "jvp"), strict=True))
GRADIENTS = ("dq", "dk", "dv")
FEW = {"batch": (2, 3), "heads_kv": (1, 2), "groups": (1, 2), "head_dims": (16, 24, 32)}
FEW |= {"past_end": 0.0, "least": 0.03}  # what most problems are like


def stages_of(on: str) -> tuple[str, ...]:
    return tuple(STAGES_OF[letter] for letter in on)


def kernel(changes: Mapping[str, Any]) -> Kernel:
    """``changes``: fields of Kernel, and hooks by their names."""
    own = {name: value for name, value in changes.items() if name in FIELDS}
    return Kernel({n: hook for n, hook in changes.items() if n not in FIELDS}, **own)


def plants(
    table: Table,
    usual: Callable[[str], Mapping[str, Any]],
    of_class: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    named: Callable[[str, str], str] = lambda words, on: words,
    every: Hooks | None = None,
    gives: tuple[str, ...] = (),
) -> tuple[Planted, ...]:
    """A row: the class (or others that are the same function) and words, the stages ("f b" is two
    plants), what is wrong, and what its problems need besides ``usual`` and what its class needs.

    named: by words and stages. every: what all of them are like. gives: beyond first order. What is
    no field of Needs is what lists of blocks must be like.
    """
    found = []
    for name, stages, wrong, *more in table:
        classes, _, words = name.partition(": ")
        bug, *also = classes.split(" or ")
        for on in stages.split():
            wanted = {**usual(on), **(of_class or {}).get(bug, {}), **(more[0] if more else {})}
            of_blocks = {n: wanted.pop(n) for n in wanted.keys() - Needs.__dataclass_fields__}
            if "blocks" in wanted:
                wanted["blocks"] = wanted["blocks"] | of_blocks
            right, given = every or {}, () if set(on) & {"f", "b"} else gives
            place = named(words, on), stages_of(on), kernel(right | wrong), Needs(**wanted)
            found.append(Planted(bug, *place, tuple(also), given, kernel(right)))
    return tuple(found)

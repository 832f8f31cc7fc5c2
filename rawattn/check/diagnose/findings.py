"""What a diagnosis says, as plain data: for the terminal, for JSON and for the page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

CONFIDENCE = ("proved", "high", "medium", "low")
NAMELESS = ("unknown", "vacuous", "rounding")  # findings that name no bug


@dataclass(frozen=True)
class Sight:
    """Which queries see which keys, and how often, (queries, keys): as it must be, and as it is.

    A part of one sequence and head, its queries and keys counted from the sequence's first one;
    ``length`` is how many keys the sequence has: others are its neighbours', or rows of zeros.
    """

    sequence: int
    head: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    length: int
    zeros: bool
    right: np.ndarray
    found: np.ndarray


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``bug`` is a class of ``classes``, or "unknown" or "vacuous".

    confidence: "proved" (an identity that needs no reference fails, and only so), "high" (the bug
    planted in the reference gives the same numbers down to rounding, and no other one does),
    "medium", "low". evidence: what says most first. ``alternatives`` are bugs that would look the
    same on this data. form: of the bug that was planted, None where none was; forms: those of its
    class that look the same here. sight: whom the queries see with it. ``cases`` show it.
    """

    side: str
    bug: str
    title: str
    where: str
    confidence: str
    evidence: tuple[str, ...]
    look_at: str
    alternatives: tuple[str, ...] = ()
    form: str | None = None
    forms: tuple[str, ...] = field(default=(), compare=False)
    sight: Sight | None = field(default=None, compare=False)
    cases: tuple[str, ...] = field(default=(), compare=False)

    @property
    def rank(self) -> int:
        """The surest first."""
        return CONFIDENCE.index(self.confidence)

    def worded(self, form: str) -> "Finding":
        """The same with another of ``forms``."""
        own = self.form
        if not own or not form:
            return self
        said = [text.replace(own, form) for text in (self.title, *self.evidence)]
        return replace(self, title=said[0], evidence=tuple(said[1:]), form=form)

    def joined(self, other: "Finding") -> "Finding":
        """One finding for the same bug, seen at two places."""
        return replace(
            self,
            where="; ".join(dict.fromkeys((self.where, other.where))),
            confidence=CONFIDENCE[min(self.rank, other.rank)],
            evidence=tuple(dict.fromkeys(self.evidence + other.evidence)),
            alternatives=tuple(name for name in self.alternatives if name in other.alternatives),
            form=other.form if self.form is None else self.form,
            sight=self.sight or other.sight,
        )


@dataclass(frozen=True)
class Check:
    """An identity that must hold on one side alone. verdict: "pass", "FAIL", "vacuous", or "-"
    where the side does not have what the identity is about."""

    side: str
    name: str
    text: str
    value: float
    allowed: float
    verdict: str
    where: str = ""

    @property
    def place(self) -> str:
        """Where it fails, unless that is everywhere."""
        return self.where.removeprefix("all").removeprefix(": ")


@dataclass(frozen=True)
class Diagnosis:
    """All of it. No findings: nothing is wrong. ``facts``: what was looked at, in sentences."""

    title: str
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.findings


def of_sides(title: str, sides: Mapping[str, Diagnosis]) -> Diagnosis:
    """One diagnosis of several sides. The first fact of each is what it was asked."""
    found = list(sides.values())
    several = len({diagnosis.facts[:1] for diagnosis in found}) > 1
    facts = [f"{name}: " * several + fact for name, one in sides.items() for fact in one.facts[:1]]
    return Diagnosis(
        title,
        findings=tuple(finding for diagnosis in found for finding in diagnosis.findings),
        checks=tuple(check for diagnosis in found for check in diagnosis.checks),
        facts=(*dict.fromkeys(facts), *(fact for one in found for fact in one.facts[1:])),
    )


def readable(value: float) -> str:
    """As people write it; "-" where there is none."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return format(value, ".0f" if 99.5 <= abs(value) < 1e5 else ".2g")  # 109, not 1.1e+02

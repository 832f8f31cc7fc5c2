"""What a diagnosis says, as plain data: for the terminal, for JSON and for the page."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import STAGES, TENSORS

CONFIDENCE = ("proved", "high", "medium", "low")
NAMELESS = ("unknown", "vacuous", "rounding")  # findings that name no bug
PLAIN = ("unknown", "wrong-keys", "score-bias", "score-scale")  # what was read says more exactly


@dataclass(frozen=True)
class Sight:
    """Which queries see which keys, and how often, (queries, keys): as it must be, and as it is. A
    part of one sequence and head, its queries and keys counted from the sequence's first one;
    ``length`` is how many keys the sequence has: others are its neighbours', or rows of zeros."""

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
    "medium", "low". evidence: what says most first. ``alternatives`` would look the same on this
    data. form: of the bug that was planted, None where none was; forms: those of its class that
    look the same here, with what was planted of each. sight: whom the queries see with it.
    ``cases`` show it. least: all that is wrong on the smallest problem that fails. planted: bugs
    that give the same numbers, by stage."""

    side: str
    bug: str
    title: str
    where: str
    confidence: str
    evidence: tuple[str, ...]
    look_at: str
    alternatives: tuple[str, ...] = ()
    form: str | None = None
    forms: Mapping[str, Mapping[str, Bug]] = field(default_factory=dict, compare=False)
    sight: Sight | None = field(default=None, compare=False)
    cases: tuple[str, ...] = field(default=(), compare=False)
    least: str = field(default="", compare=False)
    planted: Mapping[str, Bug] = field(default_factory=dict, compare=False)

    @property
    def rank(self) -> int:
        """The surest first."""
        return CONFIDENCE.index(self.confidence)

    @property
    def tensors(self) -> set[str]:
        return {*TENSORS} & {*re.findall(r"\w+", self.where)}

    @property
    def stages(self) -> list[str]:
        return [stage for stage, tensors in STAGES.items() if self.tensors & {*tensors}]

    @property
    def sure(self) -> bool:
        """Whether it says a bug, and not just what was read."""
        return self.confidence in ("proved", "high") and self.bug not in PLAIN

    def worded(self, form: str) -> "Finding":
        """The same with another of ``forms``."""
        if not self.form or not form:
            return self
        said = [text.replace(self.form, form) for text in (self.title, *self.evidence)]
        planted = self.forms.get(form, self.planted)
        return replace(self, title=said[0], evidence=tuple(said[1:]), form=form, planted=planted)

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
            planted={**other.planted, **self.planted},
        )


@dataclass(frozen=True)
class Diagnosis:
    """All of it. ``judged``: the sides that were looked at; ``facts``: what was, in sentences."""

    title: str
    findings: tuple[Finding, ...]
    judged: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


def of_sides(title: str, sides: Mapping[str, Diagnosis]) -> Diagnosis:
    findings = tuple(finding for one in sides.values() for finding in one.findings)
    judged = tuple(side for one in sides.values() for side in one.judged)
    facts = dict.fromkeys(fact for one in sides.values() for fact in one.facts)
    return Diagnosis(title, findings, judged, tuple(facts))

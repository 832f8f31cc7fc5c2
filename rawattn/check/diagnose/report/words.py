"""A diagnosis in words, and as plain data for ``--json``."""

import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding

SURE = {
    "proved": "these numbers show it by themselves, no reference is needed",
    "high": "no other known bug gives these numbers",
    "medium": "it fits, but does not explain all of it, or is not alone in that",
    "low": "a hint, no more",
}
SHORT = ("proof", "failing", "cases")  # fields of a finding that say again what others say
INSIDE = re.compile(r", (given out|own softmax)\b")  # of a form: what matters to the engine alone
IDENTITY = re.compile(r"I\d+( \w+)? fails ")
NUMBERS = {1: "one key", 2: "two keys", 3: "three keys"}


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it; numbers that JSON lacks (nan, inf) are null."""
    found: dict[str, Any] = _plain(asdict(diagnosis))
    for finding in found["findings"]:
        for name in SHORT:
            del finding[name]
    return {"ok": nothing_wrong(diagnosis), **found}


def nothing_wrong(diagnosis: Diagnosis) -> bool:
    """Whether all that was found is rounding."""
    return all(finding.bug == "rounding" for finding in diagnosis.findings)


def faultless(diagnosis: Diagnosis) -> list[str]:
    """The sides that were judged beside a wrong one, and of which nothing is to be said."""
    if nothing_wrong(diagnosis):
        return []
    accused = {finding.side for finding in diagnosis.findings if finding.bug != "rounding"}
    failing = {check.side for check in diagnosis.checks if check.verdict == "FAIL"}
    passing = dict.fromkeys(c.side for c in diagnosis.checks if c.verdict == "pass")
    return [side for side in passing if side not in accused | failing]


def sentence(finding: Finding) -> str:
    """What is wrong, with the form that the bug has here."""
    proof = finding.proof
    form = INSIDE.sub("", proof.form) if proof is not None else ""
    if proof is None or not form or form in finding.title:
        return finding.title
    if form.startswith("j ") and proof.must:
        return f"{_how_many(finding) or finding.title}: the mask is {form}, it must be {proof.must}"
    must = (
        f", where the mask must be {proof.must}" if "window" in finding.bug and proof.must else ""
    )
    return f"{finding.title}: {form}{must}"


def _how_many(finding: Finding) -> str:
    """How many keys a query sees too many, or too few."""
    sight = finding.proof.sight if finding.proof else None
    if sight is None:
        return ""
    most, least = (int(f((sight.found - sight.right).sum(axis=1))) for f in (np.max, np.min))
    if (most > 0) == (least < 0) or max(most, -least) not in NUMBERS:
        return ""
    return f"each query sees {NUMBERS[max(most, -least)]} too {'many' if most > 0 else 'few'}"


def proved_by(finding: Finding, whose: str = "your") -> list[str]:
    """Why it is so: what says most first, in the words of somebody who sees none of the tool's."""
    proof, said = finding.proof, []
    if proof is not None:
        form = INSIDE.sub("", proof.form)
        bug = form if form.startswith("j ") else "this bug"
        rounding = "" if proof.agrees < 1e-6 else f", which is the rounding of {proof.precision}"
        near = f"to {proof.agrees:.1g} of their size" if proof.agrees else "exactly"
        apart = f"they are {_share(proof.differs)} apart"
        if not math.isfinite(proof.differs):
            apart = "other elements are finite, or not 0"
        without = f"with {proof.must}" if form.startswith("j ") and proof.must else "without it"
        said.append(
            f"the float64 reference with {bug} gives {whose} numbers {near}{rounding} "
            f"({without} {apart})"
        )
    elif finding.bug == "unknown" and finding.confidence == "low":
        said.append(f"no known bug gives {whose} numbers")
    beside = [line for line in finding.evidence if not _of_the_trade(line)]
    simplest = sorted(finding.failing, key=lambda check: "with one key" not in check.text)
    held = [f"{check.text}, but it is off by {_off(check)}" for check in simplest[:1]]
    return list(dict.fromkeys([*said, *held, *beside] if said else [*beside, *held]))


def _off(check: Check) -> str:
    place = re.split("[;:]", check.place)[0]
    return readable(check.value) + (f" in {place}" if place else "")


def _of_the_trade(line: str) -> bool:
    """Whether a line of evidence is said in other words, or is about the run."""
    others = ("With this bug", "shown by ", "no bug of the catalogue")
    return line.startswith(others) or IDENTITY.match(line) is not None


def sure(finding: Finding) -> str:
    """How sure it is, and why not surer."""
    if finding.alternatives:
        return (
            f"{finding.confidence}; {', or '.join(finding.alternatives)} would look the same here"
        )
    meant = "" if finding.bug == "vacuous" else SURE.get(finding.confidence, "")
    return f"{finding.confidence}; {meant}".removesuffix("; ")


def stages_of(text: str) -> list[str]:
    """The stages whose tensors a text names."""
    named = set(re.findall(r"\w+", text))
    return [stage for stage, tensors in STAGES.items() if named & set(tensors)]


def readable(value: float, form: str = ".2g") -> str:
    """As people write it; "-" where there is none."""
    if form == ".2g" and 99.5 <= abs(value) < 1e5:
        form = ".0f"  # 109, not 1.1e+02
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return format(value, form)


def _share(value: float) -> str:
    """0.51 as "51 %"; as it is where that would hide it."""
    return f"{readable(100 * value)} %" if 1e-4 < value < 10 else readable(value)


def _plain(value: Any) -> Any:
    """What JSON has for ``value``."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value

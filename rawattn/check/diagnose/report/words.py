"""A diagnosis in words, and as plain data for ``--json``."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.judge.diagnosis import tensors_in

SURE = {
    "proved": "these numbers show it by themselves, no reference is needed",
    "high": "no other known bug gives these numbers",
    "medium": "it fits, but does not explain all of it, or is not alone in that",
    "low": "a hint, no more",
}
SHORT = ("sight", "cases")  # fields of a finding that are for the terminal


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
    return [stage for stage, tensors in STAGES.items() if tensors_in(text) & set(tensors)]


def _plain(value: Any) -> Any:
    """What JSON has for ``value``."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value

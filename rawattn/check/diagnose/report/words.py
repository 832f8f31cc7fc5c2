"""A diagnosis in words, and as plain data for ``--json``; what a class of bugs is."""

from typing import Any

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.harness.pairs import HARNESS

KNOWN = HARNESS | CLASSES
UNSAID = ("sight", "planted")
SURE = {
    "proved": "these numbers show it by themselves, no reference is needed",
    "high": "no other known bug gives these numbers",
    "medium": "it fits, but does not explain all of it, or is not alone in that",
    "low": "a hint, no more",
}


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it that is text."""
    said = [{n: x for n, x in vars(one).items() if n not in UNSAID} for one in diagnosis.findings]
    said = [one | {"forms": [*one["forms"]]} for one in said]
    return {"ok": nothing_wrong(diagnosis), **vars(diagnosis), "findings": said}


def nothing_wrong(diagnosis: Diagnosis) -> bool:
    """Whether all that was found is rounding."""
    return all(finding.bug == "rounding" for finding in diagnosis.findings)


def sure(finding: Finding) -> str:
    others = ", or ".join(finding.alternatives)
    meant = "" if finding.bug == "vacuous" else SURE.get(finding.confidence, "")
    meant = f"{others} would look the same here" if others else meant
    return f"{finding.confidence}; {meant}".removesuffix("; ")

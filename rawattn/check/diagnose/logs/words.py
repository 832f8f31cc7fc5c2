"""Findings about prints, and lists of numbers, in words."""

from collections.abc import Iterable, Sequence

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Finding


def finding_of(
    side: str,
    bug: str,
    where: str,
    confidence: str,
    evidence: Iterable[str],
    alternatives: tuple[str, ...] = (),
    *,
    title: str = "",
    look_at: str = "",
) -> Finding:
    known = CLASSES[bug]
    title, look_at = title or known.title, look_at or known.look_at
    return Finding(side, bug, title, where, confidence, tuple(evidence), look_at, alternatives)


def listed(values: Iterable[float], digits: int = 4) -> str:
    return few([f"{value:z.{digits}f}" for value in values])


def small(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.1g}"


def rows_named(labels: Sequence[str]) -> str:
    return f"row{'' if len(labels) == 1 else 's'} {few(labels)}"


def counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def few(words: Sequence[str]) -> str:
    return ", ".join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")

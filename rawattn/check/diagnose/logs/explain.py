"""What a text log can prove: tensors and errors that somebody printed, read back and judged.

A print holds a few digits of a few corners, so little can be recomputed from it, but much can be
excluded. ``text`` reads, ``pairs`` fits the entries that both sides print, ``rows`` checks a side
alone, ``rules`` names why two sides differ. A little long: one function asks all of them, and the
rest is what it puts together.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level
from rawattn.check.diagnose.logs.errors import vacuous_errors
from rawattn.check.diagnose.logs.padding import SHRUNK, by_sequence
from rawattn.check.diagnose.logs.pairs import Pair, by_given_names, paired, side_of
from rawattn.check.diagnose.logs.rows import Log, causal_of, identities, what_holds
from rawattn.check.diagnose.logs.rules import differs
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Number, Printed
from rawattn.check.diagnose.logs.text import read_log
from rawattn.check.diagnose.logs.words import counted, finding_of

RANKS = ("proved", "high", "medium", "low")


def explain_log(
    text: str,
    *,
    lengths: tuple[int, ...] | None = None,
    names: tuple[str, str] | None = None,
) -> Diagnosis:
    """What the tensors and errors that ``text`` prints prove.

    lengths: of the sequences, where they are known. names: two words, each in the names of one
    side's tensors; found without them where the log uses common ones. Raises ValueError where
    there is nothing to read, or what there is cannot be read.
    """
    text, printed, figures = read_log(text)
    if not printed and not figures:
        raise ValueError(
            "the log prints no tensor and no labelled number; expected such as "
            "'dq_reference: tensor([[...]])' or 'max abs err: 1.2e-3'"
        )
    if names is not None and len(set(names)) != 2:
        raise ValueError(f"names must be two different words, were {names}")
    pairs = paired(printed, names)
    log = what_holds(text, printed, _lengths(lengths, printed, figures))
    pairs = [replace(pair, causal=causal_of(pair, log)) for pair in pairs]
    sides = {id(p): side_of(p) or p.title for p in printed}
    if names is not None:
        sides |= {id(p): name for p, name, _ in by_given_names(printed, names)}
    checks = tuple(identities(printed, pairs, log, sides))
    findings, facts = _judged(pairs, log)
    findings += _unpaired(printed, pairs, log, sides)
    compared = any(pair.agrees and pair.size > 0 for pair in pairs)
    vacuous, explained = vacuous_errors(figures, log, compared)
    findings, facts = _merged([*findings, *vacuous]), facts + explained
    blamed = {side for f in findings for side in f.side.split(" or ")}
    findings += [_failed(c) for c in checks if c.verdict == "FAIL" and c.side not in blamed]
    if not findings and not pairs and all(check.verdict != "pass" for check in checks):
        findings += _nothing(printed, figures, facts)
    alone = [p.title for p in printed if p.start not in _compared(pairs)]
    figures_too = f" and {counted(len(figures), 'number')}" if figures else ""
    tensors, compared_ = counted(len(printed), "printed tensor"), counted(len(pairs), "pair")
    facts = [f"{tensors}{figures_too}; {compared_} compared", *facts]
    if alone:
        facts.append("without a partner to compare with: " + ", ".join(dict.fromkeys(alone)))
    if log.lengths:
        fits = "" if log.fits else "; they do not add up to any size in the log"
        size = f"{sum(log.lengths)} tokens, the longest {max(log.lengths)}"
        facts.append(f"{len(log.lengths)} sequences, {size}{fits}")
    levels = tuple(level for pair in pairs for level in _levels(pair))
    return Diagnosis("what the log proves", tuple(findings), checks, levels, facts=tuple(facts))


def _lengths(
    given: tuple[int, ...] | None, printed: Sequence[Printed], figures: Sequence[Number]
) -> tuple[int, ...]:
    """The caller's, or those that the log prints; () where neither."""
    if given is not None:
        if not given or any(n < 0 for n in given) or max(given) == 0:
            raise ValueError(f"lengths must be counts of tokens, not all of them 0; were {given}")
        return tuple(int(n) for n in given)
    found: list[float] = []
    for p in printed:
        if {"cu", "seqlens"} <= set(p.words) and p.values.ndim == 1 and p.full:
            found = found or list(np.diff(p.values))
    told = [f for f in figures if f.part and re.search(r"len(gth)?s\b", f.label, re.IGNORECASE)]
    found = found or [f.value for f in told if f.line == told[0].line]
    whole = all(n >= 0 and n == int(n) for n in found) and any(found)
    return tuple(int(n) for n in found) if whole else ()


def _compared(pairs: Iterable[Pair]) -> set[int]:
    return {p.start for pair in pairs for p in (pair.a, pair.b)}


def _levels(pair: Pair) -> Iterator[Level]:
    """Slopes of the first side over the second, of all and of every printed row; where a mask is
    evident, of the entries that it leaves, and then the error of the others."""
    parts: list[tuple[str, str, tuple[int, ...]]] = [("all", "", ())]
    if len(pair.rows) <= 64:
        parts += [("row", label, index) for label, index in pair.rows]
    seen = np.ones(pair.finite.shape, dtype=np.bool_)
    if pair.masked and pair.visible is not None:
        seen = pair.visible
    for level, label, index in parts:
        chosen = np.zeros_like(seen)
        chosen[index] = seen[index]
        fit = pair.fit(chosen)
        slope, residual = (fit.slope, fit.residual) if fit else (math.nan, math.nan)
        error = float(pair.difference[chosen].max(initial=0.0))
        key = label or ("printed entries" if seen.all() else "visible entries")
        yield Level(pair.title, level, key, slope, residual, error)
        masked = float(pair.difference[~seen].max(initial=0.0))
        if level == "all" and masked:
            yield Level(pair.title, level, "masked entries", math.nan, math.nan, masked)


def _judged(pairs: Sequence[Pair], log: Log) -> tuple[list[Finding], list[str]]:
    facts = []
    sequences = by_sequence(pairs, log)
    findings = [sequences] if sequences else []
    empty = [pair for pair in pairs if not pair.a.values.any() and not pair.b.values.any()]
    for pair in pairs:
        size = f"{pair.a.values.size} entries are printed on both sides"
        if pair in empty:
            facts.append(f"{pair.title}: {size}, and all of them are 0: nothing is compared")
        elif pair.agrees:
            facts.append(_agreement(pair, size))
        elif not (sequences and pair.kind in SHRUNK):
            findings.append(differs(pair, log))
    if empty and len(empty) == len(pairs):
        where = ", ".join(pair.title for pair in pairs)
        exact = all(pair.a.full and not pair.digits.any() for pair in pairs)
        evidence = ("every printed entry of both sides is 0",)
        findings.append(
            finding_of("both", "vacuous", where, "high" if exact else "medium", evidence)
        )
    return findings, facts


def _agreement(pair: Pair, size: str) -> str:
    if (pair.difference <= pair.digits).all():
        return f"{pair.title}: {size}, and agree in every printed digit"
    off = float(pair.difference.max()) / pair.size
    words = f"{pair.title}: {size}, and differ by at most {off:.1%} of their size"
    if pair.a.dtype in SIXTEEN_BIT or pair.b.dtype in SIXTEEN_BIT:
        return f"{words}, as rounding to 16 bits does"
    return f"{words}: more than sums in float32 do, no more than rounding to 16 bits on the way"


def _unpaired(
    printed: Sequence[Printed], pairs: Sequence[Pair], log: Log, sides: dict[int, str]
) -> Iterator[Finding]:
    """A dS on its own proves what needs no other side."""
    for p in printed:
        rows = log.rows.get(p.start)
        if rows is not None and rows.masked_delta and p.start not in _compared(pairs):
            bug = "mask-missing-in-backward"
            yield finding_of(sides[id(p)], bug, rows.where, "proved", rows.evidence)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug; what is unknown joins the proof that explains its side."""
    known: dict[tuple[str, str], Finding] = {}
    for finding in (f for f in findings if f.bug != "unknown"):
        before = known.setdefault((finding.side, finding.bug), finding)
        if before is not finding:
            known[finding.side, finding.bug] = replace(
                before,
                evidence=tuple(dict.fromkeys(before.evidence + finding.evidence)),
                where="; ".join(dict.fromkeys((before.where, finding.where))),
                confidence=min(before.confidence, finding.confidence, key=RANKS.index),
            )
    unknown = [f for f in findings if f.bug == "unknown"]
    result = []
    for finding in known.values():
        if finding.confidence == "proved":
            joined = [f for f in unknown if finding.side in f.side.split(" or ")]
            unknown = [f for f in unknown if f not in joined]
            more = tuple(line for f in joined for line in f.evidence)
            finding = replace(finding, evidence=finding.evidence + more)
        result.append(finding)
    return sorted([*result, *unknown], key=lambda finding: RANKS.index(finding.confidence))


def _failed(check: Check) -> Finding:
    """An identity fails on a side of which nothing else is known."""
    return finding_of(
        check.side,
        "unknown",
        check.where,
        "medium",
        [f"{check.text} (rounding excuses {check.allowed:.1g}): off by {check.value:.3g}"],
        {
            "I1": ("padded-keys", "neighbour-leak", "not-normalised"),
            "I2": ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p"),
        }.get(check.name, ("mask-missing-in-backward", "causal-dropped")),
        title=f"an identity fails: {check.text}",
        look_at="P, lse and D of one row: they must be of one softmax, with one mask",
    )


def _nothing(
    printed: Sequence[Printed], figures: Sequence[Number], facts: list[str]
) -> Iterator[Finding]:
    """No pair, no identity: errors alone say nothing without a size, unless they are small."""
    errors = [f for f in figures if f.error]
    large = [f for f in errors if not abs(f.value) <= 1e-2]
    if errors and not large:
        facts.append("the errors are small, but nothing says how large the values are")
        return
    evidence = [f"{f.label} {f.part}".strip() + f": {f.value:.3g}" for f in large]
    evidence = evidence or [f"{p.title}: printed once" for p in printed] or ["no error is printed"]
    yield finding_of(
        "unknown",
        "unknown",
        "the whole log",
        "low",
        evidence[:8],
        title="nothing can be compared: no tensor is printed by both sides",
        look_at="print one tensor of both sides, with the side in its name (dq_reference, "
        "dq_candidate), or say which two words name the sides",
    )

"""What a few printed digits prove: by the rows of a side alone, and by how two sides differ."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.printed import CONSTANT, ROUNDING, Pair, Printed, paired, read_log

SHOWN = 12
LOG2_E = 1 / math.log(2)
_near = partial(math.isclose, rel_tol=CONSTANT / 4)
OTHER_MASK = "mask-missing-in-backward"
OF_ALL_KEYS = "D is that of the masked output, P that of all keys"
# what rows with other sums may mean
OF_P = ("padded-keys", "neighbour-leak", "not-normalised")
OF_DS = ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p", OTHER_MASK)


def explain_log(text: str) -> Diagnosis:
    """What the tensors that ``text`` prints prove. ValueError where none can be read or judged."""
    printed = read_log(text)
    pairs = paired(printed)
    sides = {p: side for pair in pairs for p, side in zip(pair.both, pair.sides, strict=True)}
    known = list(sides.values())
    for p in printed:
        sides.setdefault(p, next((side for side in known if side in p.name), p.name))
    rows = {p: Rows(p, side) for p, side in sides.items() if p.of_softmax}
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    causal = said == {"true"} if len(said) == 1 else None  # None: neither is said, or both
    found = [one.finding for one in rows.values() if one.masked_delta]
    for pair in (pair for pair in pairs if not pair.agrees):  # from proofs to descriptions
        of_either = [rows[p] for p in pair.both if p in rows]
        found.append(_rows(pair, of_either, causal) or _factor(pair, causal) or _structure(pair))
    if pairs and not any(p.values.any() for pair in pairs for p in pair.both):
        title = ", ".join(pair.title for pair in pairs)
        found.append(finding("both", "vacuous", title, "medium", ["all that is printed is 0"]))
    findings = _merged(found)
    blamed = {side for one in findings for side in one.side.split(" or ")}
    findings += [one.finding for one in rows.values() if one.wrong.any() and one.side not in blamed]
    right = dict.fromkeys(one.side for one in rows.values() if one.right)
    if not (findings or pairs or right):
        need = "print one of both sides, under names such as dq_mine and dq_reference"
        raise ValueError(f"{len(printed)} tensors are printed, which say nothing: {need}")
    facts = [f"{pair.title}: they agree in what is printed" for pair in pairs if pair.agrees]
    compared = {p for pair in pairs for p in pair.both}
    alone = ", ".join(dict.fromkeys(p.name for p in printed if p not in compared))
    facts += [f"without a partner to compare with: {alone}"] if alone else []
    return Diagnosis("what the log proves", tuple(findings), (*right,), tuple(facts))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug, the surest first; beside a proof none that is unknown."""
    proved = {one.side for one in findings if one.confidence == "proved"}
    known: dict[tuple[str, str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: one.rank):
        key = one.side, one.bug, one.title
        if one.bug != "unknown" or proved.isdisjoint(one.side.split(" or ")):
            known[key] = known[key].joined(one) if key in known else one
    return list(known.values())


class Rows:
    """The rows of one whole printed P, which sum to 1, or dS, which sum to 0. wrong: rows whose
    sums are off that by more than ``allowed``. right: there are some, and none is wrong. inside:
    sums over the keys that a causal mask allows. unmasked: the largest entry of the other keys, 0
    where that is what is printed. masked_delta: P of all keys with D of the masked output, so that
    rows of dS sum to 0 over the causal keys alone."""

    def __init__(self, printed: Printed, side: str) -> None:
        self.name, self.side, self.x = printed.name, side, printed.values
        x, (rows, keys) = self.x, self.x.shape[-2:]
        self.must, causal = int(printed.kind == "P"), np.tri(rows, keys, keys - rows)
        self.sums, self.inside = x.sum(axis=-1), (x * causal).sum(axis=-1)
        # a row's own size may be that of a small difference, dP - D
        digits, largest = 0.505 * printed.unit * keys, np.abs(x).sum(axis=-1).max()
        self.allowed = float(digits + 4 * ROUNDING * largest)
        self.wrong = np.abs(self.sums - self.must * x.any(axis=-1)) > self.allowed  # 0 of no keys
        self.right = bool(x.any() and not self.wrong.any())
        above = float(np.abs(x * (1 - causal)).max())
        self.unmasked = above if above > 2 * printed.unit else 0.0
        fine = digits + ROUNDING * np.abs(x).sum(axis=-1)
        parts = ((np.abs(x) * seen).sum(axis=-1) for seen in (causal, 1 - causal))
        telling = np.logical_and(*(part > 10 * fine for part in parts)).any()
        only = telling and (np.abs(self.inside) <= fine).all()
        self.masked_delta = not self.must and bool(self.wrong.any() and only)

    @property
    def said(self) -> str:
        sums = f"{listed(self.sums)} (rounding excuses {self.allowed:.1g})"
        return f"rows of {self.name} must sum to {self.must}, but sum to {sums}"

    @property
    def finding(self) -> Finding:
        """What rows that are wrong prove, or mean where nothing else is known of their side."""
        where = f"{self.name}, {named('row', np.unique(np.nonzero(self.wrong)[-1]))}"
        if self.masked_delta:
            most, first = (f"{np.abs(x).max():.1g}" for x in (self.inside, self.inside[..., 0]))
            inside = f"{self.name}: each row up to the diagonal does sum to 0 (off by {most} at "
            inside += f"most, by {first} in the first row, which sees one key): {OF_ALL_KEYS}"
            return finding(self.side, OTHER_MASK, where, "proved", (self.said, inside))
        others = OF_P if self.must else OF_DS
        look_at = "P, lse and D of one row: they must be of one softmax, with one mask"
        title = f"rows of {'P' if self.must else 'dS'} must sum to {self.must}, and do not"
        return Finding(self.side, "unknown", title, where, "medium", (self.said,), look_at, others)


def _rows(pair: Pair, rows: Sequence[Rows], causal: bool | None) -> Finding | None:
    """Rows of one side have the right sums, those of the other do not; or one side masks alone."""
    if len(rows) < 2:
        return None
    own, right = sorted(rows, key=lambda one: (bool(one.wrong.any()), one.unmasked), reverse=True)
    if own.wrong.any() and not right.wrong.any():
        said = [own.said, f"{right.name} is right: its rows sum to {listed(right.sums)}"]
        gap = own.x - right.x
        total = gap.sum(axis=-1, keepdims=True)
        one_sign = (gap * np.sign(total) >= -pair.digits - 2 * ROUNDING * np.abs(total)).all()
        if own.must or not one_sign or bool(own.unmasked) != bool(right.unmasked):
            evidence = dict.fromkeys((*own.finding.evidence, *said))
            return replace(own.finding, evidence=tuple(evidence))
        said.append("of one sign in each row, they differ by P times a number: by D, not by P")
        alike = ("delta-of-another-out", "lse-gradient-dropped")
        return finding(own.side, "delta-omitted", own.name, "medium", said, *alike)
    if own.wrong.any() or right.unmasked or not own.unmasked or causal is False:
        return None
    said = [f"{own.name} above the diagonal: up to {own.unmasked:.3g}; {right.name}: 0"]
    others = ("causal-off-by-one", "neighbour-leak", OTHER_MASK)
    return finding(own.side, "causal-dropped", own.name, "medium", said, *others)


def _factor(pair: Pair, causal: bool | None) -> Finding | None:
    """One factor between two sides, or of P between their scores: which one."""
    power = pair.power if pair.factor is None else None
    slope = pair.factor if power is None else power
    if slope is None:
        return None
    larger = int(abs(slope) < 1)
    ratio = 1 / slope if larger else slope
    side, other = pair.sides[larger], pair.sides[1 - larger]
    where, shape = pair.both[larger].name, pair.a.values.shape
    what = pair.title if power is None else f"log of {pair.title}, less its mean in each row,"
    said = [f"{what} = {slope:.4g} on the {pair.a.values.size} entries that both print, a constant"]
    if power is not None:
        root = f" = sqrt({round(ratio**2)})" if _near(ratio**2, round(ratio**2)) else ""
        said.append(f"the scores of {side} are {ratio:.4g}{root} times those of {other}")
        return finding(side, "score-scale", where, "medium", said)
    if pair.kind == "lse" and _near(ratio, LOG2_E):
        return finding(side, "lse-base-2", where, "high", [*said, f"log2(e) = {LOG2_E:.4f}"])
    if pair.kind in ("dQ", "dK") and pair.a.whole and _near(ratio, math.sqrt(shape[-1])):
        words = f"sqrt(head_dim) = sqrt({shape[-1]}): {side} lacks softmax_scale there"
        said.append(f"{words}, or {other} applies it twice")
        return finding(side, "output-scale", where, "medium", said)
    # zero keys in the denominator divide by nearly one number
    shrunk = not causal and ratio >= 1 and pair.kind in ("", "O", "dV")
    title = f"the two sides differ by a constant factor of {ratio:.4g}"
    look_at = "softmax_scale, a mean for a sum, a head count; print a sequence of another length: "
    look_at += "padding gives another ratio for each"
    rest = pair.title, "medium", tuple(said), look_at, ("padded-keys",) * shrunk
    return Finding(pair.either, "unknown", title, *rest)


def _structure(pair: Pair) -> Finding:
    """No known relation: which rows differ, and where numbers are missing."""
    worst = float(pair.difference.max(initial=0.0))
    said = [f"{pair.title}: largest difference {worst:.3g}, values of size {pair.size:.3g}"]
    equal = pair.alike.reshape(-1, pair.alike.shape[-1]).all(axis=-1)
    if equal.any() and not equal.all():
        said.append(f"they differ in {named('row', np.flatnonzero(~equal))}, not in others")
    said += [f"{p.name} is 0 in all printed entries" for p in pair.both if not p.values.any()]
    side, title = pair.either, "the two sides differ, in no way that these entries explain"
    if not pair.finite.all():
        counts = [int((~np.isfinite(p.values)).sum()) for p in pair.both]
        names = (f"{p.name} {count}" for p, count in zip(pair.both, counts, strict=True))
        said.insert(0, f"entries that are NaN or infinite: {', '.join(names)}")
        title = "NaN or infinity where the other side has numbers"
        side = side if all(counts) else pair.sides[counts.index(max(counts))]
    look_at = "whole rows of a small case, dS and P beside the gradients; or save arrays"
    return Finding(side, "unknown", title, pair.title, "low", tuple(said), look_at)


def listed(values: np.ndarray) -> str:
    return ", ".join(f"{value:z.4f}" for value in np.ravel(values)[:SHOWN])

"""What a text log can prove: tensors and errors that somebody printed, read back and judged.

A print holds a few digits of a few corners, so little can be recomputed from it, but much can be
excluded. ``text`` reads, ``pairs`` fits the entries that both sides print, ``rows`` checks a side
alone, ``rules`` names why two sides differ.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import Pair, labels_of, paired
from rawattn.check.diagnose.logs.rows import Rows, identities, rows_of
from rawattn.check.diagnose.logs.rules import Log, differs
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Number, Printed
from rawattn.check.diagnose.logs.text import read_log

MOST_ROWS = 64  # that have slopes of their own
REPEATED = re.compile(r"repeat|rerun|run.to.run|bitwise|determin|same", re.IGNORECASE)


def explain_log(
    text: str,
    *,
    lengths: tuple[int, ...] | None = None,
    names: tuple[str, str] | None = None,
) -> Diagnosis:
    """What the tensors and errors that ``text`` prints prove.

    lengths: of the sequences, where they are known. names: two words, each in the names of one
    side's tensors; found without them where the names say a quantity. Raises ValueError where
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
    if lengths is not None and (min(lengths, default=-1) < 0 or not any(lengths)):
        raise ValueError(f"lengths must be counts of tokens, not all of them 0; were {lengths}")
    rows = {p.start: rows for p in printed if (rows := rows_of(p)) is not None}
    log = Log(lengths or (), rows, _causal(text, rows.values()))
    pairs = paired(printed, names)
    sides = {p.start: "_".join(p.side) or p.title for p in printed}
    if names is not None:
        sides |= {start: name for start, (name, _) in labels_of(printed, names).items()}
    checks = tuple(identities(printed, rows, log.causal, sides))
    compared = {p.start for pair in pairs for p in (pair.a, pair.b)}
    findings, facts = _judged(pairs, log)
    for start, own in rows.items():  # a dS on its own proves what needs no other side
        if own.masked_delta and start not in compared:
            given = (sides[start], "mask-missing-in-backward", own.where, "proved", own.evidence)
            findings.append(finding(*given))
    findings = _merged([*findings, *_exactly_zero(figures, pairs)])
    blamed = {side for f in findings for side in f.side.split(" or ")}
    findings += [_failed(c) for c in checks if c.verdict == "FAIL" and c.side not in blamed]
    if not findings and not pairs and all(check.verdict != "pass" for check in checks):
        findings += _nothing(printed, figures, facts)
    alone = [p.title for p in printed if p.start not in compared]
    figures_too = f" and {_counted(len(figures), 'number')}" if figures else ""
    tensors, count = _counted(len(printed), "printed tensor"), _counted(len(pairs), "pair")
    facts = [f"{tensors}{figures_too}; {count} compared", *facts]
    if alone:
        facts.append("without a partner to compare with: " + ", ".join(dict.fromkeys(alone)))
    levels = tuple(level for pair in pairs for level in _levels(pair))
    return Diagnosis("what the log proves", tuple(findings), checks, levels, facts=tuple(facts))


def _causal(text: str, rows: Iterable[Rows]) -> bool | None:
    """Whether the log says that the mask is causal, or a dS shows it."""
    if any(one.masked for one in rows):
        return True
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    return said == {"true"} if len(said) == 1 else None


def _levels(pair: Pair) -> Iterator[Level]:
    """Slopes of the first side over the second, of all and of every printed row; where a mask is
    evident, of the entries that it leaves, and then the error of the others."""
    parts = {"printed entries" if pair.seen.all() else "visible entries": pair.seen}
    parts |= pair.rows if len(pair.rows) <= MOST_ROWS else {}
    for n, (label, chosen) in enumerate(parts.items()):
        fit = pair.fit(chosen)
        slope, residual = (fit.slope, fit.residual) if fit else (math.nan, math.nan)
        error = float(pair.difference[chosen].max(initial=0.0))
        yield Level(pair.title, "row" if n else "all", label, slope, residual, error)
        masked = float(pair.difference[~pair.seen].max(initial=0.0))
        if masked and not n:
            yield Level(pair.title, "all", "masked entries", math.nan, math.nan, masked)


def _judged(pairs: Sequence[Pair], log: Log) -> tuple[list[Finding], list[str]]:
    facts, findings = [], []
    empty = [pair for pair in pairs if not pair.a.values.any() and not pair.b.values.any()]
    for pair in pairs:
        size = f"{pair.a.values.size} entries are printed on both sides"
        if pair in empty:
            facts.append(f"{pair.title}: {size}, and all of them are 0: nothing is compared")
        elif pair.agrees:
            facts.append(_agreement(pair, size))
        else:
            findings.append(differs(pair, log))
    if empty and len(empty) == len(pairs):
        where = ", ".join(pair.title for pair in pairs)
        exact = all(pair.a.full and not pair.digits.any() for pair in pairs)
        evidence = ("every printed entry of both sides is 0",)
        sure = "high" if exact else "medium"
        findings.append(finding("both", "vacuous", where, sure, evidence))
    return findings, facts


def _agreement(pair: Pair, size: str) -> str:
    if (pair.difference <= pair.digits).all():
        return f"{pair.title}: {size}, and agree in every printed digit"
    off = float(pair.difference.max()) / pair.size
    words = f"{pair.title}: {size}, and differ by at most {off:.1%} of their size"
    if pair.a.dtype in SIXTEEN_BIT or pair.b.dtype in SIXTEEN_BIT:
        return f"{words}, as rounding to 16 bits does"
    return f"{words}: more than sums in float32 do, no more than rounding to 16 bits on the way"


def _exactly_zero(figures: Sequence[Number], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Printed errors of exactly 0, and nothing that shows that values are not 0."""
    errors = [f for f in figures if f.error and not REPEATED.search(f"{f.context} {f.label}")]
    zero = dict.fromkeys(f.label for f in errors if not f.value and not f.unit)
    sized = any(not f.error and f.value and not f.unit == 1.0 for f in figures)
    large = any(not f.value <= 2.0**-20 or (f.unit and not f.value) for f in errors)
    if zero and not sized and not large and not any(x.agrees and x.size > 0 for x in pairs):
        evidence = (
            f"{', '.join(zero)}: exactly 0 between two implementations. Sums in another order "
            "differ in the last bit somewhere, unless all results are 0, or one code ran twice",
            "the log prints errors without the size of what was compared",
        )
        look_at = (
            "print max |reference| beside every error; make values of unit size, by a random "
            "cotangent and a sum in place of a mean; then multiply one side by 0 and see that the "
            "comparison fails"
        )
        where = f"printed errors: {', '.join(zero)}"
        yield finding("both", "vacuous", where, "medium", evidence, look_at=look_at)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug; what is unknown joins the proof that explains its side."""
    known: dict[tuple[str, str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: (one.bug == "unknown", one.rank)):
        sides = one.side.split(" or ")
        proof = next((x for x in known.values() if x.rank == 0 and x.side in sides), None)
        if one.bug == "unknown" and proof is not None:
            one = replace(proof, evidence=proof.evidence + one.evidence)
            known[one.side, one.bug, one.title] = one
        else:
            before = known.get((one.side, one.bug, one.title))
            known[one.side, one.bug, one.title] = before.joined(one) if before else one
    return sorted(known.values(), key=lambda one: one.rank)


def _failed(check: Check) -> Finding:
    """An identity fails on a side of which nothing else is known."""
    others = {
        "I1": ("padded-keys", "neighbour-leak", "not-normalised"),
        "I2": ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p"),
    }.get(check.name, ("mask-missing-in-backward", "causal-dropped"))
    said = f"{check.text} (rounding excuses {check.allowed:.1g}): off by {check.value:.3g}"
    look_at = "P, lse and D of one row: they must be of one softmax, with one mask"
    given = (check.side, "unknown", check.where, "medium", (said,), others)
    return finding(*given, title=f"an identity fails: {check.text}", look_at=look_at)


def _nothing(
    printed: Sequence[Printed], figures: Sequence[Number], facts: list[str]
) -> Iterator[Finding]:
    """No pair, no identity: errors alone say nothing without a size, unless they are small."""
    errors = [f for f in figures if f.error]
    large = [f"{f.label}: {f.value:.3g}" for f in errors if not abs(f.value) <= 1e-2]
    if errors and not large:
        facts.append("the errors are small, but nothing says how large the values are")
        return
    evidence = large or [f"{p.title}: printed once" for p in printed] or ["no error is printed"]
    title = "nothing can be compared: no tensor is printed by both sides"
    look_at = (
        "print one tensor of both sides, with the side in its name (dq_reference, dq_candidate), "
        "or say which two words name the sides"
    )
    given = ("unknown", "unknown", "the whole log", "low", evidence[:8])
    yield finding(*given, title=title, look_at=look_at)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"

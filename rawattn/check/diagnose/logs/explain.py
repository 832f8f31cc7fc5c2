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
from rawattn.check.diagnose.logs.rows import Rows, identities
from rawattn.check.diagnose.logs.rules import Log, differs
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Number
from rawattn.check.diagnose.logs.text import read_log

MOST_ROWS = 64  # that have slopes of their own
REPEATED = re.compile(r"repeat|rerun|run.to.run|bitwise|determin|same", re.IGNORECASE)
OTHERWISE = ("mask-missing-in-backward", "causal-dropped")
MAY_BE = {  # where an identity fails and nothing else is known
    "I1": ("padded-keys", "neighbour-leak", "not-normalised"),
    "I2": ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p"),
}


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
    rows = {p.start: Rows(p) for p in printed if p.kind == "dS" and p.whole}
    log = Log(lengths or (), rows, _causal(text, rows.values()))
    pairs = paired(printed, names)
    sides = {p.start: "_".join(p.side) or p.title for p in printed}
    sides |= (
        {start: side for start, (side, _) in labels_of(printed, names).items()} if names else {}
    )
    sides |= {p.start: side for one in pairs for p, side in zip(one.both, one.sides, strict=True)}
    checks = tuple(identities(printed, rows, bool(log.causal), sides))
    findings = [one for start, own in rows.items() for one in own.judged(sides[start])]
    findings += [differs(pair, log) for pair in pairs if not pair.agrees]
    findings = _merged([*findings, *_zeros(pairs), *_exactly_zero(figures, pairs)])
    blamed = {side for f in findings for side in f.side.split(" or ")}
    findings += [_failed(c) for c in checks if c.verdict == "FAIL" and c.side not in blamed]
    compared = {p.start for pair in pairs for p in pair.both}
    alone = dict.fromkeys(p.title for p in printed if p.start not in compared)
    figures_too = f" and {_counted(len(figures), 'number')}" if figures else ""
    tensors, count = _counted(len(printed), "printed tensor"), _counted(len(pairs), "pair")
    facts = [f"{tensors}{figures_too}; {count} compared"]
    facts += [_agreement(pair) for pair in pairs if pair.agrees]
    if not findings and not pairs and all(check.verdict != "pass" for check in checks):
        errors = [f for f in figures if f.error]
        large = [f"{f.label}: {f.value:.3g}" for f in errors if not abs(f.value) <= 1e-2]
        if large or not errors:
            findings.append(_nothing(large or [f"{title}: printed once" for title in alone]))
        else:
            facts.append("the errors are small, but nothing says how large the values are")
    facts += ["without a partner to compare with: " + ", ".join(alone)] if alone else []
    levels = tuple(level for pair in pairs for level in _levels(pair))
    return Diagnosis("what the log proves", tuple(findings), checks, levels, facts=tuple(facts))


def _causal(text: str, rows: Iterable[Rows]) -> bool | None:
    """Whether the log says that the mask is causal, or a dS shows it."""
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    if any(one.masked for one in rows):
        return True
    return said == {"true"} if len(said) == 1 else None


def _levels(pair: Pair) -> Iterator[Level]:
    """Slopes of the first side over the second, of all and of every printed row; where a mask is
    evident, of the entries that it leaves, and then the error of the others."""
    parts = {"printed entries" if pair.seen.all() else "visible entries": pair.seen}
    parts |= {"masked entries": ~pair.seen} if pair.difference[~pair.seen].any() else {}
    whole = len(parts)
    parts |= pair.rows if len(pair.rows) <= MOST_ROWS else {}
    for n, (label, chosen) in enumerate(parts.items()):
        fit = None if label == "masked entries" else pair.fit(chosen)
        slope, residual = (fit.slope, fit.residual) if fit else (math.nan, math.nan)
        error = float(pair.difference[chosen].max(initial=0.0))
        yield Level(pair.title, "row" if n >= whole else "all", label, slope, residual, error)


def _agreement(pair: Pair) -> str:
    words = f"{pair.title}: {pair.a.values.size} entries are printed on both sides, and"
    if not pair.size:
        return f"{words} all of them are 0: nothing is compared"
    if (pair.difference <= pair.digits).all():
        return f"{words} agree in every printed digit"
    words += f" differ by at most {float(pair.difference.max()) / pair.size:.1%} of their size"
    if pair.a.dtype in SIXTEEN_BIT or pair.b.dtype in SIXTEEN_BIT:
        return f"{words}, as rounding to 16 bits does"
    return f"{words}: more than sums in float32 do, no more than rounding to 16 bits on the way"


def _zeros(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Nothing but zeros is compared."""
    if pairs and not any(p.values.any() for pair in pairs for p in pair.both):
        exact = all(pair.a.full and not pair.digits.any() for pair in pairs)
        where, evidence = (
            ", ".join(x.title for x in pairs),
            "every printed entry of both sides is 0",
        )
        yield finding("both", "vacuous", where, "high" if exact else "medium", (evidence,))


def _exactly_zero(figures: Sequence[Number], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Printed errors of exactly 0, and nothing that shows that values are not 0."""
    errors = [f for f in figures if f.error and not REPEATED.search(f"{f.context} {f.label}")]
    zero = ", ".join(dict.fromkeys(f.label for f in errors if not f.value and not f.unit))
    sized = any(not f.error and f.value and not f.unit == 1.0 for f in figures)
    large = any(not f.value <= 2.0**-20 or (f.unit and not f.value) for f in errors)
    if zero and not sized and not large and not any(x.agrees and x.size > 0 for x in pairs):
        evidence = (
            f"{zero}: exactly 0 between two implementations. Sums in another order "
            "differ in the last bit somewhere, unless all results are 0, or one code ran twice",
            "the log prints errors without the size of what was compared",
        )
        look_at = (
            "print max |reference| beside every error; make values of unit size, by a random "
            "cotangent and a sum in place of a mean; then multiply one side by 0 and see that the "
            "comparison fails"
        )
        where = f"printed errors: {zero}"
        yield finding("both", "vacuous", where, "medium", evidence, look_at=look_at)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug; what is unknown joins the proof that explains its side."""
    known: dict[tuple[str, str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: (one.bug == "unknown", one.rank)):
        sides, key = one.side.split(" or "), (one.side, one.bug, one.title)
        proofs = [(of, x) for of, x in known.items() if x.rank == 0 and x.side in sides]
        if one.bug == "unknown" and proofs:
            key, proof = proofs[0]
            known[key] = replace(proof, evidence=proof.evidence + one.evidence)
        else:
            known[key] = known[key].joined(one) if key in known else one
    return sorted(known.values(), key=lambda one: one.rank)


def _failed(check: Check) -> Finding:
    """An identity fails on a side of which nothing else is known."""
    said = f"{check.text} (rounding excuses {check.allowed:.1g}): off by {check.value:.3g}"
    look_at = "P, lse and D of one row: they must be of one softmax, with one mask"
    others = MAY_BE.get(check.name, OTHERWISE)
    given = (check.side, "unknown", check.where, "medium", (said,), others)
    return finding(*given, title=f"an identity fails: {check.text}", look_at=look_at)


def _nothing(evidence: Sequence[str]) -> Finding:
    """No pair, no identity: errors alone say nothing without a size."""
    title = "nothing can be compared: no tensor is printed by both sides"
    look_at = (
        "print one tensor of both sides, with the side in its name (dq_reference, dq_candidate), "
        "or say which two words name the sides"
    )
    said = evidence[:8] or ["no error is printed"]
    given = ("unknown", "unknown", "the whole log", "low", said)
    return finding(*given, title=title, look_at=look_at)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"

"""What a text log can prove: tensors that somebody printed, read back and judged.

A print holds a few digits of a few corners, so little can be recomputed from it, but much can be
excluded. ``text`` reads, ``pairs`` fits the entries that both sides print, ``rows`` checks a side
alone, ``rules`` names why two sides differ.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rawattn.check.diagnose.findings import Check, Diagnosis, Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import Pair, paired, sided
from rawattn.check.diagnose.logs.rows import Rows
from rawattn.check.diagnose.logs.rules import OTHER_MASK, Log, differs
from rawattn.check.diagnose.logs.text import read_log

MAY_BE = {  # where an identity fails and nothing else is known
    "I1": ("padded-keys", "neighbour-leak", "not-normalised"),
    "I2": ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p"),
    "mask": (OTHER_MASK, "causal-dropped"),
}


def explain_log(text: str, *, names: Sequence[str] = ()) -> Diagnosis:
    """What the tensors that ``text`` prints prove.

    names: two words, each in the names of one side's tensors; found without them where the names
    say a quantity. Raises ValueError where there is nothing to judge, or what there is cannot be
    read.
    """
    text, printed = read_log(text)
    told = sided(printed, names)
    pairs = paired(told)
    known = {p.start: p for p in (*told, *(p for pair in pairs for p in pair.both))}
    sides = [replace(p, side=p.side.replace(" ", "_") or p.name) for p in known.values()]
    softmax = [Rows(p) for p in sides if p.of_softmax]
    rows = {one.printed.start: one for one in softmax if one.printed.kind == "dS"}
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    causal = said == {"true"} if len(said) == 1 else None
    causal = any(one.masked for one in rows.values()) or causal
    checks = tuple(check for one in softmax for check in one.checks(bool(causal)))
    log = Log(rows, causal)
    found = [one for own in rows.values() for one in own.judged()]
    found += [differs(pair, log) for pair in pairs if not pair.agrees]
    findings = _merged([*found, *_vacuous(pairs)])
    blamed = {side for f in findings for side in f.side.split(" or ")}
    findings += [_failed(c) for c in checks if c.verdict == "FAIL" and c.side not in blamed]
    if not (findings or pairs or any(check.verdict == "pass" for check in checks)):
        raise ValueError(
            f"{len(printed)} tensors are printed, which say nothing: print one of both sides, with "
            "the side in its name, such as 'dq_reference: tensor([[...]])', or say which two words "
            "name the sides"
        )
    facts = [f"printed tensors: {len(printed)}; pairs compared: {len(pairs)}"]
    for pair in (pair for pair in pairs if pair.agrees):
        share = float(pair.difference.max()) / (pair.size or 1)
        entries = f"{pair.a.values.size} entries are printed of both"
        facts.append(f"{pair.title}: {entries}, and agree to {share:.1%} of their size")
    compared = {p.start for pair in pairs for p in pair.both}
    alone = ", ".join(dict.fromkeys(p.name for p in printed if p.start not in compared))
    facts += [f"without a partner to compare with: {alone}"] if alone else []
    return Diagnosis("what the log proves", tuple(findings), checks, facts=tuple(facts))


def _vacuous(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Nothing but zeros is compared."""
    if pairs and not any(p.values.any() for pair in pairs for p in pair.both):
        exact = all(pair.a.full and not pair.digits.any() for pair in pairs)
        where = ", ".join(pair.title for pair in pairs)
        said = ("every printed entry of both sides is 0",)
        yield finding("both", "vacuous", where, "high" if exact else "medium", said)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug, the surest first; none that is unknown beside a proof, which
    explains its side."""
    proved = {one.side for one in findings if one.confidence == "proved"}
    known: dict[tuple[str, str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: one.rank):
        key = one.side, one.bug, one.title
        if one.bug != "unknown" or proved.isdisjoint(one.side.split(" or ")):
            known[key] = known[key].joined(one) if key in known else one
    return list(known.values())


def _failed(check: Check) -> Finding:
    """An identity fails on a side of which nothing else is known."""
    said = f"{check.text} (rounding excuses {check.allowed:.1g}): off by {check.value:.3g}"
    look_at = "P, lse and D of one row: they must be of one softmax, with one mask"
    given = (check.side, "unknown", check.where, "medium", (said,), MAY_BE[check.name])
    return finding(*given, title=f"an identity fails: {check.text}", look_at=look_at)

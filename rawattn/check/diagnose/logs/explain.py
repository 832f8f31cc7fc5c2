"""What a text log can prove: tensors that somebody printed, read back and judged.

A print holds a few digits of a few corners, so little can be recomputed from it, but much can be
excluded. ``printed`` reads, ``pairs`` fits the entries that both sides print, ``rules`` checks a
side alone and names why two sides differ.
"""

import re
from collections.abc import Sequence

from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import Pair, paired
from rawattn.check.diagnose.logs.printed import read_log
from rawattn.check.diagnose.logs.rules import Rows, differs


def explain_log(text: str) -> Diagnosis:
    """What the tensors that ``text`` prints prove. ValueError where nothing can be judged, or what
    is printed cannot be read."""
    printed = read_log(text)
    pairs = paired(printed)
    sides = {p: side for pair in pairs for p, side in zip(pair.both, pair.sides, strict=True)}
    known = list(sides.values())
    for p in printed:
        sides.setdefault(p, next((side for side in known if side in p.name), p.name))
    rows = {p: Rows(p, side) for p, side in sides.items() if p.of_softmax}
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    causal = said == {"true"} if len(said) == 1 else None
    found = [one.finding for one in rows.values() if one.masked_delta]
    for pair in (pair for pair in pairs if not pair.agrees):
        found.append(differs(pair, [rows[p] for p in pair.both if p in rows], causal))
    findings = _merged([*found, *_vacuous(pairs)])
    blamed = {side for one in findings for side in one.side.split(" or ")}
    wrong = [one for one in rows.values() if one.wrong.any() and one.side not in blamed]
    findings += [one.finding for one in wrong]
    right = dict.fromkeys(one.side for one in rows.values() if one.right)
    if not (findings or pairs or right):
        raise ValueError(
            f"{len(printed)} tensors are printed, which say nothing: print one of both sides under "
            "names that differ in one word, such as dq_mine and dq_reference"
        )
    facts = [f"{pair.title}: they agree in what is printed" for pair in pairs if pair.agrees]
    compared = {p for pair in pairs for p in pair.both}
    alone = ", ".join(dict.fromkeys(p.name for p in printed if p not in compared))
    facts += [f"without a partner to compare with: {alone}"] if alone else []
    return Diagnosis("what the log proves", tuple(findings), (*right,), tuple(facts))


def _vacuous(pairs: Sequence[Pair]) -> list[Finding]:
    """Nothing but zeros is compared."""
    if not pairs or any(p.values.any() for pair in pairs for p in pair.both):
        return []
    where = ", ".join(pair.title for pair in pairs)
    sure = "high" if all(pair.a.whole and not pair.digits for pair in pairs) else "medium"
    return [finding("both", "vacuous", where, sure, ["every printed entry of both sides is 0"])]


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

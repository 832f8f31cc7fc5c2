"""What only a case itself shows: ignored strides, NaN that nobody must see, rows past the end."""

from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.engine.question import BY_ROW, Answers
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.judge.proofs import finding, of_past
from rawattn.check.expected import Expected, expect

# fields of a Question that Tensors have too
ARRAYS = ("q", "k", "v", "dout", "dlse", "tq", "tk", "tv")
# what must not matter: the class and how sure it is (keys that are seen do the same where all of
# them are NaN), the title, the evidence, and where to look
STRIDES = (
    *("input-layout", "high"),
    "the strides of {inputs} are ignored, as if they were contiguous",
    "right with all inputs contiguous, wrong with {inputs} strided",
    "where addresses are made: strides of tokens and heads, given or asked for",
)
NANS = (
    *("neighbour-leak", "medium"),
    "NaN in rows of {inputs} that nobody sees gets into {results}, if only as 0 * NaN",
    "right with all inputs 0 in rows that nobody sees, wrong with {inputs} NaN there",
    "loads past the end of a sequence, of a list or of what is in use: such rows must be zeros in "
    "every product, not masked in P alone",
)


def of_traps(candidate: Candidate, case: Case, side: str) -> list[Finding]:
    """What is wrong with ``candidate``, called ``side``, where nothing else is."""
    expected = expect(candidate.fit(case))
    given = {name: getattr(expected.tensors, name, None) for name in (*ARRAYS, "block_scale")}
    there = {name: x for name, x in given.items() if x is not None}
    strided = {n: np.ascontiguousarray(x) for n, x in there.items() if not x.flags.c_contiguous}
    filled = {n: np.where(np.isnan(x), x.dtype.type(0), x) for n, x in there.items()}
    filled = {n: x for n, x in filled.items() if np.isnan(there[n]).any()}
    try:
        wrong = _failing(candidate, expected)
        for plain, trap in (strided, STRIDES), (filled, NANS):
            if plain and not _failing(candidate, expected, **plain):
                one = [n for n in plain if _failing(candidate, expected, **plain | {n: there[n]})]
                words = {"inputs": ", ".join(one), "results": ", ".join(wrong)}
                bug, sure, title, said, look_at = (text.format(**words) for text in trap)
                of = (side, bug, words["results"], sure, (said,))
                return [finding(*of, title=title, look_at=look_at)] if one else []
    except Exception:  # of which others tell
        return []
    return _of_past(expected, wrong, side)


def of_nan(found: Finding) -> bool:
    """Whether a finding says no more than that NaN gets into results."""
    return found.bug == NANS[0] and found.form is None


def _failing(candidate: Candidate, expected: Expected, **changes: Any) -> Answers:
    """The results that are wrong, with other inputs of the same numbers."""
    found = candidate.run(replace(expected, tensors=replace(expected.tensors, **changes)))
    there = ((name, of) for name, of in expected.targets.items() if name in found)
    return {name: found[name] for name, of in there if of.judge(found[name]).verdict == "FAIL"}


def _of_past(expected: Expected, wrong: Answers, side: str) -> list[Finding]:
    """Rows past the end, where all that is wrong is there."""
    for name, x in wrong.items():
        target, due = expected.targets[name], x.copy()
        if name in BY_ROW or target.sequence_of.shape != x.shape[:1]:
            return []
        due[target.sequence_of < 0] = 0
        if target.judge(due).verdict == "FAIL":
            return []
    return of_past(expected.case, wrong, side, "high")

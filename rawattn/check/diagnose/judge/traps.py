"""What only a case itself shows, not a small problem of its kind: strides that are ignored, rows
past the end that must stay 0."""

from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.engine.question import BY_ROW
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.judge.proofs import finding, of_past
from rawattn.check.expected import Expected, expect

# fields of a Question that Tensors have too
ARRAYS = ("q", "k", "v", "dout", "dlse", "tq", "tk", "tv")
Results = dict[str, np.ndarray]


def of_traps(candidate: Candidate, case: Case, side: str) -> list[Finding]:
    """What is wrong with ``candidate``, called ``side``, where nothing else is."""
    expected = expect(candidate.fit(case))
    try:
        wrong = _failing(candidate, expected)
        found = _of_strides(candidate, expected, wrong, side)
    except Exception:  # of which others tell
        return []
    return _of_past(expected, wrong, side) if found is None else found


def _failing(candidate: Candidate, expected: Expected, **changes: Any) -> Results:
    """The results that are wrong, with other inputs of the same numbers."""
    found = candidate.run(replace(expected, tensors=replace(expected.tensors, **changes)))
    there = ((name, of) for name, of in expected.targets.items() if name in found)
    return {name: found[name] for name, of in there if of.judge(found[name]).verdict == "FAIL"}


def _of_strides(
    candidate: Candidate, expected: Expected, wrong: Results, side: str
) -> list[Finding] | None:
    """Inputs whose strides are ignored; None where strides are not what is wrong."""
    given = {name: getattr(expected.tensors, name) for name in ARRAYS}
    strided = {n: x for n, x in given.items() if x is not None and not x.flags.c_contiguous}
    packed = {name: np.ascontiguousarray(x) for name, x in strided.items()}
    if not strided or _failing(candidate, expected, **packed):
        return None
    alone = {n: _failing(candidate, expected, **packed | {n: x}) for n, x in strided.items()}
    ignored = [name for name, tensors in alone.items() if tensors]
    said = [f"right with all inputs contiguous, wrong with {' or '.join(ignored)} strided"]
    title = f"the strides of {', '.join(ignored)} are ignored, as if they were contiguous"
    look_at = "where addresses are made: strides of tokens and heads, given or asked for"
    of = (side, "input-layout", ", ".join(wrong), "high", said)
    return [finding(*of, title=title, look_at=look_at)] if ignored else []


def _of_past(expected: Expected, wrong: Results, side: str) -> list[Finding]:
    """Rows past the end, where all that is wrong is there."""
    for name, x in wrong.items():
        target, due = expected.targets[name], x.copy()
        if name in BY_ROW or target.sequence_of.shape != x.shape[:1]:
            return []
        due[target.sequence_of < 0] = 0
        if target.judge(due).verdict == "FAIL":
            return []
    return of_past(expected.case, wrong, side, "high")

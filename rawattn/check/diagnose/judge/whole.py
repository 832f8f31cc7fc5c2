"""All rows of a file of which a part was judged: the others must be right too.

Of a bug that shows in the rest alone little is known; what moves offsets is tried on all of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.masks import neighbours
from rawattn.check.diagnose.catalogue.reading import reading
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, solve
from rawattn.check.diagnose.engine.question import (
    STAGES,
    Answers,
    Question,
    by_rows,
    given_to_backward,
    side_of,
)
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.evidence.precision import sizes
from rawattn.check.diagnose.findings import NAMELESS, Finding
from rawattn.check.diagnose.judge.cut import cost
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.transfer import Array

OFF = 2.0**-5  # of the size of a row: more than any rounding
FEW = 4  # sequences on which a bug is tried first
MOST = 20_000_000  # scores of all sequences and heads: of more nothing is said


def of_all(
    question: Question, answers: Answers, side: str, findings: Sequence[Finding]
) -> list[Finding]:
    """``findings`` of a part, and what all rows say where these name nothing."""
    named = any(one.bug not in NAMELESS or one.confidence == "high" for one in findings)
    if named or sum(cost(question, b) for b in range(question.batch)) > MOST:
        return [*findings]
    wrong = _wrong(question, answers, question.stages)
    if not wrong:
        return [*findings]
    forward = wrong.keys() & {*(() if question.sparse else STAGES["forward"])}
    rows = next(iter(wrong.values())).any(axis=1)
    few = [int(b) for b in np.unique(question.sequence_of("q")[rows])[:FEW]] if forward else []
    for name, text, asked, bug in _suspects(question) if forward else ():
        fits = not _wrong(asked, answers, ("forward",), bug, few)
        if fits and not _wrong(asked, answers, ("forward",), bug):
            said = ["all rows of all sequences are as if this were so"]
            where = f"forward pass: {', '.join(sorted(forward))}"
            return [finding(side, name, where, "high", said, title=text)]
    if any(one.bug != "rounding" for one in findings):
        return [*findings]
    places = {name: structure.where(question, name, bad) for name, bad in wrong.items()}
    said = [f"{name}: {'; '.join(found)}" for name, found in places.items()]
    first = {name: int(bad.any(axis=1).argmax()) for name, bad in wrong.items()}
    name = min(first, key=lambda name: first[name])
    title = f"rows of {', '.join(wrong)} are wrong, from row {first[name]} of {name} on"
    look_at = "offsets in memory (their width), grids, and workspaces: short packs are right"
    given = (side, "unknown", ", ".join(wrong), "medium", said)
    return [*findings, finding(*given, title=title, look_at=look_at)]


def _suspects(question: Question) -> Iterator[tuple[str, str, Question, Bug]]:
    """A class, words, and the question or the bug that moves all offsets."""
    offsets = question.cu_seqlens_q, question.cu_seqlens_k
    if not np.array_equal(*offsets):
        for text, (of_q, of_k) in {
            "cu_seqlens of the queries are taken for those of the keys": offsets[:1] * 2,
            "cu_seqlens of the keys are taken for those of the queries": offsets[1:] * 2,
        }.items():
            if of_q[-1] <= len(question.q) and of_k[-1] <= len(question.k):
                asked = replace(question, cu_seqlens_q=of_q, cu_seqlens_k=of_k)
                yield "offsets-shifted", text, asked, NO_BUG
    for bug in neighbours(question):
        if bug.name == "neighbour-leak":
            yield bug.name, f"{CLASSES[bug.name].title}: {bug.variant}", question, bug
    for name in "qkv":
        for by in maps.overflows(question, name):
            bug = Bug("offsets-shifted", "", ("forward",), steps=reading({name: name}, by))
            yield "offsets-shifted", f"{name} is read at other rows: {by.words}", question, bug


def _wrong(
    question: Question,
    answers: Answers,
    stages: Sequence[str],
    bug: Bug = NO_BUG,
    few: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """Rows (tokens, heads) of tensors that are off by more than any rounding; of a ``few``
    sequences, or of all. A row without a bug that cancels is judged by the size of what went in;
    that of a backward pass must be off whether that had the out and lse of the file or exact ones.
    """
    found: dict[str, np.ndarray] = {}
    for stage in stages:
        given = None if stage in ("forward", "jvp") else given_to_backward(question, answers)
        bad = _off(question, answers, stage, bug, few, given)
        if bad and given is not None and question.passed is None:
            exact = _off(question, answers, stage, bug, few, None)
            bad = {name: x & exact[name] for name, x in bad.items() if name in exact}
        found |= {name: x for name, x in bad.items() if x.any()}
    return found


def _off(
    question: Question,
    answers: Answers,
    stage: str,
    bug: Bug,
    few: Sequence[int],
    given: tuple[Array, Array] | None,
) -> dict[str, np.ndarray]:
    """``_wrong`` of a stage that was given these out and lse."""
    only = (lambda view: view.sequence in few) if few else None
    right = solve(question, stage, bug, given=given, only=only)
    found: dict[str, np.ndarray] = {}
    went_in: Answers | None = None if bug is NO_BUG else {}
    for name in (n for n in STAGES[stage] if n in answers and n in right and n != "delta"):
        a, b = (
            by_rows(name, np.asarray(x, dtype=np.float64)) for x in (answers[name], right[name])
        )
        sequence = question.sequence_of(side_of(name))
        inside = (np.isin(sequence, few) if few else sequence >= 0)[:, None]
        size = np.abs(np.where(np.isfinite(b), b, 0.0)).max(axis=2)
        with np.errstate(invalid="ignore"):
            off = np.nan_to_num(np.where(a == b, 0.0, np.abs(a - b)).max(axis=2), nan=np.inf)
        allowed = OFF * np.maximum(size, size[inside[:, 0]].mean() if inside.any() else 0.0)
        if (inside & (off > allowed)).any():
            went_in = sizes(question, stage, given) if went_in is None else went_in
            bad = inside & (off > np.maximum(allowed, OFF * went_in.get(name, 0.0)))
            found |= {name: bad} if bad.any() else {}
    return found

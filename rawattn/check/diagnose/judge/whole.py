"""All rows of a file of which a part was judged: the others must be right too.

Of a bug that shows in the rest alone little is known; what moves offsets is tried on all of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.masks import neighbours
from rawattn.check.diagnose.catalogue.reading import reading
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, solve
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.findings import NAMELESS, Finding
from rawattn.check.diagnose.judge.cut import cost
from rawattn.check.diagnose.judge.match import Stage, rows_off
from rawattn.check.diagnose.judge.proofs import finding

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
    works = [Stage(question, answers, stage, 0.0) for stage in question.stages]
    of = {name: work for work in works for name in work.tensors if name != "delta"}
    wrong = {name: bad for name, work in of.items() if (bad := work.bad(name, OFF)).any()}
    if not wrong:
        return [*findings]
    forward = sorted(name for name in wrong if of[name].stage == "forward" and not question.sparse)
    rows, every = next(iter(wrong.values())).any(axis=1), range(question.batch)
    few = np.unique(question.sequence_of("q")[rows])[:FEW].tolist() if forward else []
    for name, text, asked, bug in _suspects(question) if forward else ():
        if all(_fits(asked, answers, bug, of_these) for of_these in (few, every)):
            said = ["all rows of all sequences are as if this were so"]
            where = f"forward pass: {', '.join(forward)}"
            return [finding(side, name, where, "high", said, form=text)]
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
            yield bug.name, bug.variant, question, bug
    for name in "qkv":
        for by in maps.overflows(question, name):
            bug = Bug("offsets-shifted", "", ("forward",), steps=reading({name: name}, by))
            yield "offsets-shifted", f"{name} is read at other rows: {by.words}", question, bug


def _fits(question: Question, answers: Answers, bug: Bug, sequences: Sequence[int]) -> bool:
    """Whether the forward pass of these sequences is as with a bug."""
    right = solve(question, "forward", bug, only=lambda view: view.sequence in sequences)
    inside = np.isin(question.sequence_of("q"), sequences)[:, None]
    rows = np.broadcast_to(inside, question.q.shape[:2])
    return not any(
        rows_off(by_rows(n, answers[n]), by_rows(n, right[n]), rows, OFF).any()
        for n in answers.keys() & right.keys()
    )

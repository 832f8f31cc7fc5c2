"""A large problem: a part of it is computed hundreds of times, and all of its rows once or twice.

Of a bug that shows in the rest alone little is known; what moves offsets is tried on all of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.inputs import rearranged
from rawattn.check.diagnose.catalogue.masks import neighbours
from rawattn.check.diagnose.catalogue.reading import reading
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.parts import BY_HEADS, part
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.findings import NAMELESS, Finding
from rawattn.check.diagnose.judge.match import Stage, rows_off
from rawattn.check.diagnose.judge.proofs import finding

BY_HEAD = ("q", "dout", "tq", "out", "k", "v", "tk", "tv", *BY_HEADS, "sinks", "tsinks")
SCORES = 1_200_000  # of all heads, of a part
MOST = 20_000_000  # scores of all sequences and heads: of more nothing is said
OFF = 2.0**-5  # of the size of a row: more than any rounding
FEW = 4  # sequences on which a bug is tried first


def cost(question: Question, b: int) -> int:
    """Scores of a sequence, of all heads."""
    return question.lengths_q[b] * question.lengths_k[b] * question.num_heads_q


def cut(question: Question, answers: Answers) -> tuple[Question, Answers, str]:
    """Some neighbouring sequences, as many as there is time for; and what was done, in words.

    Of a single sequence that is too long, some key/value heads with their groups.
    """
    costs = [cost(question, b) for b in range(question.batch)]
    if sum(costs) <= SCORES:
        return question, answers, ""
    first, stop = run(costs)
    question, answers = part(question, answers, first, stop)
    text = f"sequences {first} to {stop - 1} of {len(costs)} were judged"
    total = sum(costs[first:stop])
    if total > SCORES and question.num_heads_kv > 1 and not question.sparse:
        heads = max(1, question.num_heads_kv * SCORES // total)
        question, answers = _heads(question, answers, heads)
        text += f", {heads} of their key/value heads"
    return question, answers, text


def run(costs: Sequence[float]) -> tuple[int, int]:
    """The longest run of sequences within the budget that cost something; else the cheapest one."""
    total = np.append(0, np.cumsum(costs))
    stops = np.searchsorted(total, total[:-1] + SCORES, side="right") - 1
    longest = (stops - np.arange(len(costs))) * (total[stops] > total[:-1])
    first = int(np.argmax(longest) if longest.any() else np.argmin(costs))
    return first, max(first + 1, int(stops[first]))


def _heads(question: Question, answers: Answers, count: int) -> tuple[Question, Answers]:
    """The first ``count`` key/value heads."""

    def kept(name: str, x: np.ndarray) -> np.ndarray:
        heads = slice(count if side_of(name) == "k" else count * question.group)
        return x[heads] if x.ndim < 3 else x[:, heads]

    given = {f.name: getattr(question, f.name) for f in fields(question) if f.name in BY_HEAD}
    changes: dict[str, Any] = {name: kept(name, x) for name, x in given.items() if x is not None}
    return replace(question, **changes), {name: kept(name, x) for name, x in answers.items()}


# ---- all rows -----------------------------------------------------------------------------------


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
    for bug in _suspects(question, forward) if forward else ():
        if all(_fits(question, answers, bug, of_these) for of_these in (few, every)):
            said = ["all rows of all sequences are as if this were so"]
            where = f"forward pass: {', '.join(forward)}"
            return [finding(side, bug.name, where, "high", said, form=bug.variant)]
    if any(one.bug != "rounding" for one in findings):
        return [*findings]
    said = [f"{n}: {'; '.join(structure.where(question, n, bad))}" for n, bad in wrong.items()]
    first = {name: int(bad.any(axis=1).argmax()) for name, bad in wrong.items()}
    name = min(first, key=lambda name: first[name])
    title = f"rows of {', '.join(wrong)} are wrong, from row {first[name]} of {name} on"
    look_at = "offsets in memory (their width), grids, and workspaces: short packs are right"
    given = (side, "unknown", ", ".join(wrong), "medium", said)
    return [*findings, finding(*given, title=title, look_at=look_at)]


def _suspects(question: Question, wrong: Sequence[str]) -> Iterator[Bug]:
    """Bugs that show in other rows than those of few sequences, or reach beyond these."""
    yield from rearranged(question, wrong[0]) if len(wrong) == 1 else ()
    yield from (bug for bug in neighbours(question) if bug.name == "neighbour-leak")
    for name in "qkv":
        for by in maps.overflows(question, name):
            text = f"{name} is read at other rows: {by.words}"
            yield Bug("offsets-shifted", text, ("forward",), steps=reading({name: name}, by))


def _fits(question: Question, answers: Answers, bug: Bug, sequences: Sequence[int]) -> bool:
    """Whether the forward pass of these sequences is as with a bug."""
    right = solve(question, "forward", bug, only=lambda view: view.sequence in sequences)
    inside = np.isin(question.sequence_of("q"), sequences)[:, None]
    rows = np.broadcast_to(inside, question.q.shape[:2])
    return not any(
        rows_off(by_rows(n, answers[n]), by_rows(n, right[n]), rows, OFF).any()
        for n in answers.keys() & right.keys()
    )

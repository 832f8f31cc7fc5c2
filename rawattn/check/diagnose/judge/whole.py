"""A large problem: a part of it is computed hundreds of times, and all of its rows once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.cases import Case
from rawattn.check.diagnose.engine import question as problems
from rawattn.check.diagnose.engine.question import BY_TOKENS, Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.inferred import row_numbers
from rawattn.check.diagnose.judge.match import Stage
from rawattn.check.diagnose.judge.proofs import finding

BY_HEAD = (*BY_TOKENS["q"], *BY_TOKENS["k"], "sinks", "tsinks")  # of dense attention
SCORES = 1_200_000  # of all heads, of a part
MOST = 20_000_000  # scores of all sequences and heads: of more nothing is said
OFF = 2.0**-5  # of the size of a row: more than any rounding


def costs_of(q: Question | Case) -> list[int]:
    """Scores of every sequence, of all heads."""
    return [n * m * q.num_heads_q for n, m in zip(q.lengths_q, q.lengths_k, strict=True)]


def cut(question: Question, answers: Answers) -> tuple[Question, Answers, str]:
    """Neighbouring sequences, or heads of a long one, that there is time for; and that in words."""
    costs = costs_of(question)
    if sum(costs) <= SCORES:
        return question, answers, ""
    first, stop = run(costs)
    question, answers = problems.part(question, answers, first, stop)
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
    def kept(name: str, x: np.ndarray) -> Any:
        heads = slice(count if side_of(name) == "k" else count * question.group)
        return x[heads] if x.ndim < 3 else x[:, heads]

    changes = {n: kept(n, x) for n in BY_HEAD if (x := getattr(question, n)) is not None}
    return replace(question, **changes), {name: kept(name, x) for name, x in answers.items()}


def of_all(
    question: Question, answers: Answers, side: str, findings: Sequence[Finding]
) -> list[Finding]:
    """``findings`` of a part, and what all rows say where there are none."""
    if findings or sum(costs_of(question)) > MOST:
        return [*findings]
    works = [Stage(question, answers, stage, 0.0) for stage in question.stages]
    of = {name: work for work in works for name in work.tensors if name != "delta"}
    wrong = {name: bad for name, work in of.items() if (bad := work.bad(name, OFF)).any()}
    if not wrong:
        return []
    said = [f"{n}: {'; '.join(structure.where(question, n, bad))}" for n, bad in wrong.items()]
    first, name = min((int(bad.any(axis=1).argmax()), name) for name, bad in wrong.items())
    zero = not any(by_rows(n, answers[n])[bad].any() for n, bad in wrong.items())
    bug, held = ("rows-not-written", "0") if zero else ("unknown", "wrong")
    title = f"rows of {', '.join(wrong)} are {held}, from row {first} of {name} on"
    look_at = "offsets in memory (their width), grids, and workspaces: short packs are right"
    given = (side, bug, ", ".join(wrong), "medium", said)
    work = of["dq"] if "dq" in wrong else None
    for guess in work.planted(row_numbers.bugs(work.sample)) if work else ():
        if all(of[n] is work and work.relative(n, guess) < OFF for n in wrong):
            return [finding(side, guess.bug.name, *given[2:], title=guess.bug.variant)]
    return [finding(*given, title=title, look_at=look_at)]

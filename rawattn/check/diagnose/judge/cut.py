"""A part of a large problem that is small enough to be computed hundreds of times."""

from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, MATRICES, OF_KEYS, Answers, Question
from rawattn.check.diagnose.evidence.reach import by_tokens
from rawattn.check.diagnose.evidence.structure import side_of

OF_Q, OF_KV = ("q", "dout", "tq", "out"), ("k", "v", "tk", "tv", *OF_KEYS)
BY_HEAD = ("dlse", "sinks", "tsinks", *BY_ROW)
SCORES = 1_200_000  # of all heads


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
    first, last = _run(costs)
    question, answers = _sequences(question, answers, first, last)
    text = f"sequences {first} to {last - 1} of {len(costs)} were judged"
    total = sum(costs[first:last])
    if total > SCORES and question.num_heads_kv > 1 and not question.sparse:
        heads = max(1, question.num_heads_kv * SCORES // total)
        question, answers = _heads(question, answers, heads)
        text += f", {heads} of their key/value heads"
    return question, answers, text


def _run(costs: list[int]) -> tuple[int, int]:
    """The longest run of sequences within the budget; the cheapest single one if none is."""
    best = (int(np.argmin(costs)), int(np.argmin(costs)) + 1)
    for first in range(len(costs)):
        for last in range(first + 1, len(costs) + 1):
            if sum(costs[first:last]) > SCORES:
                break
            if last - first > best[1] - best[0] or sum(costs[best[0] : best[1]]) == 0:
                best = (first, last)
    return best


def _sequences(
    question: Question, answers: Answers, first: int, last: int
) -> tuple[Question, Answers]:
    changes: dict[str, Any] = {"whole": None}
    rows = {}
    for of in "qk":
        offsets = np.asarray(getattr(question, f"cu_seqlens_{of}"))
        rows[of] = part = slice(int(offsets[first]), int(offsets[last]))
        changes |= by_tokens(question, of, itemgetter(part))
        changes[f"cu_seqlens_{of}"] = offsets[first : last + 1] - offsets[first]
    if question.seqused_k is not None:
        changes["seqused_k"] = question.seqused_k[first:last]
    matrices = {name for names in MATRICES.values() for name in names}  # of one sequence each
    kept = {
        name: x[:, rows["q"]] if name in BY_ROW else x[rows[side_of(name)]]
        for name, x in answers.items()
        if name not in matrices
    }
    return replace(question, **changes), kept


def _heads(question: Question, answers: Answers, count: int) -> tuple[Question, Answers]:
    """The first ``count`` key/value heads."""

    def part(name: str, x: Any) -> Any:
        kept = count if name in OF_KV else count * question.group
        return x[:kept] if name in BY_HEAD else x[:, :kept]

    there = {
        n: x for n in (*OF_Q, *OF_KV[:4], *BY_HEAD) if (x := getattr(question, n, None)) is not None
    }
    changes: dict[str, Any] = {name: part(name, x) for name, x in there.items()}
    return replace(question, **changes), {name: part(name, x) for name, x in answers.items()}

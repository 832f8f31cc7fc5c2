"""A part of a large problem that is small enough to be computed hundreds of times."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.parts import BY_HEADS, part
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question

OF_KV = ("k", "v", "tk", "tv", *OF_KEYS)
BY_HEAD = ("q", "dout", "tq", "out", *OF_KV, *BY_HEADS, "sinks", "tsinks")
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
    first, stop = _run(costs)
    question, answers = part(question, answers, first, stop)
    text = f"sequences {first} to {stop - 1} of {len(costs)} were judged"
    total = sum(costs[first:stop])
    if total > SCORES and question.num_heads_kv > 1 and not question.sparse:
        heads = max(1, question.num_heads_kv * SCORES // total)
        question, answers = _heads(question, answers, heads)
        text += f", {heads} of their key/value heads"
    return question, answers, text


def _run(costs: list[int]) -> tuple[int, int]:
    """The longest run of sequences within the budget that has scores; else the cheapest one."""
    total = np.append(0, np.cumsum(costs))
    stops = np.searchsorted(total, total[:-1] + SCORES, side="right") - 1
    longest = (stops - np.arange(len(costs))) * (total[stops] > total[:-1])
    first = int(np.argmax(longest) if longest.any() else np.argmin(costs))
    return first, max(first + 1, int(stops[first]))


def _heads(question: Question, answers: Answers, count: int) -> tuple[Question, Answers]:
    """The first ``count`` key/value heads."""

    def kept(name: str, x: np.ndarray) -> np.ndarray:
        heads = slice(count if name in OF_KV else count * question.group)
        return x[heads] if x.ndim < 3 else x[:, heads]

    given = {f.name: getattr(question, f.name) for f in fields(question) if f.name in BY_HEAD}
    changes: dict[str, Any] = {name: kept(name, x) for name, x in given.items() if x is not None}
    return replace(question, **changes), {name: kept(name, x) for name, x in answers.items()}

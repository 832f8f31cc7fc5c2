"""Which rows of a backward pass can nobody judge, since the lse that it had is far too small?

P = exp(S - lse) is then large, and so are the rounding of dP - D that it multiplies and the
gradients themselves, which may be more than their dtype holds. Such rows are taken as right; the
lse is what is wrong.
"""

import math

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.attention import Context, Floats, solve
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question, given_to_backward
from rawattn.check.diagnose.inferred.terms import contexts_of

LARGE = 256.0  # P that multiplies rounding by too much
NAMES = ("dq", "dk", "dv")


def without(question: Question, answers: Answers) -> tuple[Answers, list[str]]:
    """The answers with right values in such rows, and what is to be said of them."""
    given = given_to_backward(question, answers)
    names = [name for name in NAMES if name in answers]
    if given is None or question.dout is None or question.sparse or not names:
        return answers, []
    lse = np.asarray(given[1]).astype(np.float64)
    right = solve(question, "forward")["lse"]
    inside = (question.sequence_of("q") >= 0) & np.isfinite(right)
    with np.errstate(invalid="ignore"):
        far = inside & np.isfinite(lse) & (right - lse > math.log(LARGE))
    if not far.any():
        return answers, []
    with np.errstate(all="ignore"):
        truth = solve(question, "backward", given=given)
        large = _large(question, contexts_of(question, answers, "backward"), far)
        other = solve(question, "backward")
        errors = [
            sum(_error(answers[name], of[name], ~large[name]) for name in names)
            for of in (truth, other)
        ]
    if not errors[0] < errors[1]:  # it had another lse, or does not tell
        return answers, []
    found, said = dict(answers), []
    for name in names:
        x, wanted = np.asarray(answers[name]), truth[name]
        inside = question.sequence_of("k" if name in OF_KEYS else "q") >= 0
        most = float(ml_dtypes.finfo(x.dtype).max)  # type: ignore[no-untyped-call]
        over = ~(np.abs(wanted).max(axis=-1, initial=0.0) <= most) & inside[:, None]
        rows = large[name] & inside[:, None] | over
        if not rows.any():
            continue
        past = f", {int(over.sum())} of them past what {x.dtype.name} holds" if over.any() else ""
        said.append(f"{int(rows.sum())} rows of {name}{past}")
        wide = np.float32 if over.any() and x.dtype.itemsize == 2 else x.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            right_ones = np.where(rows[..., None], wanted, 0.0)
            found[name] = np.where(rows[..., None], right_ones.astype(wide), x.astype(wide))
    if not said:
        return answers, []
    text = (
        f"not judged: {'; '.join(said)}. The lse that the backward pass had is so far below the "
        f"right one that P = exp(S - lse) is more than {LARGE:g} there, and with it rounding; "
        "inf and NaN among them come of it, and not of the backward pass"
    )
    return found, [text]


def _error(found: np.ndarray, wanted: Floats, rows: np.ndarray) -> float:
    """The mean of what ``wanted`` leaves of a row, over its size, 1 at most."""
    a, b = np.asarray(found)[rows].astype(np.float64), wanted[rows]
    if not a.size:
        return 0.0
    left = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return float(np.nan_to_num(np.minimum(left, 1.0), nan=1.0).mean())


def _large(question: Question, contexts: list[Context], far: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of gradients, (tokens, heads), that a P of such size goes into."""
    keys = np.zeros(question.k.shape[:2], dtype=bool)
    for c in contexts:
        view = c.view
        there = far[view.heads[:, None], view.rows]
        weights = np.where(there[..., None], c.P, 0.0)
        keys[view.keys, view.head_kv] |= (weights > LARGE).any(axis=(0, 1))
    return {"dq": far.T, "dk": keys, "dv": keys}

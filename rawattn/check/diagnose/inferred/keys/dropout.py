"""Dropout: every weight is 0 or 1 / (1 - p), solved for row by row and head by head.

Out is a sum over keys with these factors, many equations for few unknowns.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, Bug, Context, Floats, Step, times
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.check.diagnose.evidence.places import Places, Right
from rawattn.check.diagnose.inferred.keys.counts import least_squares, within_bounds
from rawattn.check.diagnose.inferred.keys.systems import Equations, wide

MOST = 60_000_000  # equations times unknowns of all rows
AT_ONCE = 32  # rows with few keys, which show what the kept factors are
CLEAR = 0.15  # how far a factor may be from 0 or the others
FLIPS = 40
MISSING = 0.05  # of all rows, at most, that factors do not explain

System = tuple[Floats, Floats]  # a (rows, equations, keys) times factors = b (rows, equations)
Factors = Mapping[tuple[int, int], Floats]  # by sequence and head


def bugs(question: Question, answers: Answers) -> Iterator[Bug]:
    """Dropout, if out tells of it."""
    found = _dropped(question, answers) if "out" in answers else None
    if found is not None:
        factors, kept = found
        text = f"p = {1 - 1 / kept:.2g}" if kept > 1.005 else "kept ones are not rescaled"
        steps = _steps(factors, own_out=given_to_backward(question, answers) is None)
        yield Bug("dropout", text, FIRST, steps=steps)


def _dropped(question: Question, answers: Answers) -> tuple[Factors, float] | None:
    """The factors of every head, and what the kept ones are."""
    q, P = question, Right(Places(question)).P
    if P.size * q.v.shape[2] > MOST:
        return None
    noise = Equations(q, answers, "out").noise
    out, v = wide(answers["out"]), wide(q.v)
    systems: dict[tuple[int, int], System] = {}
    for b, head in np.ndindex(q.batch, q.num_heads_q):
        rows, keys = (slice(int(x[b]), int(x[b + 1])) for x in (q.cu_seqlens_q, q.cu_seqlens_k))
        if rows.start < rows.stop and keys.start < keys.stop:
            values = v[keys, head // q.group]
            a = P[head, rows, keys][:, None] * values.T[None]
            systems[int(b), int(head)] = a, out[rows, head]
    kept = _kept(list(systems.values()))
    if kept is None:
        return None
    factors: dict[tuple[int, int], Floats] = {}
    rows_seen = lost = 0
    for of, (a, wanted) in systems.items():
        found = _flipped(a * kept, wanted, np.round(within_bounds(a * kept, wanted)), noise)
        rows_seen += len(found)
        lost += int((_left(a * kept, wanted, found) > noise).sum())
        if lost > MISSING * max(rows_seen, 20):
            return None
        factors[of] = found * kept
    return factors, kept


def _kept(systems: list[System]) -> float | None:
    """What the kept factors are, where rows with few keys show that they are 0 or that."""
    found = []
    for a, b in systems:
        norm = np.sqrt((a**2).sum(axis=1))
        few = np.flatnonzero((norm > 0).sum(axis=1) * 2 <= a.shape[1])[:AT_ONCE]
        few = few[(norm[few] > 0).any(axis=1)]
        if len(few):
            norm = norm[few]
            solved = least_squares(a[few], b[few])
            found.append(solved[norm > 0.03 * norm.max(axis=1, keepdims=True)])
    values = np.concatenate(found) if found else np.zeros(0)
    large = values[values > 0.5]
    if len(values) < 64 or len(large) < 16:
        return None
    kept = float(np.median(large))
    near = np.minimum(np.abs(values), np.abs(values - kept)) < CLEAR * kept
    dropped = (np.abs(values) < CLEAR * kept).mean()
    if near.mean() < 0.97 or not 0.005 < dropped < 0.97 or not 0.98 < kept < 20:
        return None
    return kept if kept > 1.005 else 1.0


def _left(a: Floats, b: Floats, factors: Floats) -> Floats:
    """Root mean square, by row, of what the factors do not explain, over that of b."""
    off = (a @ factors[..., None])[..., 0] - b
    size = np.sqrt(np.mean(b**2, axis=1))
    return np.asarray(np.sqrt(np.mean(off**2, axis=1)) / np.maximum(size, 1e-300))


def _flipped(a: Floats, b: Floats, factors: Floats, noise: float) -> Floats:
    """Factors of 0 and 1, single ones of them changed as long as that helps."""
    found = factors.copy()
    for row in np.flatnonzero(_left(a, b, factors) > noise):
        x = found[row]
        squares = (a[row] ** 2).sum(axis=0)
        off = b[row] - a[row] @ x
        for _ in range(FLIPS):
            turn = 1 - 2 * x
            gain = 2 * turn * (a[row].T @ off) - squares
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                break
            off = off - turn[best] * a[row][:, best]
            x[best] = 1 - x[best]
    return found


def _steps(factors: Factors, own_out: bool) -> dict[str, Step]:
    """Steps with dropout; ``own_out``: D is of the out with dropout, whatever is given."""

    def of(c: Context) -> Floats | float:
        found = [factors.get((c.view.sequence, int(head))) for head in c.view.heads]
        same = [x for x in found if x is not None and x.shape == c.S.shape[1:]]
        return np.stack(same) if len(same) == len(found) else 1.0

    def out(c: Context) -> Floats:
        return np.asarray(c.r(times(c.o(c.P * of(c)), c.V)))

    steps: dict[str, Step] = {
        "O": out,
        "dP": lambda c: c.r(of(c) * c.r(times(c.dO, c.V.T))),
        "dV": lambda c: c.r(c.o(c.P * of(c)).swapaxes(1, 2) @ c.dO),
    }
    if own_out:
        steps["D"] = lambda c: (c.dO * out(c)).sum(axis=-1) - c.dL
    return steps

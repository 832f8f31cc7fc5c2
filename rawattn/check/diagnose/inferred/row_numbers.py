"""What gradients tell of the numbers that every row has: its D, or a factor, read off row by row.

dq of a row is s sum_j P (dP - D) K_j, so that of another D it is off along one vector; of another
lse, or a row that counts otherwise, it is a multiple of what it must be. Both are solved for, and
planted, in words for the rows where they are wrong.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import BACKWARD, TILES, Bug, Context, Floats, contexts
from rawattn.check.diagnose.engine.question import OF_KEYS, Question, by_rows
from rawattn.check.diagnose.engine.steps import STEPS
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample, stored
from rawattn.check.diagnose.read.fields import number
from rawattn.check.diagnose.read.forms import of_terms

LEAST = 4  # columns, of which one number is read
KEYS = 3  # of a row: where it has fewer, hardly anything is told apart
OFF = 1e-2  # of its size: what a number of a row must be off by
FEW = 2  # numbers that are said


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of a backward pass, where some rows are right."""
    for name in sample.wrong if sample.stage == "backward" else ():
        found = sample.found[name]
        if found.ndim == 3 and found.shape[2] >= LEAST and np.isfinite(found).all():
            if name == "dq":
                yield from _of_delta(sample)
            if name in ("dq", *OF_KEYS):
                yield from _factors(sample, name)


def _allowed(sample: Sample, name: str) -> Floats:
    """What rounding may leave of every row, (tokens, heads)."""
    size = np.abs(by_rows(name, sample.truth[name])).max(axis=2)
    return np.asarray(4 * sample.wrong[name] * (size + np.sqrt(np.mean(size**2))))


# ---- D ----------------------------------------------------------------------------------------


def _of_delta(sample: Sample) -> Iterator[Bug]:
    """Another D (num_heads_q, total_q) in some rows, or in all."""
    q, dq = sample.question, sample.found["dq"]
    along, D, count, dL = np.zeros(dq.shape), *np.zeros((3, *dq.shape[1::-1]))
    for c in contexts(q, "backward", sample.given):
        rows, heads = c.view.rows, c.view.heads
        one = with_values("dQ", dY=partial(of_terms, {"P": 1.0}))(c)
        along[rows[:, None], heads] = one.swapaxes(0, 1)
        at = np.ix_(heads, rows)
        D[at], dL[at], count[at] = c.D, c.dL, (c.W > 0).sum(axis=2)
    off, allowed = by_rows("dq", sample.truth["dq"]) - dq, _allowed(sample, "dq")
    length, size = (along**2).sum(axis=2), np.abs(along).max(axis=2)
    more = (off * along).sum(axis=2) / np.where(length > 0, length, 1.0)
    bad = (np.abs(more) * size > allowed).T
    fits = np.abs(off - more[..., None] * along).max(axis=2) <= allowed
    if not fits.all() or not bad.any() or (count[bad] >= KEYS).mean() < 0.5:
        return
    what, due = _what(D + more.T, D, dL, bad)
    name = "delta-of-another-out" if what else "unknown"
    text = f"D is {what or 'another number'}, not dout . out{' - dlse' * bool(dL.any())}"
    tells = bad if due is None else np.abs(due - D) * size.T > 4 * allowed.T
    text += _rows_in_words(q, "dq", bad.T, (tells | bad).T)
    held = np.where(bad, D + more.T if due is None else due, D)
    yield Bug(name, text, BACKWARD, steps={"D": partial(_with, held)})


def _what(held: Floats, D: Floats, dL: Floats, bad: np.ndarray) -> tuple[str, Floats | None]:
    """What stands in the place of D where that is ``bad``, in words, and what that is; "" for what
    has none."""
    size = OFF * float(np.sqrt(np.mean(D**2)))
    known = {"0": 0 * D, "- dlse": -dL, "- D": -D, "dlse": dL, "dout . out": D + dL}
    known |= {"dout . out + dlse": D + 2 * dL}
    by = float(held[bad] @ D[bad]) / max(float(D[bad] @ D[bad]), size)
    known[f"{number(by)} D"] = by * D
    near = {n: x for n, x in known.items() if np.abs(held - x)[bad].max() < size}
    return next(iter(near.items()), ("", None))


def _with(D: Floats, c: Context) -> Floats:
    return np.asarray(D[np.ix_(c.view.heads, c.view.rows)])


# ---- factors ----------------------------------------------------------------------------------


def _factors(sample: Sample, name: str) -> Iterator[Bug]:
    """Rows of a gradient that are some times what they must be; of dq maybe since P is."""
    found, right = sample.found[name], by_rows(name, sample.truth[name])
    size = (right**2).sum(axis=2)
    by = np.where(size > 0, (found * right).sum(axis=2) / np.where(size > 0, size, 1.0), 1.0)
    bad = np.abs(by - 1) > OFF
    left = np.abs(found - by[..., None] * right).max(axis=2)
    if not bad.any() or bad[size > 0].all() or (left > _allowed(sample, name)).any():
        return
    values = np.unique(np.round(by[bad], 2))
    times = " or ".join(number(float(x)) for x in values)
    times = times if len(values) <= FEW else f"{number(values[0])} to {number(values[-1])}"
    rows = _rows_in_words(sample.question, name, bad)
    by = np.where(bad, by, 1.0)
    store = stored(name, partial(np.multiply, by[..., None]))
    of_a_tile = "tile-counted-twice" if len(values) == 1 and values[0] == 2 else "unknown"
    yield Bug(of_a_tile, f"{name} is times {times}{rows}", BACKWARD, store=store)
    if name != "dq":
        return
    for what, step in (("P", "bP"), ("dS", "dY")):
        steps = {step: partial(_times, step, by.T)}
        yield Bug("unknown", f"{what} is times {times}{rows}", BACKWARD, steps=steps)


def _times(step: str, by: Floats, c: Context) -> Floats:
    return np.asarray(_with(by, c)[..., None] * STEPS[step](c))


# ---- words ------------------------------------------------------------------------------------


def _rows_in_words(
    question: Question, name: str, bad: np.ndarray, tells: np.ndarray | bool = True
) -> str:
    """Which rows (tokens, heads) these are, of those that tell; whether the last ones of all."""
    there = np.broadcast_to((question.sequence_of(name) >= 0)[:, None] & tells, bad.shape)
    if bad[there].all():
        return ""
    rows, ends = np.arange(len(bad))[:, None], (int(question.offsets(name)[-1]), len(bad))
    last = {t for t in TILES for n in ends if (bad == (rows >= n // t * t))[there].all()}
    if last and bad[ends[0] - 1].any():
        multiple = " or ".join(map(str, sorted(last)))
        return f", in the last rows of the pack, from a multiple of {multiple} on"
    return f", in some rows: {'; '.join([*where(question, name, bad, tells)][1:])}"

"""Errors of intermediates in few bits: too small for float16, or summed up in it.

Both can leave results that rounding in 16 bits would explain by size. But their errors are known:
those of dS rounded to float16, or of a sum that is rounded tile by tile, and answers follow them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue import partial_sums
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    PROGRAMS,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
    exact,
    run_steps,
)
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.inferred.deltas import gradient
from rawattn.check.diagnose.inferred.gradients import SUMS, found_in

COARSE = 0.01  # of a result's size: errors that normal numbers of float16 do not make
UNEVEN, LARGE = 1.5, 0.6  # noise of a gradient over that of another, and in units of what it may be
FOLLOWS = 0.5  # correlation of an error with a predicted one; SURELY: no better one is looked for
SURELY = 0.8
EXACT = 0.42  # noise of a gradient that tells matmuls whose operands P and dS are not rounded
CHUNKS = (16, 32, 64, 8, 128, 4, 1)
LONGEST = 512  # steps of a running sum
NARROW = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
Rounded = Callable[[Floats], Floats]


class Followed(NamedTuple):
    """A class whose predicted error that of ``tensor`` follows."""

    bug: str
    tensor: str
    confidence: str
    evidence: str


def _to(dtype: type) -> Rounded:
    def r(x: Floats) -> Floats:
        with np.errstate(all="ignore"):
            return np.asarray(x.astype(dtype).astype(np.float64))

    return r


def _flushed(x: Floats) -> Floats:
    tiny = float(np.finfo(np.float16).tiny)
    return np.where(np.abs(x) < tiny, 0.0, _to(np.float16)(x))


def roundings(stage: str) -> Iterator[Bug]:
    """A stage with one intermediate, or one operand, in fewer bits: slope 1, and an error that is
    the same on every run."""
    for dtype in NARROW:
        for words, steps in _kept_in(_to(dtype), stage):
            form = f"{words} in {np.dtype(dtype).name}"
            yield Bug("narrow-intermediate", form, (stage,), steps=steps)


def underflows() -> Iterator[Bug]:
    """A backward pass with an intermediate that is too small for float16."""
    for r, rest in ((_to(np.float16), ""), (_flushed, ", subnormal numbers as 0")):
        for words, steps in _kept_in(r, "backward"):
            if words in ("P", "dP", "dS"):
                form = f"{words} in float16{rest}"
                yield Bug("underflow-in-16-bit", form, BACKWARD, steps=steps)


def _kept_in(r: Rounded, stage: str) -> Iterator[tuple[str, dict[str, Step]]]:
    def after(step: str) -> dict[str, Step]:
        return {step: lambda c: r(STEPS[step](c))}

    def of(step: str, *operands: str) -> dict[str, Step]:
        return {step: lambda c: STEPS[step](changed(c, **{x: r(getattr(c, x)) for x in operands}))}

    def unnormalised(c: Context) -> Floats:
        with np.errstate(all="ignore"):
            size = np.exp(np.where(c.W > 0, c.S, -np.inf).max(axis=2, initial=-np.inf) - c.L)
        size = np.where(size > 0, size, 1.0)[..., None]
        return np.asarray(STEPS["O"](changed(c, P=r(c.P / size) * size)))

    yield "S", after("Y")
    yield "q and k", of("Y", "Q", "K")
    if stage == "forward":
        yield "P", of("O", "P")
        yield "exp(S - row maximum)", {"O": unnormalised}
        yield "v", of("O", "V")
    else:
        yield "P", after("bP")
        yield "P, as an operand alone,", of("dV", "P")
        yield "lse", of("bP", "L")
        yield "D", after("D")
        yield "dP", after("dP")
        yield "dS", after("dY")
        yield "dout and v", of("dP", "dO", "V")
        yield "dout", of("dV", "dO") | of("dP", "dO")


# ---- errors that a right computation might have -----------------------------------------------


def followed(
    question: Question,
    answers: Answers,
    contexts: Sequence[Context],
    noise: dict[str, float],
) -> list[Followed]:
    """What the errors of gradients follow that rounding explains by size.

    noise: the error of each gradient in units of what rounding makes at the finest precision.
    """
    names = [name for name in ("dq", "dk", "dv") if name in answers and name in noise]
    for name in names:
        if (one := _underflow(answers, contexts, name)) is not None:
            return [one]
    least = min((noise[name] for name in names), default=0.0)
    for name in names if question.dtype.itemsize == 2 else ():
        uneven = noise[name] > max(LARGE, UNEVEN * least)
        if uneven and (one := _sums(question, answers, contexts, name, least > EXACT)) is not None:
            return [one]
    return []


def _follows(error: Floats, wanted: Floats) -> tuple[float, float]:
    """Correlation of the two, and slope of ``error`` over ``wanted``."""
    sizes = float((error**2).sum()), float((wanted**2).sum())
    if not min(sizes) or not np.isfinite(sizes).all():
        return 0.0, 0.0
    both = float((error * wanted).sum())
    return both / float(np.sqrt(sizes[0] * sizes[1])), both / sizes[1]


def _again(c: Context, bug: Bug) -> Context:
    """A backward pass up to its gradients with a bug."""
    names, again = PROGRAMS["backward"], changed(c)
    first = min(names.index(step) for step in bug.steps)
    run_steps(again, names[first : names.index("dQ")], bug)
    return again


def _joined(found: Iterable[Floats]) -> Floats:
    return np.concatenate([x.ravel() for x in found])


def _underflow(answers: Answers, contexts: Sequence[Context], name: str) -> Followed | None:
    right = _joined(c.right[name] for c in contexts)
    error = _joined(found_in(c, answers, name) for c in contexts) - right
    best: tuple[float, str] = (FOLLOWS, "")
    for bug in underflows():
        planted = _joined(gradient(_again(c, bug), name) for c in contexts) - right
        if not np.sqrt(np.mean(planted**2)) > COARSE * np.sqrt(np.mean(right**2)):
            continue
        correlation, slope = _follows(error, planted)
        if correlation > best[0] and 0.8 < slope < 1.25:
            best = correlation, bug.variant
    if not best[1]:
        return None
    evidence = (
        f"{name} agrees with the right values by what float16 can hold, but its error follows that "
        f"of {best[1]}: correlation {best[0]:.2f}"
    )
    return Followed("underflow-in-16-bit", name, "high", evidence)


def _sums(
    question: Question, answers: Answers, contexts: Sequence[Context], name: str, narrow: bool
) -> Followed | None:
    """A running sum over tiles in 16 bits, of each head or of a whole group.

    The rounding of what is stored, which right ones have too, is taken off. narrow: P and dS are
    rounded before matmuls.
    """
    dtype = np.float16 if question.dtype == np.float16 else ml_dtypes.bfloat16
    r = _to(dtype)
    error = _joined(found_in(c, answers, name) - r(c.right[name]) for c in contexts)
    best: tuple[float, str] = (FOLLOWS, "")
    groups = (False, True) if name in OF_KEYS and question.group > 1 else (False,)
    for chunk, group, last_first in product(CHUNKS, groups, (False, True)):
        if any(len(c.view.rows) > chunk * LONGEST for c in contexts):
            continue
        text = "the heads of a group in turn, " if group else ""
        text += f"{chunk} at a time" + (", from the last" if last_first else "")
        how = partial_sums.cut(chunk, last_first), group, r, r if narrow else exact
        planted = _joined(r(_running(c, name, *how)) - r(c.right[name]) for c in contexts)
        best = max(best, (_follows(error, planted)[0], text), key=lambda one: one[0])
        if best[0] > SURELY:
            break
    if not best[1]:
        return None
    evidence = (
        f"the error of {name} follows that of a running sum in {np.dtype(dtype).name}, {best[1]}: "
        f"correlation {best[0]:.2f}"
    )
    return Followed("accumulates-in-16-bit", name, "high", evidence)


def _running(
    c: Context, name: str, cut: partial_sums.Cut, group: bool, r: Rounded, operand: Rounded
) -> Floats:
    """A gradient that is rounded after every tile; ``group``: also from head to head."""
    [(weights, terms)] = SUMS[name](c)
    scale = 1.0 if name == "dv" else c.s
    weights = operand(weights / scale)
    weights = weights.swapaxes(1, 2) if name in OF_KEYS else weights
    parts = [weights[..., here] @ terms[..., here, :] for here in cut(weights.shape[2])]
    if group:
        parts = [part[head] for head in range(len(weights)) for part in parts]
    total = np.zeros_like(parts[0])
    for part in parts:
        total = r(total + part)
    total = total.sum(axis=0) if name in OF_KEYS and not group else total
    return np.asarray(scale * total)

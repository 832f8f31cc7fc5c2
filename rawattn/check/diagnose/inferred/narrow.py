"""Errors of intermediates in 16 bits: too small for float16, or summed up in it.

Both can leave results that rounding in 16 bits would explain by size. But their errors are known:
those of dS rounded to float16, or of a sum that is rounded tile by tile, and answers follow them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Bug, Context, Floats, Step, changed
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.inferred.tile_pairs import WEIGHTS, found_in

FITS = 0.1  # of what is wrong may be left by an intermediate in float16
COARSE = 0.01  # of a result's size: errors that normal numbers of float16 do not make
UNEVEN, LARGE = 1.5, 0.6  # noise of a gradient over that of another, and in units of what it may be
FOLLOWS = 0.5  # correlation of an error with a predicted one; SURELY: no better one is looked for
SURELY = 0.8
EXACT = 0.42  # noise of a gradient that tells matmuls whose operands P and dS are not rounded
CHUNKS = (16, 32, 64, 8, 128, 4, 1)
LONGEST = 512  # steps of a running sum


class Followed(NamedTuple):
    """A class whose predicted error that of ``tensor`` follows."""

    bug: str
    tensor: str
    confidence: str
    evidence: str


def _float16(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(np.float16).astype(np.float64))


def _flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < float(np.finfo(np.float16).tiny), 0.0, _float16(x))


KEPT: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
    "dS in float16": ("dY", _float16),
    "dS in float16, subnormal numbers as 0": ("dY", _flushed),
    "P in float16": ("P", _float16),
    "P in float16, subnormal numbers as 0": ("P", _flushed),
    "dP in float16": ("dP", _float16),
    "dP in float16, subnormal numbers as 0": ("dP", _flushed),
}


# ---- in whatever dtype --------------------------------------------------------------------------

NARROW = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def roundings(stage: str) -> Iterator[Bug]:
    """A stage with one intermediate, or one operand, in fewer bits: slope 1, and an error that is
    the same on every run."""
    for dtype in NARROW:

        def r(x: Floats, dtype: type = dtype) -> Floats:
            with np.errstate(all="ignore"):
                return _to(dtype, x)

        for words, steps in _kept_in(r, stage):
            form = f"{words} in {np.dtype(dtype).name}"
            yield Bug("narrow-intermediate", form, (stage,), steps=steps)


def _kept_in(r: Callable[[Floats], Floats], stage: str) -> Iterator[tuple[str, dict[str, Step]]]:
    def after(*steps: str) -> dict[str, Step]:
        return {step: _after(step, r) for step in steps}

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


def _after(step: str, r: Callable[[Floats], Floats]) -> Step:
    return lambda c: r(STEPS[step](c))


def bugs(
    question: Question, answers: Answers, contexts: Sequence[Context], wrong: frozenset[str]
) -> Iterator[Bug]:
    """Bugs of a backward pass with an intermediate in float16, if that explains ``wrong``."""
    errors = [_error(c, answers, wrong, None, _float16) for c in contexts]
    worst = int(np.argmax(errors))
    for words, (kept, rounded) in KEPT.items():
        if _error(contexts[worst], answers, wrong, kept, rounded) < FITS * errors[worst]:
            steps = {_step(name): _with(_step(name), kept, rounded) for name in ("dq", "dk", "dv")}
            yield Bug("underflow-in-16-bit", words, ("backward",), steps=steps)


def _step(name: str) -> str:
    return WEIGHTS[name][0]


def _narrowed(c: Context, kept: str, rounded: Callable[[Floats], Floats]) -> Context:
    """The same with an intermediate, and what is made of it, after ``rounded``."""
    other = changed(c, **{kept: rounded(getattr(c, kept))})
    if kept == "dP":
        other.dY = c.G * c.P * (other.dP - c.D[..., None])
    elif kept == "P":
        other.dY = c.G * other.P * (c.dP - c.D[..., None])
    return other


def _with(step: str, kept: str, rounded: Callable[[Floats], Floats]) -> Step:
    return lambda c: STEPS[step](_narrowed(c, kept, rounded))


def _gradient(c: Context, name: str) -> Floats:
    found = STEPS[_step(name)](c)
    return np.asarray(found.sum(axis=0) if name in OF_KEYS else found)


def _error(
    c: Context,
    answers: Answers,
    names: frozenset[str],
    kept: str | None,
    rounded: Callable[[Floats], Floats],
) -> float:
    other = c if kept is None else _narrowed(c, kept, rounded)
    return float(
        np.sqrt(sum(((found_in(c, answers, n) - _gradient(other, n)) ** 2).sum() for n in names))
    )


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
    found = [one for name in names if (one := _underflow(answers, contexts, name)) is not None]
    if question.dtype.itemsize == 2 and names and not found:
        least = min(noise[name] for name in names)
        for name in names:
            if noise[name] > max(LARGE, UNEVEN * least):
                one = _sums(question, answers, contexts, name, least > EXACT)
                found += [] if one is None else [one]
    return found[:1]


def _errors(answers: Answers, contexts: Sequence[Context], name: str) -> Floats:
    return np.concatenate([(found_in(c, answers, name) - c.right[name]).ravel() for c in contexts])


def _follows(error: Floats, wanted: Floats) -> tuple[float, float]:
    """Correlation of the two, and slope of ``error`` over ``wanted``."""
    sizes = float((error**2).sum()), float((wanted**2).sum())
    if not min(sizes) or not np.isfinite(sizes).all():
        return 0.0, 0.0
    both = float((error * wanted).sum())
    return both / float(np.sqrt(sizes[0] * sizes[1])), both / sizes[1]


def _underflow(answers: Answers, contexts: Sequence[Context], name: str) -> Followed | None:
    error = _errors(answers, contexts, name)
    size = float(np.sqrt(np.mean(np.concatenate([c.right[name].ravel() for c in contexts]) ** 2)))
    best: tuple[float, str] = (FOLLOWS, "")
    for words, (kept, rounded) in KEPT.items():
        planted = np.concatenate(
            [
                (_gradient(_narrowed(c, kept, rounded), name) - c.right[name]).ravel()
                for c in contexts
            ]
        )
        if not np.sqrt(np.mean(planted**2)) > COARSE * size:
            continue
        correlation, slope = _follows(error, planted)
        if correlation > best[0] and 0.8 < slope < 1.25:
            best = correlation, words
    if not best[1]:
        return None
    evidence = (
        f"{name} agrees with the right values by what float16 can hold, but its error follows that "
        f"of {best[1]}: correlation {best[0]:.2f}"
    )
    return Followed("underflow-in-16-bit", name, "high", evidence)


class _Sum(NamedTuple):
    """How a sum runs: tiles of ``chunk``, heads of a ``group`` one after the other, ``backwards``;
    whether each part is rounded, and whether softmax_scale is in it."""

    chunk: int
    group: bool
    backwards: bool
    parts: bool
    scaled: bool

    @property
    def words(self) -> str:
        over = "the heads of a group in turn, " if self.group else ""
        return f"{over}{self.chunk} at a time" + (", from the last" if self.backwards else "")


def _sums(
    question: Question, answers: Answers, contexts: Sequence[Context], name: str, narrow: bool
) -> Followed | None:
    """A running sum over tiles in 16 bits, of each head or of a whole group.

    The rounding of what is stored, which right ones have too, is taken off. narrow: P and dS are
    rounded before matmuls.
    """
    dtype = np.float16 if question.dtype == np.float16 else ml_dtypes.bfloat16
    error = np.concatenate(
        [(found_in(c, answers, name) - _to(dtype, c.right[name])).ravel() for c in contexts]
    )
    best: tuple[float, str] = (FOLLOWS, "")
    groups = (False, True) if name in OF_KEYS and question.group > 1 else (False,)
    both = (False, True)
    for how in map(
        _Sum._make, product(CHUNKS, groups, both, both, (True,) if name == "dv" else both)
    ):
        if any(len(c.view.rows) > how.chunk * LONGEST for c in contexts):
            continue
        planted = np.concatenate([_running(c, name, how, dtype, narrow).ravel() for c in contexts])
        correlation, _ = _follows(error, planted)
        if correlation > best[0]:
            best = correlation, how.words
        if correlation > SURELY:
            break
    if not best[1]:
        return None
    evidence = (
        f"the error of {name} follows that of a running sum in {np.dtype(dtype).name}, {best[1]}: "
        f"correlation {best[0]:.2f}"
    )
    return Followed("accumulates-in-16-bit", name, "high", evidence)


def _to(dtype: type, x: Floats) -> Floats:
    return np.asarray(x.astype(dtype).astype(np.float64))


def _running(c: Context, name: str, how: _Sum, dtype: type, narrow: bool) -> Floats:
    """What rounding after every tile adds to a gradient that is stored in ``dtype``."""
    weights = {"dq": c.dY, "dk": c.dY.swapaxes(1, 2), "dv": c.P.swapaxes(1, 2)}[name]
    terms = {"dq": np.broadcast_to(c.K, (len(weights), *c.K.shape)), "dk": c.Q, "dv": c.dO}[name]
    scale = 1.0 if name == "dv" else c.s
    inside, outside = (scale, 1.0) if how.scaled else (1.0, scale)
    weights = inside * (_to(dtype, weights) if narrow else weights)
    starts = range(0, terms.shape[1], how.chunk)
    order = [slice(x, x + how.chunk) for x in (reversed(starts) if how.backwards else starts)]
    parts = [weights[..., here] @ terms[:, here] for here in order]
    exact = np.sum(parts, axis=0)
    if how.parts:
        parts = [_to(dtype, part) for part in parts]
    total = np.zeros_like(exact)
    if how.group:
        one = total[0]
        for head, part in product(range(len(weights)), parts):
            one = _to(dtype, one + part[head])
        return np.asarray(_to(dtype, outside * one) - _to(dtype, outside * exact.sum(axis=0)))
    for part in parts:
        total = _to(dtype, total + part)
    if name in OF_KEYS:
        exact, total = exact.sum(axis=0), total.sum(axis=0)
    return np.asarray(_to(dtype, outside * total) - _to(dtype, outside * exact))

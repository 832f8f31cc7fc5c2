"""Two files of one comparison: what each side is judged by, and how their inputs differ."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.files.entries import GIVEN, OPTIONS
from rawattn.check.diagnose.files.npz import NO_MASK, Saved, read

PROBLEM = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")  # who has other ones computed another
OF_ITS_OWN = ("dlse", *GIVEN)  # what a run had none of where none was saved
ROUNDED = ("dout", "tq", "tk", "tv")  # with q, k and v
ARRAYS = tuple(field.name for field in fields(Question) if field.name not in OPTIONS)


@dataclass(frozen=True)
class Pair:
    """Two sides, or one. questions: what each is judged by, one object where that is the same.

    apart: how their inputs differ. notes: what else makes them be judged differently.
    """

    sides: tuple[Saved, ...]
    questions: tuple[Question | None, ...]
    apart: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_two(one: str | Path, other: str | Path | None = None) -> Pair:
    """Two files with what each is judged by, or one alone.

    A file without q, k and v is read in the light of the other, and has all of its inputs. One that
    has them takes over what it does not say where these are the same in both; but not dlse, nor
    the out and lse that a backward pass was given, which without them were its own. ValueError
    where a file has only some of its inputs, and they are not those of the other.
    """
    a = read(one)
    if other is None:
        return Pair((a,), (a.question,))
    b = read(other, a.frame)
    a = read(one, b.frame) if a.frame is None and b.frame is not None else a
    sides = _completed(a, b), _completed(b, a)
    first, second = (saved.question for saved in sides)
    if first is None or second is None:
        return Pair(sides, (first, second))
    apart, notes = _compared(first, second, *(saved.path for saved in sides))
    arrays = ([getattr(x, name) for name in ARRAYS] for x in (first, second))
    same = all(_bits(x) == _bits(y) for x, y in zip(*arrays, strict=True))
    return Pair(sides, (first, first if same and not apart else second), apart, notes)


def _bits(array: Any) -> bytes:
    return b"" if array is None else np.asarray(array).tobytes()


def _completed(mine: Saved, other: Saved) -> Saved:
    """``mine`` with those inputs of ``other`` that it lacks, and may have."""
    given, lent = mine.inputs, other.inputs
    both = [name for name in PROBLEM if name in given and name in lent]
    differ = [f"{n} {how}" for n in both if (how := _difference(given[n], lent[n]))]
    if mine.question is not None and differ:
        return mine
    if differ:
        raise ValueError(
            f"{mine.path} and {other.path} are not about the same problem: {differ[0]}. Save "
            "results with all the inputs that they are of"
        )
    if mine.question is None:
        return replace(mine, inputs=lent | given)
    taken = {n: x for n, x in lent.items() if n not in given and n not in OF_ITS_OWN}
    dtype = given["q"].dtype
    if "q" in lent and dtype.itemsize < lent["q"].dtype.itemsize:
        taken |= {n: x.astype(dtype) for n, x in taken.items() if n in ROUNDED}
    notes = [note for note in mine.notes if note != NO_MASK or "causal" not in taken]
    notes += [f"{', '.join(taken)}: not said, as in {other.path} is assumed"] if taken else []
    return replace(mine, inputs=taken | given, notes=tuple(notes))


def _compared(a: Question, b: Question, *paths: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How the inputs of two sides differ; and what one alone has."""
    apart, notes = [], []
    for name in ARRAYS:
        one, other = getattr(a, name), getattr(b, name)
        if one is None or other is None:
            there, not_there = paths if other is None else paths[::-1]
            text = f"{name}: only in {there}; {not_there} is judged as a run that had none"
            notes += [text] if np.any(other if one is None else one) else []
        elif name not in GIVEN and (how := _difference(one, other)):
            apart.append(f"{name} {how}")
    of_mask = ("causal", "window") if a.mask_window == b.mask_window else ()
    for name in (name for name in OPTIONS if name not in of_mask):
        one, other = (x.scale if name == "softmax_scale" else getattr(x, name) for x in (a, b))
        floats = isinstance(one, float) and isinstance(other, float)
        if one != other and not (floats and math.isclose(one, other, rel_tol=1e-6)):
            said = (f"{x:g}" if isinstance(x, float) else str(x) for x in (one, other))
            apart.append(f"{name} is {' and '.join(said)}")
    return tuple(apart), tuple(notes)


def _difference(one: np.ndarray, other: np.ndarray) -> str:
    """How an input of two sides differs; "" where that is by the rounding of their dtypes."""
    if one.shape != other.shape:
        return f"has shape {one.shape} and {other.shape}"
    coarse: np.dtype[Any] = np.dtype(np.float64)
    share = least = 0.0
    if one.dtype.kind not in "iu":
        infos = [ml_dtypes.finfo(x.dtype) for x in (one, other)]  # type: ignore[no-untyped-call]
        info = max(infos, key=lambda info: float(info.eps))
        coarse, share, least = info.dtype, float(info.eps), float(info.smallest_subnormal)
    with np.errstate(all="ignore"):
        x, y = (array.astype(coarse).astype(np.float64) for array in (one, other))
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        wrong = ~(off <= 2 * share * np.abs(y) + 2 * least)
    if not wrong.any():
        return ""
    largest = off[np.isfinite(off)].max(initial=0.0)
    how = f"differs by up to {largest:.3g}" if largest else "is NaN or inf at other places"
    return f"{how}, in {np.count_nonzero(wrong)} of {wrong.size} numbers"

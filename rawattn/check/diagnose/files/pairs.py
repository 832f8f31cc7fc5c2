"""Two files of one comparison: what each side is judged by, and how their inputs differ."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SLOTS, STAGES, Question
from rawattn.check.diagnose.files.entries import GIVEN, OPTIONS, narrowed
from rawattn.check.diagnose.files.layouts import OF_EACH
from rawattn.check.diagnose.files.npz import NO_MASK, Saved, read

PROBLEM = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")  # who has other ones computed another
OF_ITS_OWN = ("dlse", *GIVEN)  # what a run had none of where none was saved
ROUNDED = ("dout", "tq", "tk", "tv")  # with q, k and v
DEFAULTS = {field.name: field.default for field in fields(Question)}
ARRAYS = tuple(field.name for field in fields(Question) if field.name not in OPTIONS)
OF_BLOCKS = ("block_size", "own", "sliding")
NARROW = {n for names in STAGES.values() for n in names} - {*BY_ROW, *OF_SLOTS}  # as inputs are


@dataclass(frozen=True)
class Pair:
    """Two sides, or one. questions: what each is judged by, one object where that is the same.

    apart: how their inputs differ. notes: what else makes them be judged differently.
    """

    sides: tuple[Saved, ...]
    questions: tuple[Question | None, ...]
    apart: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Difference(NamedTuple):
    """Of two arrays, in words. rounding: they are the same but for the rounding of their dtypes."""

    text: str
    rounding: bool = False


def load_two(one: str | Path, other: str | Path | None = None) -> Pair:
    """Two files with what each is judged by, or one alone.

    A file without q, k and v is read in the light of the other, and has all of its inputs. One that
    has them takes over what it does not say where these are the same in both; but not dlse, nor
    the out and lse that a backward pass was given, which without them were its own. ValueError
    where a file has only some of its inputs, and they are not those of the other.
    """
    a = read(one)
    if other is None:
        a = _as_of_inputs(a)
        return Pair((a,), (a.question,))
    b = read(other, a.frame)
    a = read(one, b.frame) if a.frame is None and b.frame is not None else a
    sides = _as_of_inputs(_completed(a, b)), _as_of_inputs(_completed(b, a))
    first, second = (saved.question for saved in sides)
    if first is None or second is None:
        return Pair(sides, (first, second))
    apart, notes = _compared(first, second, *(saved.path for saved in sides))
    same = first.dtype == second.dtype and not apart and not notes
    return Pair(sides, (first, first if same else second), apart, notes)


def _completed(mine: Saved, other: Saved) -> Saved:
    """``mine`` with those inputs of ``other`` that it lacks, and may have."""
    given, lent = mine.inputs, other.inputs
    both = [name for name in PROBLEM if name in given and name in lent]
    differences = ((name, _difference(name, given, lent)) for name in both)
    differ = {name: found for name, found in differences if found and not found.rounding}
    if mine.question is None:
        for name, difference in differ.items():
            raise ValueError(
                f"{mine.path} and {other.path} are not about the same problem: {name} "
                f"{difference.text}. Save results with all the inputs that they are of"
            )
        return replace(mine, inputs=lent | given)
    if differ:
        return mine
    taken = {n: x for n, x in lent.items() if n not in given and n not in OF_ITS_OWN}
    dtype = given["q"].dtype
    if "q" in lent and dtype.itemsize < lent["q"].dtype.itemsize:
        taken |= {n: x.astype(dtype) for n, x in taken.items() if n in ROUNDED}
    assumed = [n for n, x in taken.items() if isinstance(x, np.ndarray) or x != DEFAULTS[n]]
    notes = [note for note in mine.notes if note != NO_MASK or "causal" not in assumed]
    notes += [f"{name} is not said: that of {other.path} is assumed" for name in assumed]
    return replace(mine, inputs=taken | given, notes=tuple(notes))


def _as_of_inputs(saved: Saved) -> Saved:
    """Results of nothing but numbers of the inputs' 16 bits, that were saved wider, in 16 bits."""
    dtype = None if saved.question is None else saved.question.dtype
    if dtype is None or dtype.itemsize > 2:
        return saved
    found = narrowed({n: x for n, x in saved.answers.items() if n in NARROW}, dtype)
    note = f"{', '.join(found)}: all numbers are of {dtype}, as the inputs are, and judged as such"
    notes = (*saved.notes, note) if found else saved.notes
    return replace(saved, answers=saved.answers | found, notes=notes)


def _compared(a: Question, b: Question, *paths: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How the inputs of two sides differ; and what else makes the sides be judged differently."""
    apart: list[str] = []
    alike: dict[str, list[str]] = {}  # what is not the same, and yet no reason to be surprised
    for name in ARRAYS:
        called = GIVEN.get(name, name)
        one, other = getattr(a, name), getattr(b, name)
        if one is not None and other is not None:
            difference = _difference(name, vars(a), vars(b))
            if difference and (difference.rounding or name in GIVEN):
                alike.setdefault(difference.text, []).append(called)
            elif difference:
                apart.append(f"{called} {difference.text}")
        elif np.any(other if one is None else one):
            there, not_there = paths if other is None else paths[::-1]
            text = f"only in {there}; {not_there} is judged as a run that had none"
            alike.setdefault(text, []).append(called)
    names = ("softmax_scale", "softcap", *(OF_BLOCKS if a.sparse and b.sparse else ()))
    mask = ("causal" if a.causal != b.causal else "window",) * (a.mask_window != b.mask_window)
    for name in (*mask, *names):
        one, other = (x.scale if name == "softmax_scale" else getattr(x, name) for x in (a, b))
        floats = isinstance(one, float) and isinstance(other, float)
        if one != other and not (floats and math.isclose(one, other, rel_tol=1e-6)):
            said = (f"{x:g}" if isinstance(x, float) else str(x) for x in (one, other))
            apart.append(f"{name} is {' and '.join(said)}")
    return tuple(apart), tuple(f"{', '.join(names)}: {text}" for text, names in alike.items())


def _difference(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference | None:
    """How an input of two sides differs; None where it has the same numbers."""
    one, other = a[name], b[name]
    if name.startswith("cu_seqlens"):
        shown = (reprlib.repr(x.tolist()) for x in (one, other))
        return None if np.array_equal(one, other) else Difference(f"is {' and '.join(shown)}")
    if one.shape != other.shape:
        return Difference(f"has shape {one.shape} and {other.shape}")
    if name not in OF_EACH:
        side = "k" if name in ("k", "v", "tk", "tv") else "q"  # rows of no sequence do not matter
        ends = [given.get(f"cu_seqlens_{side}", (0, len(given[name]))) for given in (a, b)]
        rows = slice(min(int(x[0]) for x in ends), max(int(x[-1]) for x in ends))
        one, other = (x[:, rows] if name in ("dlse", "lse") else x[rows] for x in (one, other))
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where(first == second, 0.0, np.abs(first - second))
    off = np.where(np.isnan(first) & np.isnan(second), 0.0, off)
    if not off.any():
        return None
    count = f"in {np.count_nonzero(off)} of {off.size} numbers"
    if one.dtype.kind in "iu":
        return Difference(f"differs {count}")
    infos = [ml_dtypes.finfo(x.dtype) for x in (one, other)]  # type: ignore[no-untyped-call]
    info = max(infos, key=lambda info: float(info.eps))
    with np.errstate(all="ignore"):
        allowed = 2 * float(info.eps) * np.abs(second) + 2 * float(info.smallest_subnormal)
        alike = (one.astype(info.dtype) == other.astype(info.dtype)) | (
            off <= allowed
        )  # to inf too
    if alike.all():
        dtypes = " and ".join(dict.fromkeys(x.dtype.name for x in (one, other)))
        return Difference(f"the same but for rounding ({dtypes})", rounding=True)
    largest = off[np.isfinite(off)].max(initial=0.0)
    how = f"differs by up to {largest:.3g}" if largest else "is NaN or inf at other places"
    return Difference(f"{how}, {count}")

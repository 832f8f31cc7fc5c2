"""Questions and answers in .npz files, of one run or two, of kernels of any language. What cannot
be read is a ValueError; what was guessed or left out is a note. Long by what files may lack."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import TENSORS, WIDE, Answers, Question
from rawattn.check.diagnose.evidence.precision import eps_of, smallest_of
from rawattn.check.diagnose.evidence.structure import MADE
from rawattn.check.diagnose.files import entries
from rawattn.check.diagnose.files.entries import BFLOAT16, GIVEN, LENGTHS, OPTIONS, Frame, narrowed

MAY_BE_LEFT_OUT = ("causal", "window", "softmax_scale", "dlse")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
NARROW = {*TENSORS} - {*WIDE}  # of the inputs' dtype
NO_MASK = "causal is not said: False is assumed"
ROUNDED = ("dout", "tq", "tk", "tv")  # with q, k and v
ARRAYS = tuple(field.name for field in fields(Question) if field.name not in OPTIONS)


class Saved(NamedTuple):
    """What a file holds. ``inputs``: the arguments of its Question, as far as they are there.
    left_out: fields of a Question that it does not say. identify: of `rawattn-check dump`, how many
    of its sequences are not the reader's questions; 0 where none are. matrices: intermediates."""

    path: str
    inputs: dict[str, Any]
    answers: Answers
    notes: tuple[str, ...]
    frame: Frame | None
    matrices: Answers
    left_out: tuple[str, ...] = ()
    identify: int = 0

    @property
    def question(self) -> Question | None:
        """None where q, k or v is missing."""
        return Question(**self.inputs) if {"q", "k", "v"} <= self.inputs.keys() else None


def dump(path: str | Path, question: Question, answers: Answers, **said: int) -> None:
    """Write both to a .npz file: an array under each name, bfloat16 as uint16, and "about", JSON
    text with the options, the names of bfloat16 arrays for others, and what else is ``said``."""
    given = {GIVEN.get(name, name): getattr(question, name) for name in ARRAYS} | answers
    arrays = {name: np.asarray(array) for name, array in given.items() if array is not None}
    about: dict[str, Any] = {
        "written by": "rawattn-check dump",
        "bfloat16": [name for name, array in arrays.items() if array.dtype == BFLOAT16],
        "options": {name: getattr(question, name) for name in OPTIONS},
        **said,
    }
    bits = {name: arrays[name].view(np.uint16) for name in about["bfloat16"]}
    with open(path, "wb") as file:  # a name without .npz is left as it is
        np.savez(file, about=np.array(json.dumps(about)), **arrays | bits)


def read(path: str | Path, frame: Frame | None = None) -> Saved:
    """What ``path`` holds; ValueError if it cannot be read. frame: of another, if q, k, v lack."""
    raw, about, notes = entries.of_file(Path(path))
    matrices = {name: raw.pop(name) for name in MADE if name in raw}
    try:
        arrays = entries.named(raw, notes)
        options = entries.options_of(about.get("options", {}) | arrays)
        layout = entries.layout_of(arrays.pop("layout", None))
        entries.restore(arrays, notes)
        arrays = {name: array for name, array in arrays.items() if name not in OPTIONS}
        found: dict[str, Any] = {}
        if {"q", "k", "v"} <= arrays.keys():
            frame = entries.frame_of(arrays, layout)
            found |= {f"cu_seqlens_{side}": offsets for side, offsets in frame.offsets.items()}
            notes += [NO_MASK] if "causal" not in options else []
        elif frame is None:
            return Saved(str(path), options, {}, tuple(notes), None, {})
        else:
            frame = frame._replace(layout=layout or frame.layout)
            given = {f"cu_seqlens_{side}": entries.offsets_of(arrays, side) for side in "qk"}
            found |= {name: offsets for name, offsets in given.items() if offsets is not None}
        results = {n: x for n, x in arrays.items() if n in NARROW}
        if narrow := narrowed(results, frame.dtype) if frame.dtype.itemsize == 2 else {}:
            notes.append(f"{', '.join(narrow)}: all numbers are of {frame.dtype}, judged as such")
            arrays |= narrow
        found |= {n: entries.place(n, x, frame) for n, x in arrays.items() if n not in LENGTHS}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    said = {*options, *arrays, *(OFFSETS if {*LENGTHS} & arrays.keys() else ())}
    left_out = tuple(name for name in (*MAY_BE_LEFT_OUT, *OFFSETS) if name not in said)
    called = {entry: name for name, entry in GIVEN.items()}
    inputs = {called.get(n, n): array for n, array in found.items() if n not in TENSORS}
    answers = {n: array for n, array in found.items() if n in TENSORS}
    more = tuple(notes), frame, matrices, left_out, int(about.get("identify", 0))
    return Saved(str(path), inputs | options, answers, *more)


class Pair(NamedTuple):
    """Two sides, or one. questions: what each is judged by, one object where that is the same.
    apart: how their inputs differ. notes: what else makes them be judged differently."""

    sides: tuple[Saved, ...]
    questions: tuple[Question | None, ...]
    apart: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_two(one: str | Path, other: str | Path | None = None) -> Pair:
    """Two files with what each is judged by, or one alone. A file without q, k and v has all inputs
    of the other. One that has them takes over what it does not say where these are the same; but
    not dlse, nor the out and lse that a backward pass was given."""
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
    bits = [[np.asarray(getattr(x, name)).tobytes() for name in ARRAYS] for x in (first, second)]
    return Pair(sides, (first, first if bits[0] == bits[1] and not apart else second), apart, notes)


def _completed(mine: Saved, other: Saved) -> Saved:
    """``mine`` with those inputs of ``other`` that it lacks, and may have."""
    given, lent = mine.inputs, other.inputs
    both = [name for name in (*"qkv", *OFFSETS) if name in given and name in lent]
    differ = [f"{n} {how}" for n in both if (how := _difference(given[n], lent[n]))]
    if mine.question is not None and differ:
        return mine
    if differ:
        said = f"{mine.path} and {other.path} are not about the same problem: {differ[0]}"
        raise ValueError(f"{said}. Save results with all the inputs that they are of")
    if mine.question is None:
        return mine._replace(inputs=lent | given)
    taken = {n: x for n, x in lent.items() if n not in (*given, "dlse", *GIVEN)}
    dtype = given["q"].dtype
    if "q" in lent and dtype.itemsize < lent["q"].dtype.itemsize:
        taken |= {n: x.astype(dtype) for n, x in taken.items() if n in ROUNDED}
    notes = [note for note in mine.notes if note != NO_MASK or "causal" not in taken]
    notes += [f"{', '.join(taken)}: not said, as in {other.path} is assumed"] if taken else []
    return mine._replace(inputs=taken | given, notes=tuple(notes))


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
        of = max((one, other), key=eps_of)
        coarse, share, least = of.dtype, eps_of(of), smallest_of(of)
    with np.errstate(all="ignore"):
        x, y = (array.astype(coarse).astype(np.float64) for array in (one, other))
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        wrong = ~(off <= 2 * share * np.abs(y) + 2 * least)
    how = f"differs by up to {off.max(initial=0.0):.3g}, in {wrong.sum()} of {wrong.size} numbers"
    return how if wrong.any() else ""

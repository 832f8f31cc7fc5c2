"""Questions and answers in .npz files, so that a kernel of any language can be judged.

``dump`` writes the names and shapes of rawattn. What is read may come from elsewhere: other names,
batched arrays, padding behind the sequences, heads before tokens, bfloat16 as 16-bit integers or
widened. What cannot be read is a ValueError; what had to be guessed or left out is a note.
"""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rawattn.check.diagnose.entries import (
    BFLOAT16,
    GIVEN,
    OPTIONS,
    RESULTS,
    entries,
    named,
    options_of,
    restore,
)
from rawattn.check.diagnose.layouts import (
    LENGTHS,
    Arrays,
    Frame,
    frame_of,
    layout_of,
    offsets_of,
    place,
)
from rawattn.check.diagnose.question import Answers, Question


@dataclass(frozen=True)
class Saved:
    """What a file holds. ``inputs``: the arguments of its Question, as far as they are there."""

    path: str
    inputs: dict[str, Any]
    answers: Answers
    notes: tuple[str, ...]
    frame: Frame | None

    @property
    def question(self) -> Question | None:
        """None where q, k or v is missing."""
        return Question(**self.inputs) if {"q", "k", "v"} <= self.inputs.keys() else None


def dump(path: str | Path, question: Question, answers: Answers) -> None:
    """Write both to a .npz file: an array under each name, bfloat16 as uint16, and "about", JSON
    text with the options and the names of the bfloat16 arrays."""
    arrays: Arrays = {}
    for field in fields(Question):
        value = getattr(question, field.name)
        if field.name not in OPTIONS and value is not None:
            arrays[GIVEN.get(field.name, field.name)] = np.asarray(value)
    arrays |= {name: np.asarray(array) for name, array in answers.items()}
    about = {
        "written by": "rawattn-check dump",
        "layout": "thd",
        "bfloat16": [name for name, array in arrays.items() if array.dtype == BFLOAT16],
        "options": {name: getattr(question, name) for name in OPTIONS},
    }
    stored: dict[str, Any] = {"about": np.array(json.dumps(about))}
    for name, array in arrays.items():
        stored[name] = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    with open(path, "wb") as file:  # a name without .npz is left as it is
        np.savez(file, **stored)


def load(path: str | Path) -> tuple[Question | None, Answers]:
    """What ``path`` holds. Without q, k and v the question is None, and answers are as they were.

    ValueError for what cannot be read.
    """
    saved = read(path)
    return saved.question, saved.answers


def load_two(one: str | Path, other: str | Path) -> tuple[Saved, Saved, Question | None]:
    """Two files about one problem; a file without inputs is read in the light of the other's."""
    a, b = read(one), read(other)
    if a.frame is None and b.frame is not None:
        a = read(one, b.frame)
    elif b.frame is None and a.frame is not None:
        b = read(other, a.frame)
    return a, b, merge(a, b)


def merge(a: Saved, b: Saved) -> Question | None:
    """The question of two files: what only one of them says is taken from there.

    None where neither has q, k and v. ValueError where inputs of both differ.
    """
    for name in a.inputs.keys() & b.inputs.keys():
        if reason := _difference(a.inputs[name], b.inputs[name]):
            raise ValueError(
                f"{a.path} and {b.path} are not about the same problem: {name} differs ({reason}). "
                "Save both sides from one run, with the very inputs that both were given"
            )
    return Saved("", b.inputs | a.inputs, {}, (), None).question


def read(path: str | Path, frame: Frame | None = None) -> Saved:
    """What ``path`` holds, with notes. ``frame``: that of another file, for one without inputs."""
    raw, about, notes = entries(Path(path))
    try:
        arrays = named(raw, notes)
        options = options_of(about.get("options", {}) | arrays)
        layout = layout_of(arrays.pop("layout", about.get("layout")))
        restore(arrays, arrays.pop("dtype", None), notes)
        inputs = {name: arrays.pop(name) for name in list(arrays) if name not in RESULTS}
        inputs = {name: array for name, array in inputs.items() if name not in OPTIONS}
        if {"q", "k", "v"} <= inputs.keys():
            frame = frame_of(inputs, layout, notes)
            if "causal" not in options:
                notes.append("causal is not said: False is assumed")
        elif frame is not None and layout:
            frame = replace(frame, letters={len(layout): layout})
        if frame is None:
            return Saved(str(path), options, arrays, tuple(notes), None)
        of_lengths = {f"cu_seqlens_{side}": offsets_of(inputs, side) for side in "qk"}
        if {"q", "k", "v"} <= inputs.keys():
            of_lengths = {f"cu_seqlens_{side}": frame.offsets[side] for side in "qk"}
        inputs = {name: array for name, array in inputs.items() if name not in LENGTHS}
        placed = {n: place(n, array, frame, notes) for n, array in (inputs | arrays).items()}
        found = {n: a for n, a in (placed | of_lengths).items() if a is not None}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    field_of = {entry: field for field, entry in GIVEN.items()}
    given = {field_of.get(n, n): array for n, array in found.items() if n not in RESULTS}
    answers = {n: array for n, array in found.items() if n in RESULTS}
    return Saved(str(path), given | options, answers, tuple(notes), frame)


def _difference(one: Any, other: Any) -> str:
    """How two inputs differ; "" where they are the same."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        same = one == other or (isinstance(one, float) and math.isclose(one, other, rel_tol=1e-6))
        return "" if same else f"{one} and {other}"
    if one.shape != other.shape:
        return f"shapes {one.shape} and {other.shape}"
    first, second = (np.asarray(x, dtype=np.float64) for x in (one, other))
    if np.array_equal(first, second, equal_nan=True):
        return ""
    for exact, coarse in ((one, other), (other, one)):
        with np.errstate(over="ignore"):
            rounded = exact.astype(coarse.dtype)
        if np.array_equal(rounded.astype(np.float64), coarse.astype(np.float64), equal_nan=True):
            return f"one is the other rounded to {coarse.dtype}; give both sides the rounded one"
    both = np.isfinite(first) & np.isfinite(second)
    return f"by up to {np.abs(first[both] - second[both]).max(initial=0.0):.3g}"

"""Questions and answers in .npz files, so that a kernel of any language can be judged.

``dump`` writes the names and shapes of rawattn. What is read may come from elsewhere: other names,
batched arrays, padding behind the sequences, heads before tokens, bfloat16 as 16-bit integers or
widened. What cannot be read is a ValueError; what had to be guessed or left out is a note.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.files.entries import (
    BFLOAT16,
    GIVEN,
    OPTIONS,
    RESULTS,
    entries,
    named,
    options_of,
    restore,
)
from rawattn.check.diagnose.files.layouts import (
    LENGTHS,
    Arrays,
    Frame,
    frame_of,
    layout_of,
    offsets_of,
    place,
)

MAY_BE_LEFT_OUT = ("causal", "window", "softmax_scale", "dlse")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
NO_MASK = "causal is not said: False is assumed"


@dataclass(frozen=True)
class Saved:
    """What a file holds. ``inputs``: the arguments of its Question, as far as they are there.

    left_out: fields of a Question that it does not say. about: what `rawattn-check dump` wrote for
    `explain`: "identify", how many of its sequences are not the reader's questions; "sequence",
    whose intermediates it holds.
    """

    path: str
    inputs: dict[str, Any]
    answers: Answers
    notes: tuple[str, ...]
    frame: Frame | None
    left_out: tuple[str, ...] = ()
    about: dict[str, int] = field(default_factory=dict)

    @property
    def question(self) -> Question | None:
        """None where q, k or v is missing."""
        return Question(**self.inputs) if {"q", "k", "v"} <= self.inputs.keys() else None


def dump(path: str | Path, question: Question, answers: Answers, **said: int) -> None:
    """Write both to a .npz file: an array under each name, bfloat16 as uint16, and "about", JSON
    text with the options, the names of the bfloat16 arrays, and what else is ``said``."""
    arrays: Arrays = {}
    for part in fields(Question):
        value = getattr(question, part.name)
        if part.name not in OPTIONS and value is not None:
            arrays[GIVEN.get(part.name, part.name)] = np.asarray(value)
    arrays |= {name: np.asarray(array) for name, array in answers.items()}
    about = {
        "written by": "rawattn-check dump",
        "layout": "thd",
        "bfloat16": [name for name, array in arrays.items() if array.dtype == BFLOAT16],
        "options": {name: getattr(question, name) for name in OPTIONS},
        **said,
    }
    stored: dict[str, Any] = {"about": np.array(json.dumps(about))}
    for name, array in arrays.items():
        stored[name] = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    with open(path, "wb") as file:  # a name without .npz is left as it is
        np.savez(file, **stored)


def read(path: str | Path, frame: Frame | None = None) -> Saved:
    """What ``path`` holds, with notes; ValueError for what cannot be read. ``frame``: that of
    another file, for one without inputs."""
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
                notes.append(NO_MASK)
        elif frame is not None and layout:
            frame = replace(frame, letters={len(layout): layout})
        if frame is None:
            return Saved(str(path), options, arrays, tuple(notes), None)
        said = {*options, *inputs, *(OFFSETS if set(LENGTHS) & inputs.keys() else ())}
        whole = {"q", "k", "v"} <= inputs.keys()
        given = {x: frame.offsets[x] if whole else offsets_of(inputs, x) for x in "qk"}
        found = {f"cu_seqlens_{x}": offsets for x, offsets in given.items() if offsets is not None}
        for name, array in (inputs | arrays).items():
            if name not in LENGTHS:
                found[name] = place(name, array, frame, notes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    called = {entry: name for name, entry in GIVEN.items()}
    answers = {n: array for n, array in found.items() if n in RESULTS}
    fields_of = {called.get(n, n): array for n, array in found.items() if n not in RESULTS}
    left_out = tuple(name for name in (*MAY_BE_LEFT_OUT, *OFFSETS) if name not in said)
    told = {str(name): int(about[name]) for name in ("identify", "sequence") if name in about}
    fields_of |= options
    return Saved(str(path), fields_of, answers, tuple(notes), frame, left_out, told)

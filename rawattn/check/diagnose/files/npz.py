"""Questions and answers in .npz files, so that a kernel of any language can be judged.

``dump`` writes the names and shapes of rawattn. What is read may come from elsewhere: other names,
a batch, padding behind the sequences, bfloat16 as 16-bit integers or widened. What cannot be read
is a ValueError; what had to be guessed or left out is a note.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SINKS, OF_SLOTS, Answers, Question
from rawattn.check.diagnose.evidence.steps import MADE
from rawattn.check.diagnose.files.entries import (
    BFLOAT16,
    GIVEN,
    OPTIONS,
    RESULTS,
    entries,
    named,
    narrowed,
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
NARROW = {*RESULTS} - {*BY_ROW, *OF_SLOTS, *OF_SINKS}  # of the inputs' dtype
NO_MASK = "causal is not said: False is assumed"


@dataclass(frozen=True)
class Saved:
    """What a file holds. ``inputs``: the arguments of its Question, as far as they are there.

    left_out: fields of a Question that it does not say. identify: of `rawattn-check dump`, how many
    of its sequences are not the reader's questions; 0 where none are. matrices: intermediates.
    """

    path: str
    inputs: dict[str, Any]
    answers: Answers
    notes: tuple[str, ...]
    frame: Frame | None
    left_out: tuple[str, ...] = ()
    identify: int = 0
    matrices: Answers = field(default_factory=dict)

    @property
    def question(self) -> Question | None:
        """None where q, k or v is missing."""
        return Question(**self.inputs) if {"q", "k", "v"} <= self.inputs.keys() else None


def dump(path: str | Path, question: Question, answers: Answers, **said: int) -> None:
    """Write both to a .npz file: an array under each name, bfloat16 as uint16, and "about", JSON
    text with the options, the names of the bfloat16 arrays, for who reads them elsewhere, and what
    else is ``said``."""
    arrays: Arrays = {}
    for part in fields(Question):
        value = getattr(question, part.name)
        if part.name not in OPTIONS and value is not None:
            arrays[GIVEN.get(part.name, part.name)] = np.asarray(value)
    arrays |= {name: np.asarray(array) for name, array in answers.items()}
    about = {
        "written by": "rawattn-check dump",
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
    matrices = {name: raw.pop(name) for name in MADE if name in raw}
    try:
        arrays = named(raw, notes)
        options = options_of(about.get("options", {}) | arrays)
        layout = layout_of(arrays.pop("layout", None))
        restore(arrays, notes)
        arrays = {name: array for name, array in arrays.items() if name not in OPTIONS}
        found: dict[str, Any] = {}
        if {"q", "k", "v"} <= arrays.keys():
            frame = frame_of(arrays, layout)
            found |= {f"cu_seqlens_{side}": offsets for side, offsets in frame.offsets.items()}
            notes += [NO_MASK] if "causal" not in options else []
        elif frame is None:
            return Saved(str(path), options, {}, tuple(notes), None)
        else:
            frame = replace(frame, layout=layout or frame.layout)
            given = {f"cu_seqlens_{side}": offsets_of(arrays, side) for side in "qk"}
            found |= {name: offsets for name, offsets in given.items() if offsets is not None}
        results = {n: x for n, x in arrays.items() if n in NARROW}
        if narrow := narrowed(results, frame.dtype) if frame.dtype.itemsize == 2 else {}:
            notes.append(f"{', '.join(narrow)}: all numbers are of {frame.dtype}, judged as such")
            arrays |= narrow
        for name in (name for name in arrays if name not in LENGTHS):
            found[name] = place(name, arrays[name], frame)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    said = {*options, *arrays, *(OFFSETS if {*LENGTHS} & arrays.keys() else ())}
    left_out = tuple(name for name in (*MAY_BE_LEFT_OUT, *OFFSETS) if name not in said)
    called = {entry: name for name, entry in GIVEN.items()}
    inputs = {called.get(n, n): array for n, array in found.items() if n not in RESULTS}
    answers = {n: array for n, array in found.items() if n in RESULTS}
    more = tuple(notes), frame, left_out, int(about.get("identify", 0)), matrices
    return Saved(str(path), inputs | options, answers, *more)

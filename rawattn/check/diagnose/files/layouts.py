"""Arrays of any layout as rawattn's packed ones: with a batch, with padding, with heads first.

Long by the forms that arrays come in; all of them are taken in here, and nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, MATRICES, OF_SINKS

Arrays = dict[str, np.ndarray]
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "lengths_q", "lengths_k")
OF_EACH = ("sinks", "tsinks", *OF_SINKS, "seqused_k")  # a number for each query head, or sequence
# b batch, t tokens, h heads, d head_dim
LAYOUTS = ("thd", "htd", "bthd", "bhtd", "tbhd", "btd", "td")
GUESSED = {4: ("bthd", "bhtd"), 3: ("thd", "htd"), 2: ("td",)}
CLEARLY_MORE = 4  # tokens for each head, from which on an axis is taken for that of the tokens


@dataclass(frozen=True)
class Frame:
    """The sizes that all arrays of a problem share. ``letters``: how the file orders its axes, by
    their number. pick: which of its batch * seqlen rows are tokens.
    """

    letters: dict[int, str]
    batch: int
    seqlen: dict[str, int]  # of side "q" or "k" in every entry of the batch, padding included
    heads: dict[str, int]
    head_dim: int
    head_dim_v: int
    offsets: dict[str, np.ndarray]
    pick: dict[str, np.ndarray]

    def total(self, side: str) -> int:
        """Rows of the packed arrays."""
        return len(self.pick[side])

    def lengths(self, side: str) -> list[int]:
        return [int(n) for n in np.diff(self.offsets[side])]

    def pack(self, side: str, array: np.ndarray) -> np.ndarray | None:
        """(batch, seqlen, ...) as packed rows, or an entry for each sequence with rows of padding
        behind it; None if that is not what ``array`` begins with."""
        if array.shape[:2] == (self.batch, self.seqlen[side]):
            return np.asarray(array.reshape(-1, *array.shape[2:])[self.pick[side]])
        if array.shape[:2] == (1, self.total(side)):
            return np.asarray(array[0])
        lengths = self.lengths(side)
        longer = array.shape[0] == len(lengths) and array.shape[1] >= max(lengths, default=0)
        if not longer or sum(lengths) != self.total(side):
            return None
        return np.concatenate([rows[:n] for rows, n in zip(array, lengths, strict=True)])


def layout_of(given: Any) -> str:
    """A layout in the letters b, t, h and d; "" where none is said."""
    if given is None:
        return ""
    said = str(np.asarray(given).item()).lower()
    found = said.translate(str.maketrans("snl", "ttt"))
    if found not in LAYOUTS:
        raise ValueError(
            f"layout is {said!r}; it must be one of {', '.join(LAYOUTS)} (b batch, t tokens, "
            "h heads, d head_dim; s, n and l are tokens too)"
        )
    return found


def frame_of(inputs: Arrays, layout: str, notes: list[str]) -> Frame:
    """The sizes of a file with q, k and v; ValueError where they do not fit together."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    dims = q.ndim
    if not (dims == k.ndim == v.ndim and dims in GUESSED):
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}; they must have three axes "
            "(tokens, heads, head_dim), or four with a batch; flat ones need a reshape"
        )
    found, refused = [], []
    for letters in (layout,) if len(layout) == dims else GUESSED[dims]:
        try:
            found.append(_reading(inputs, letters))
        except ValueError as error:
            refused.append(f"as {letters}: {error}")
    if not found:
        heads = "; not those of one head; if heads are side by side, reshape to (tokens, heads, "
        raise ValueError("; ".join(refused) + f"{heads}head_dim)" * (dims == 2))
    if dims == 2:
        notes.append(f"the heads are not said: q of shape {q.shape} is read as one head")
    clear = [f for f in found if f.heads["q"] * CLEARLY_MORE <= f.seqlen["k"]]
    if len(found) > 1 and len(clear) != 1 and dims == 4:
        raise ValueError(
            f"q of shape {q.shape} may be {' or '.join(GUESSED[dims])}; say which in an entry "
            "layout='bthd' (batch, tokens, heads, head_dim) or 'bhtd', or another such as 'tbhd'"
        )
    chosen = clear[0] if len(clear) == 1 else found[0]
    if len(found) > 1:
        size = f"{chosen.heads['q']} heads, {chosen.seqlen['q']} tokens"
        notes.append(f"layout is not said: {chosen.letters[dims]} is assumed ({size})")
    _note_rows(chosen, inputs, notes)
    return chosen


def _note_rows(frame: Frame, inputs: Arrays, notes: list[str]) -> None:
    """Rows that offsets leave out, and rows that look like padding and are none for the offsets."""
    for side in "qk":
        first, last = (int(n) for n in frame.offsets[side][[0, -1]])
        if first:
            notes.append(f"cu_seqlens_{side} begins at {first}: is a 0 in front missing?")
        if last < frame.total(side):
            notes.append(f"cu_seqlens_{side} ends at {last}: {side} has {frame.total(side)} rows")
    if 4 in frame.letters and not any(name in inputs for name in LENGTHS):
        rows = np.any(_ordered(inputs["k"], frame.letters[4]) != 0, axis=(2, 3))
        lengths = [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in rows]
        if min(lengths, default=0) < frame.seqlen["k"]:
            text = "lengths are not said, and k ends in zeros: if padded, save lengths="
            notes.append(f"{text}{lengths}")


def _reading(inputs: Arrays, letters: str) -> Frame:
    """The sizes if q, k and v have axes ``letters``; ValueError where they cannot."""
    q, k, v = (_ordered(inputs[name], letters).shape for name in "qkv")
    if not (q[0] == k[0] == v[0] and k[:3] == v[:3] and q[3] == k[3]):
        raise ValueError(f"q, k and v as (batch, tokens, heads, head_dim) are {q}, {k} and {v}")
    if not k[2] or q[2] % k[2]:
        raise ValueError(f"{q[2]} query heads are no multiple of {k[2]} key/value heads")
    batch, seqlen = q[0], {"q": q[1], "k": k[1]}
    ends = {side: offsets_of(inputs, side) for side in "qk"}
    if ends["k"] is None:
        ends["k"] = ends["q"]
    offsets: Arrays = {}
    pick: Arrays = {}
    for side in "qk":
        rows, given = seqlen[side], ends[side]
        if given is None:
            given = np.arange(batch + 1) * rows
        lengths = np.diff(given)
        padded = len(lengths) == batch > 1 and lengths.max(initial=0) <= rows
        packed = given[-1] == batch * rows or (batch == 1 and given[-1] <= rows)
        if not packed and not padded:
            raise ValueError(
                f"cu_seqlens_{side} ends at {given[-1]}, and {batch * rows} rows of {side} are "
                f"there ({batch} x {rows})"
            )
        starts = [b * rows + np.arange(n) for b, n in enumerate(lengths)]
        pick[side] = np.arange(batch * rows) if packed else np.concatenate(starts)
        offsets[side] = (given if packed else given - given[0]).astype(np.int32)
    if len(offsets["q"]) != len(offsets["k"]):
        raise ValueError(
            f"cu_seqlens_q has {len(offsets['q'])} entries and cu_seqlens_k {len(offsets['k'])}; "
            "both must have one more than there are sequences"
        )
    heads = {"q": q[2], "k": k[2]}
    return Frame({len(letters): letters}, batch, seqlen, heads, q[3], v[3], offsets, pick)


def offsets_of(inputs: Arrays, side: str) -> np.ndarray | None:
    """cu_seqlens of a side from offsets or lengths; None where neither is there."""
    for name, of_lengths in ((f"cu_seqlens_{side}", False), (f"lengths_{side}", True)):
        if name not in inputs:
            continue
        given = inputs[name].ravel()
        whole = np.asarray(given, dtype=np.float64)
        if inputs[name].size != max(inputs[name].shape, default=0) or (whole % 1).any():
            raise ValueError(f"{name} is {inputs[name].tolist()!r}; it must be a list of integers")
        found = given.astype(np.int64)
        found = np.concatenate([[0], np.cumsum(found)]) if of_lengths else found
        if not len(found) or found[0] < 0 or (np.diff(found) < 0).any():
            raise ValueError(f"{name} is {given.tolist()}; it must grow from 0 to the total")
        return np.asarray(found)
    return None


def _ordered(array: np.ndarray, letters: str) -> np.ndarray:
    """``array`` with axes ``letters`` as (batch, tokens, heads, head_dim)."""
    there = [letters.index(c) for c in "bthd" if c in letters]
    missing = [axis for axis, c in enumerate("bthd") if c not in letters]
    return np.expand_dims(array.transpose(there), missing)


def place(name: str, array: np.ndarray, frame: Frame, notes: list[str]) -> np.ndarray:
    """``array`` in rawattn's shape; ValueError if it does not fit."""
    if any(name in names for names in MATRICES.values()):
        return _matrix(name, array, frame, notes)
    if name in OF_EACH:
        count, what = len(frame.lengths("k")), "sequence"
        if name != "seqused_k":
            count, what = frame.heads["q"], "query head"
        if array.size != count:
            raise ValueError(f"{name} has shape {array.shape}; it must be ({count},), by {what}")
        return np.ascontiguousarray(array.ravel())
    by_row = name in BY_ROW or name in ("dlse", "given lse")
    side, width, heads = ("q", "none", "q") if by_row else _SHAPES.get(name, ("q", "v", "q"))
    widths = {"k": frame.head_dim, "v": frame.head_dim_v, "none": 1}
    dim = widths.get(width, array.shape[-1] if array.ndim else 1)
    allowed = [frame.heads[h] for h in heads]
    for form in _forms(array, frame, side, allowed, None if width == "none" else dim, by_row):
        form = form[..., 0] if width == "none" else form
        return np.ascontiguousarray(form.T if by_row else form)
    expected = (frame.total(side), *allowed[-1:], *(() if width == "none" else (dim,)))
    expected = expected[::-1] if by_row else expected
    hint, group = "", frame.heads["q"] // frame.heads["k"]
    if side == "k" and group > 1 and frame.heads["q"] in array.shape:
        hint = f". It has a head for each query head: sum over the {group} heads of a group"
    elif side == "k" and any(0 < n < frame.heads["k"] for n in array.shape[-3:-1]):
        hint = ". It has fewer heads than k: save k and v as they were before the repeat"
    raise ValueError(
        f"{name} has shape {array.shape}; it must be {expected}, or that of the batched q with "
        f"batch {frame.batch} and {frame.seqlen[side]} rows each{hint}"
    )


# side of the rows, what the last axis is like, whose heads there may be
_SHAPES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("q", "dq", "tq", "gq"), ("q", "k", "q")),
    **dict.fromkeys(("k", "dk", "tk", "gk"), ("k", "k", "k")),
    **dict.fromkeys(("v", "dv", "tv", "gv"), ("k", "v", "k")),
    **dict.fromkeys(
        ("block_indices", "block_scale", "tblock_scale", "dblock_scale", "gblock_scale"),
        ("q", "any", "qk"),
    ),
    "block_counts": ("q", "none", "qk"),
}


def _forms(
    array: np.ndarray, frame: Frame, side: str, heads: list[int], dim: int | None, by_row: bool
) -> Iterator[np.ndarray]:
    """What ``array`` may be as (total, heads, dim), the likeliest first. dim: None for numbers,
    with or without an axis of 1; ``by_row``: of which heads usually come before tokens."""
    wide = [array] if dim is not None or array.shape[-1:] == (1,) else []
    wide += [array[..., None]] if dim is None else []
    for given in wide:
        said, usual = frame.letters.get(given.ndim), GUESSED.get(given.ndim, ())
        tried = usual[::-1] if by_row else ((said,) if said else ()) + usual
        for letters in dict.fromkeys(tried):
            ordered = _ordered(given, letters)
            if ordered.shape[2] in heads and ordered.shape[3] == (dim or 1):
                packed = frame.pack(side, ordered)
                if packed is not None:
                    yield packed
    if dim and array.ndim in (2, 3) and array.shape[-1] == heads[0] * dim:  # heads side by side
        joined = array.reshape(*array.shape[:-1], heads[0], dim)
        packed = frame.pack(side, joined if array.ndim == 3 else joined[None])
        if packed is not None:
            yield packed


def _matrix(name: str, array: np.ndarray, frame: Frame, notes: list[str]) -> np.ndarray:
    """An intermediate of one sequence; of the first one where there is a batch of them."""
    found, heads = array, frame.heads["q"]
    lengths = list(zip(frame.lengths("q"), frame.lengths("k"), strict=True))
    if found.ndim == 4 and lengths:
        if len(found) > 1:
            notes.append(f"{name} of {len(found)} sequences: only that of the first one is read")
        whole = len(found) == 1 and found.shape[2:] in lengths
        found = found[0] if whole else found[0, :, : lengths[0][0], : lengths[0][1]]
    found = found[None] if found.ndim == 2 else found
    if found.ndim != 3 or found.shape[0] != heads or found.shape[1:] not in lengths:
        sizes = " or ".join(str((heads, *pair)) for pair in dict.fromkeys(lengths))
        raise ValueError(f"{name} has shape {array.shape}; of one sequence it must be {sizes}")
    return found

"""Arrays of any layout as rawattn's packed ones: with a batch, with padding, with heads first.

Long by the forms that arrays come in; all of them are taken in here, and nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SINKS

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
    their number. pick_*: which of its batch * seqlen rows are tokens; None for all of them.
    """

    letters: dict[int, str]
    batch: int
    seqlen: dict[str, int]  # of side "q" or "k" in every entry of the batch, padding included
    heads: dict[str, int]
    head_dim: int
    head_dim_v: int
    offsets: dict[str, np.ndarray]
    pick: dict[str, np.ndarray | None]

    def total(self, side: str) -> int:
        """Rows of the packed arrays."""
        picked = self.pick[side]
        return self.batch * self.seqlen[side] if picked is None else len(picked)

    def lengths(self, side: str) -> list[int]:
        return [int(n) for n in np.diff(self.offsets[side])]

    def pack(self, side: str, array: np.ndarray) -> np.ndarray | None:
        """(batch, seqlen, ...) as packed rows, or an entry for each sequence with rows of padding
        behind it; None if that is not what ``array`` begins with."""
        if array.shape[:2] == (self.batch, self.seqlen[side]):
            flat = array.reshape(-1, *array.shape[2:])
            return flat if self.pick[side] is None else flat[self.pick[side]]
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
    tried = (layout,) if len(layout) == dims else GUESSED[dims]
    found, refused = [], []
    for letters in tried:
        try:
            found.append(_reading(inputs, letters))
        except ValueError as error:
            refused.append(f"as {letters}: {error}")
    if not found and dims == 2:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}, not those of one head; "
            "if heads are side by side, reshape to (tokens, heads, head_dim)"
        )
    if not found:
        raise ValueError("; ".join(refused))
    if dims == 2:
        notes.append(f"the heads are not said: q of shape {q.shape} is read as one head")
    if len(found) == 1:
        _note_rows(found[0], inputs, notes)
        return found[0]
    clear = [f for f in found if f.heads["q"] * CLEARLY_MORE <= f.seqlen["k"]]
    if len(clear) != 1 and dims == 4:
        raise ValueError(
            f"q of shape {q.shape} may be {' or '.join(tried)}; say which in an entry "
            "layout='bthd' (batch, tokens, heads, head_dim) or 'bhtd', or another such as 'tbhd'"
        )
    chosen = clear[0] if len(clear) == 1 else found[0]
    letters = chosen.letters[dims]
    size = f"{chosen.heads['q']} heads, {chosen.seqlen['q']} tokens"
    notes.append(f"layout is not said: {letters} is assumed ({size})")
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
    if frame.letters.keys() != {4} or any(name in inputs for name in LENGTHS):
        return
    rows = np.any(_ordered(inputs["k"], frame.letters[4]) != 0, axis=(2, 3))
    lengths = [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in rows]
    if min(lengths, default=0) < frame.seqlen["k"]:
        notes.append(
            f"lengths are not said, and k ends in zeros: if padded, save lengths={lengths}"
        )


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
    pick: dict[str, np.ndarray | None] = {}
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
        offsets[side] = given.astype(np.int32)
        pick[side] = None
        if not packed:
            picked = [b * rows + np.arange(n) for b, n in enumerate(lengths)]
            offsets[side] = (given - given[0]).astype(np.int32)
            pick[side] = np.concatenate(picked)
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


def place(name: str, array: np.ndarray, frame: Frame) -> np.ndarray:
    """``array`` in rawattn's shape; ValueError if it does not fit."""
    if name in OF_EACH:
        count, what = len(frame.lengths("k")), "sequence"
        if name != "seqused_k":
            count, what = frame.heads["q"], "query head"
        if array.size != count:
            raise ValueError(f"{name} has shape {array.shape}; it must be ({count},), by {what}")
        return np.ascontiguousarray(array.ravel())
    side, width, heads = _SHAPES.get(name, ("q", "v", ("q",)))
    if name in BY_ROW or name in ("dlse", "given lse"):
        forms, expected = _rows(array, frame), (frame.heads["q"], frame.total("q"))
    else:
        allowed_heads = [frame.heads[h] for h in heads]
        dim = {"k": frame.head_dim, "v": frame.head_dim_v}.get(width)
        dim = (array.shape[-1] if array.ndim else 1) if dim is None else dim
        forms = _tokens(name, array, frame, side, allowed_heads, dim)
        expected = (frame.total(side), *allowed_heads[-1:], *(() if width == "none" else (dim,)))
    for form in forms:
        return np.ascontiguousarray(form)
    hint, heads_k = "", frame.heads["k"]
    if side == "k" and frame.heads["q"] != frame.heads["k"] and frame.heads["q"] in array.shape:
        group = frame.heads["q"] // frame.heads["k"]
        hint = f". It has a head for each query head: sum over the {group} heads of a group"
    elif side == "k" and name not in ("k", "v") and array.ndim > 2:
        if any(0 < n < heads_k and heads_k % n == 0 for n in array.shape[-3:-1]):
            hint = ". It has fewer heads than k: save k and v as they were before the repeat"
    raise ValueError(
        f"{name} has shape {array.shape}; it must be {expected}, or that of the batched q with "
        f"batch {frame.batch} and {frame.seqlen[side]} rows each{hint}"
    )


# side of the rows, what the last axis is like, whose heads there may be
_SHAPES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **dict.fromkeys(("q", "dq", "tq", "gq"), ("q", "k", ("q",))),
    **dict.fromkeys(("k", "dk", "tk", "gk"), ("k", "k", ("k",))),
    **dict.fromkeys(("v", "dv", "tv", "gv"), ("k", "v", ("k",))),
    **dict.fromkeys(
        ("block_indices", "block_scale", "tblock_scale", "dblock_scale", "gblock_scale"),
        ("q", "any", ("q", "k")),
    ),
    "block_counts": ("q", "none", ("q", "k")),
}


def _tokens(
    name: str, array: np.ndarray, frame: Frame, side: str, heads: list[int], dim: int
) -> Iterator[np.ndarray]:
    """What ``array`` may be as (total, heads, dim), the likeliest first."""
    counts = name == "block_counts"
    array = array[..., None] if counts else array
    dim = 1 if counts else dim
    said = frame.letters.get(array.ndim)
    for letters in dict.fromkeys((*((said,) if said else ()), *GUESSED.get(array.ndim, ()))):
        ordered = _ordered(array, letters)
        if ordered.shape[2] in heads and ordered.shape[3] == dim:
            packed = frame.pack(side, ordered)
            if packed is not None:
                yield packed[..., 0] if counts else packed
    if array.ndim in (2, 3) and array.shape[-1] == heads[0] * dim:  # heads side by side
        joined = array.reshape(*array.shape[:-1], heads[0], dim)
        packed = frame.pack(side, joined if array.ndim == 3 else joined[None])
        if packed is not None:
            yield packed


def _rows(array: np.ndarray, frame: Frame) -> Iterator[np.ndarray]:
    """What ``array`` may be as (num_heads_q, total_q), the likeliest first."""
    heads, seqlen = frame.heads["q"], frame.seqlen["q"]
    if array.ndim > 2 and array.shape[-1] == 1 and array.shape[-2:] != (heads, seqlen):
        array = array[..., 0]
    if array.ndim == 1 and heads == 1:
        array = array[None]
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        return
    for by_token in (array.swapaxes(1, 2), array):  # (batch, heads, tokens) is the custom
        if by_token.shape[2] == heads:
            packed = frame.pack("q", by_token)
            if packed is not None:
                yield packed.T

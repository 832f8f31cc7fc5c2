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
HEADS_FIRST = (*BY_ROW, "dlse", "given lse")  # (num_heads_q, total_q)
# side of the rows, whose heads there may be, what the last axis is like ("": there is none)
AXES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("q", "dq", "tq", "gq"), ("q", "q", "k")),
    **dict.fromkeys(("k", "dk", "tk", "gk"), ("k", "k", "k")),
    **dict.fromkeys(("v", "dv", "tv", "gv"), ("k", "k", "v")),
    **dict.fromkeys(HEADS_FIRST, ("q", "q", "")),
    **dict.fromkeys(
        ("block_indices", "block_scale", "tblock_scale", "dblock_scale", "gblock_scale"),
        ("q", "qk", "any"),
    ),
    "block_counts": ("q", "qk", ""),
}
LIKE_OUT = ("q", "q", "v")


@dataclass(frozen=True)
class Frame:
    """The sizes that all arrays of a problem share, by side "q" or "k" where these differ.

    letters: how the file orders its axes, by their number. tokens: of q and k in every entry of the
    batch, padding included; total: rows of the packed arrays. widths: of k and v.
    """

    letters: dict[int, str]
    tokens: dict[str, int]
    heads: dict[str, int]
    widths: dict[str, int]
    offsets: dict[str, np.ndarray]
    total: dict[str, int]

    def lengths(self, side: str) -> list[int]:
        return [int(n) for n in np.diff(self.offsets[side])]

    def pack(self, side: str, array: np.ndarray) -> np.ndarray | None:
        """(batch, tokens, ...) as packed rows, of all rows or of an entry for each sequence with
        rows of padding behind it; None if it is neither."""
        lengths, (batch, tokens) = self.lengths(side), array.shape[:2]
        if batch * tokens == self.total[side]:
            return array.reshape(-1, *array.shape[2:])
        longer = batch == len(lengths) and tokens >= max(lengths, default=0)
        if not longer or sum(lengths) != self.total[side]:
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
    shape, dims = inputs["q"].shape, inputs["q"].ndim
    if {inputs[name].ndim for name in "qkv"} != {dims} or dims not in GUESSED:
        shapes = ", ".join(str(inputs[name].shape) for name in "qkv")
        raise ValueError(
            f"q, k and v have shapes {shapes}; they must have three axes (tokens, heads, "
            "head_dim), or four with a batch; flat ones need a reshape"
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
        notes.append(f"the heads are not said: q of shape {shape} is read as one head")
    clear = [f for f in found if f.heads["q"] * CLEARLY_MORE <= f.tokens["k"]]
    if len(found) > 1 and len(clear) != 1 and dims == 4:
        raise ValueError(
            f"q of shape {shape} may be {' or '.join(GUESSED[dims])}; say which in an entry "
            "layout='bthd' (batch, tokens, heads, head_dim) or 'bhtd', or another such as 'tbhd'"
        )
    chosen = clear[0] if len(clear) == 1 else found[0]
    if len(found) > 1:
        size = f"{chosen.heads['q']} heads, {chosen.tokens['q']} tokens"
        notes.append(f"layout is not said: {chosen.letters[dims]} is assumed ({size})")
    for side, offsets in chosen.offsets.items():
        if offsets[0] or offsets[-1] < chosen.total[side]:
            notes.append(
                f"cu_seqlens_{side} goes from {offsets[0]} to {offsets[-1]}, and {side} has "
                f"{chosen.total[side]} rows: is a 0 in front missing?"
            )
    if dims == 4 and not any(name in inputs for name in LENGTHS):
        rows = np.any(_ordered(inputs["k"], chosen.letters[4]) != 0, axis=(2, 3))
        lengths = [int(np.flatnonzero(row).max(initial=-1)) + 1 for row in rows]
        if min(lengths, default=0) < chosen.tokens["k"]:
            text = "lengths are not said, and k ends in zeros: if padded, save lengths="
            notes.append(f"{text}{lengths}")
    return chosen


def _reading(inputs: Arrays, letters: str) -> Frame:
    """The sizes if q, k and v have axes ``letters``; ValueError where they cannot."""
    q, k, v = (_ordered(inputs[name], letters).shape for name in "qkv")
    if not (q[0] == k[0] == v[0] and k[:3] == v[:3] and q[3] == k[3]):
        raise ValueError(f"q, k and v as (batch, tokens, heads, head_dim) are {q}, {k} and {v}")
    if not k[2] or q[2] % k[2]:
        raise ValueError(f"{q[2]} query heads are no multiple of {k[2]} key/value heads")
    batch, tokens = q[0], {"q": q[1], "k": k[1]}
    offsets: Arrays = {}
    total: dict[str, int] = {}
    for side, rows in tokens.items():
        given = offsets_of(inputs, side)
        given = offsets_of(inputs, "q") if given is None else given
        given = np.arange(batch + 1) * rows if given is None else given
        lengths = np.diff(given)
        padded = len(lengths) == batch > 1 and lengths.max(initial=0) <= rows
        packed = given[-1] == batch * rows or (batch == 1 and given[-1] <= rows)
        if not packed and not padded:
            raise ValueError(
                f"cu_seqlens_{side} ends at {given[-1]}, and {batch * rows} rows of {side} are "
                f"there ({batch} x {rows})"
            )
        offsets[side] = (given if packed else given - given[0]).astype(np.int32)
        total[side] = batch * rows if packed else int(lengths.sum())
    if len(offsets["q"]) != len(offsets["k"]):
        raise ValueError(
            f"cu_seqlens_q has {len(offsets['q'])} entries and cu_seqlens_k {len(offsets['k'])}; "
            "both must have one more than there are sequences"
        )
    heads, widths = {"q": q[2], "k": k[2]}, {"k": k[3], "v": v[3]}
    return Frame({len(letters): letters}, tokens, heads, widths, offsets, total)


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
        sequences = len(frame.lengths("k")), "sequence"
        count, what = sequences if name == "seqused_k" else (frame.heads["q"], "query head")
        if array.size != count:
            raise ValueError(f"{name} has shape {array.shape}; it must be ({count},), by {what}")
        return np.ascontiguousarray(array.ravel())
    side, whose, width = AXES.get(name, LIKE_OUT)
    heads = [frame.heads[h] for h in whose]
    dims = () if not width else (frame.widths.get(width, array.shape[-1] if array.ndim else 1),)
    heads_first = name in HEADS_FIRST
    for given, letters in _forms(array, frame, heads[0], dims, heads_first):
        ordered = _ordered(given, letters)
        packed = frame.pack(side, ordered)
        if packed is not None and ordered.shape[2] in heads and ordered.shape[3:] == (dims or (1,)):
            packed = packed if dims else packed[..., 0]
            return np.ascontiguousarray(packed.T if heads_first else packed)
    expected = (frame.total[side], heads[-1], *dims)
    hint, group = "", frame.heads["q"] // frame.heads["k"]
    if side == "k" and group > 1 and frame.heads["q"] in array.shape:
        hint = f". It has a head for each query head: sum over the {group} heads of a group"
    elif side == "k" and any(0 < n < frame.heads["k"] for n in array.shape[-3:-1]):
        hint = ". It has fewer heads than k: save k and v as they were before the repeat"
    raise ValueError(
        f"{name} has shape {array.shape}; it must be {expected[::-1] if heads_first else expected},"
        f" or in the layout of q{hint}"
    )


def _forms(
    array: np.ndarray, frame: Frame, heads: int, dims: tuple[int, ...], heads_first: bool
) -> Iterator[tuple[np.ndarray, str]]:
    """``array`` with the letters that its axes may be, the likeliest first: numbers without an axis
    of 1 too, and heads side by side."""
    wide = [array] if dims or array.shape[-1:] == (1,) else []
    wide += [] if dims else [array[..., None]]
    if dims and array.ndim in (2, 3) and array.shape[-1] == heads * dims[0]:
        wide.append(array.reshape(*array.shape[:-1], heads, *dims))
    for given in wide:
        usual, said = GUESSED.get(given.ndim, ()), frame.letters.get(given.ndim)
        tried = usual[::-1] if heads_first else (said, *usual)
        yield from ((given, letters) for letters in dict.fromkeys(tried) if letters)


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

"""Arrays of a file as rawattn's packed ones: they may have a batch, with padding or heads first."""

from dataclasses import dataclass

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SINKS, OF_SLOTS

Arrays = dict[str, np.ndarray]
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "lengths_q", "lengths_k")
OF_EACH = ("sinks", "tsinks", *OF_SINKS, "seqused_k")  # a number for each query head, or sequence
LAYOUTS = ("thd", "bthd", "bhtd")  # b batch, t tokens, h heads, d head_dim
HEADS_FIRST = (*BY_ROW, "dlse", "given lse")  # (num_heads_q, total_q)
OF_BLOCKS = ("block_indices", "block_scale", "tblock_scale", *OF_SLOTS)
# side of the rows, whose heads there may be, what the last axis is like ("": there is none)
AXES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("q", "dq", "tq", "gq"), ("q", "q", "k")),
    **dict.fromkeys(("k", "dk", "tk", "gk"), ("k", "k", "k")),
    **dict.fromkeys(("v", "dv", "tv", "gv"), ("k", "k", "v")),
    **dict.fromkeys(HEADS_FIRST, ("q", "q", "")),
    **dict.fromkeys(OF_BLOCKS, ("q", "qk", "any")),
    "block_counts": ("q", "qk", ""),
}


@dataclass(frozen=True)
class Frame:
    """The sizes that all arrays of a problem share, by side "q" or "k" where these differ.
    layout: of arrays with a batch. total: of packed rows. widths: of k and v. dtype: of q."""

    layout: str
    heads: dict[str, int]
    widths: dict[str, int]
    offsets: dict[str, np.ndarray]
    total: dict[str, int]
    dtype: np.dtype

    def lengths(self, side: str) -> list[int]:
        return [int(n) for n in np.diff(self.offsets[side])]

    def packed(self, side: str, array: np.ndarray) -> np.ndarray:
        """(batch, tokens, ...) as packed rows, without padding; as it is if it is neither."""
        lengths, (batch, tokens) = self.lengths(side), array.shape[:2]
        if batch * tokens == self.total[side]:
            return array.reshape(-1, *array.shape[2:])
        if batch != len(lengths) or tokens < max(lengths, default=0):
            return array
        return np.concatenate([rows[:n] for rows, n in zip(array, lengths, strict=True)])


def layout_of(given: np.ndarray | None) -> str:
    """A layout in the letters b, t, h and d; "" where none is said."""
    found = "" if given is None else str(given.item()).lower().replace("s", "t")
    if given is not None and found not in LAYOUTS:
        raise ValueError(f"layout is {given.item()!r}; it must be one of {', '.join(LAYOUTS)}")
    return found


def frame_of(inputs: Arrays, layout: str) -> Frame:
    """The sizes of a file with q, k and v; ValueError where they do not fit together."""
    dims = {inputs[name].ndim for name in "qkv"}
    if dims != {3} and (dims != {4} or layout not in LAYOUTS[1:]):
        shapes = ", ".join(str(inputs[name].shape) for name in "qkv")
        how = "four with a batch; then say how, in an entry layout='bthd' or layout='bhtd'"
        must = f"they must have three axes (tokens, heads, head_dim), or {how}"
        raise ValueError(f"q, k and v have shapes {shapes}; {must}")
    q, k, v = (inputs[name][None] if dims == {3} else inputs[name] for name in "qkv")
    if dims == {4} and layout == "bhtd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    heads, widths = {"q": q.shape[2], "k": k.shape[2]}, {"k": k.shape[3], "v": v.shape[3]}
    alike = len(q) == len(k) and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    if not alike or not heads["k"] or heads["q"] % heads["k"]:
        must = "k has the head_dim of q, v the tokens and heads of k, and these divide those of q"
        shapes = f"{q.shape}, {k.shape} and {v.shape}"
        raise ValueError(f"q, k and v as (batch, tokens, heads, head_dim) are {shapes}; {must}")
    ends = np.any(k[:, -1:] != 0, axis=(1, 2, 3))  # of each sequence
    if dims == {4} and not ends.all() and not {*LENGTHS} & inputs.keys():
        raise ValueError("k ends in zeros: say lengths=, of all its tokens if none are padding")
    offsets: Arrays = {}
    total: dict[str, int] = {}
    for side, (batch, rows) in {"q": q.shape[:2], "k": k.shape[:2]}.items():
        known = (offsets_of(inputs, name) for name in (side, "q"))
        given = next((x for x in known if x is not None), np.arange(batch + 1) * rows)
        lengths = np.diff(given)
        padded = len(lengths) == batch > 1 and lengths.max(initial=0) <= rows
        packed = given[-1] == batch * rows or (batch == 1 and given[-1] <= rows)
        if not packed and not padded:
            there = f"{batch * rows} rows of {side} are there ({batch} x {rows})"
            raise ValueError(f"cu_seqlens_{side} ends at {given[-1]}, and {there}")
        offsets[side] = given.astype(np.int32)
        total[side] = batch * rows if packed else int(given[-1])
    if len(offsets["q"]) != len(offsets["k"]):
        n, m = (len(x) for x in offsets.values())
        raise ValueError(f"cu_seqlens_q has {n} entries and cu_seqlens_k {m}; they must be as many")
    return Frame(layout, heads, widths, offsets, total, inputs["q"].dtype)


def offsets_of(inputs: Arrays, side: str) -> np.ndarray | None:
    """cu_seqlens of a side from offsets or lengths; None where neither is there."""
    for name, of_lengths in ((f"cu_seqlens_{side}", False), (f"lengths_{side}", True)):
        if name not in inputs:
            continue
        given = inputs[name]
        if given.ndim != 1 or (np.asarray(given, dtype=np.float64) % 1).any():
            raise ValueError(f"{name} is {given.tolist()!r}; it must be a list of integers")
        found = given.astype(np.int64)
        found = np.concatenate([[0], np.cumsum(found)]) if of_lengths else found
        if not len(found) or found[0] or (np.diff(found) < 0).any():
            raise ValueError(f"{name} is {given.tolist()}; it must grow from 0 to the total")
        return np.asarray(found)
    return None


def place(name: str, array: np.ndarray, frame: Frame) -> np.ndarray:
    """``array`` in rawattn's shape; ValueError if it does not fit."""
    if name in OF_EACH:
        sequences = len(frame.lengths("k")), "sequence"
        count, what = sequences if name == "seqused_k" else (frame.heads["q"], "query head")
        if array.shape != (count,):
            raise ValueError(f"{name} has shape {array.shape}; it must be ({count},), by {what}")
        return array
    side, whose, like = AXES.get(name, ("q", "q", "v"))  # or like out
    heads, heads_first = [frame.heads[h] for h in whose], name in HEADS_FIRST
    width = {"": 1, "any": array.shape[-1] if array.ndim else 1, **frame.widths}[like]
    found = array if like else array[..., None]
    of_batch = found.ndim == 4 and frame.layout in LAYOUTS[1:]
    if found.ndim == 3 or of_batch:
        swapped = heads_first or (of_batch and frame.layout == "bhtd")
        found = found.swapaxes(-3, -2) if swapped else found
        found = frame.packed(side, found) if of_batch else found
    if any(found.shape == (frame.total[side], h, width) for h in heads):
        found = found if like else found[..., 0]
        return np.ascontiguousarray(found.T if heads_first else found)
    expected = (frame.total[side], heads[-1], *([width] if like else []))
    must = f"{expected[::-1] if heads_first else expected}, or with a batch, and a layout"
    raise ValueError(f"{name} has shape {array.shape}; it must be {must}")

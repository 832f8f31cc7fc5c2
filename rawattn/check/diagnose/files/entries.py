"""The arrays of a .npz file as rawattn's, whatever they are called there, with or without a batch,
padding, heads first. Long by all that may be there."""

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SINKS, OF_SLOTS, TENSORS, Question

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
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OPTIONAL = ("softmax_scale", "sliding", "softcap")  # may be None
INTEGERS = (*LENGTHS, "block_indices", "block_counts", "seqused_k", "layout")
GIVEN = {"out": "given out", "lse": "given lse"}  # fields of Question that share a result's name

# Names in a file besides rawattn's own; upper and lower case and separators do not matter.
TEXTS = """
q: query queries; k: key keys; v: value values; delta: dsum softmax_d
cu_seqlens_q: qo_indptr cu_seqlens_query cu_seqlens cu_seqlen indptr offsets
cu_seqlens_k: kv_indptr cu_seqlens_key cu_seqlens_kv
lengths_q: seqlens_q lengths seqlens seq_lengths; lengths_k: seqlens_k lengths_kv seqlens_kv
dout: do grad_out grad_output grad_o out_grad o_grad
dlse: grad_lse lse_grad grad_softmax_lse grad_logsumexp dlogsumexp dsoftmax_lse
tq: ddq q_tangent tangent_q grad_grad_q q_dot; tk: ddk k_tangent tangent_k grad_grad_k k_dot
tv: ddv v_tangent tangent_v grad_grad_v v_dot; tblock_scale: ddblock_scale; tsinks: ddsinks
block_indices: selected_block_indices selected_blocks; block_counts: selected_block_counts
block_scale: sel_scale gate gates block_scales; seqused_k: seqlens_used_k cache_seqlens
causal: is_causal; window: window_size; softmax_scale: scale sm_scale scaling attn_scale
softcap: logits_soft_cap logit_cap; sinks: sink attn_sink attn_sinks learnable_sink s_aux
own: include_own_block; sliding: window_of_sliding; lse: softmax_lse logsumexp log_sum_exp
out: o output attn_out attn_output attention_output; given out: out_given passed_out
given lse: lse_given passed_lse
sliding out: sliding_window_out; sliding lse: sliding_window_lse
dq: grad_q q_grad grad_query; dk: grad_k k_grad grad_key; dv: grad_v v_grad grad_value
dblock_scale: grad_block_scale block_scale_grad; dsinks: grad_sinks sinks_grad dsink
"""
ALIASES = dict(re.findall(r"(.+): (.+)", TEXTS.replace("; ", "\n")))
OWN_NAMES = (*(f.name for f in fields(Question) if f.name not in GIVEN), *TENSORS, "layout")
# They change what is computed into something that there is no reference for.
FOREIGN = ("dropoutp", "dropout", "alibislopes", "bias")
ENOUGH = 16  # different numbers, all of 16 bits, that are no coincidence


class Frame(NamedTuple):
    """The sizes that all arrays of a problem share, by side "q" or "k" where these differ.
    layout: of arrays with a batch. total: of packed rows. widths: of k and v. dtype: of q."""

    layout: str
    heads: dict[str, int]
    widths: dict[str, int]
    offsets: dict[str, np.ndarray]
    total: dict[str, int]
    dtype: np.dtype

    def packed(self, side: str, array: np.ndarray) -> np.ndarray:
        """(batch, tokens, ...) as packed rows, without padding; as it is if it is neither."""
        lengths, (batch, tokens) = np.diff(self.offsets[side]), array.shape[:2]
        if batch * tokens == self.total[side]:
            return array.reshape(-1, *array.shape[2:])
        if batch != len(lengths) or tokens < max(lengths, default=0):
            return array
        return np.concatenate([rows[:n] for rows, n in zip(array, lengths, strict=True)])


def of_file(path: Path) -> tuple[Arrays, dict[str, Any], list[str]]:
    """The arrays of a file, its "about", and notes on what it has besides."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .npz file; write one with numpy.savez(file, q=q, k=k, ...)")
    found, notes = Arrays(), list[str]()
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                found[name] = np.asarray(file[name])
            except ValueError:
                notes.append(f"{name} is a Python object (None?) and is not read")
    try:
        return found, dict(json.loads(str(found.pop("about", "{}")))), notes
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: about is not JSON text of names and values ({error})") from error


def _plain(name: str) -> str:
    """A name without its case and its separators."""
    return "".join(c for c in name.lower() if c.isalnum())


def _pair(value: np.ndarray) -> tuple[int, int]:
    left, right = (int(n) for n in value)
    return left, right


def _flag(value: np.ndarray) -> bool:
    text = str(value.item()).lower()
    return text == "true" if text in ("true", "false") else bool(float(text))


_MEANT = {
    **{_plain(alias): name for name, others in ALIASES.items() for alias in others.split()},
    **{_plain(name): name for name in (*ALIASES, *OWN_NAMES)},
}
_READ: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    **dict.fromkeys(("window", "sliding"), (_pair, "two integers (left, right), -1 for open")),
    **dict.fromkeys(("causal", "own"), (_flag, "true or false")),
    "softmax_scale": (lambda value: float(value.item()), "one number"),
    "softcap": (lambda value: float(value.item()) or None, "one number, 0 for none"),
    "block_size": (lambda value: int(value.item()), "one integer"),
}
OPTIONS = (*_READ,)


def named(raw: Arrays, notes: list[str]) -> Arrays:
    """``raw`` by rawattn's names; what has none of these is left out and noted."""
    found: Arrays = {}
    for entry, array in raw.items():
        name = _plain(entry)
        meant = _MEANT.get(name)
        if name in FOREIGN and np.any(np.asarray(array, dtype=np.float64)):
            raise ValueError(f"{entry} is not 0: there is no reference for that; leave it out")
        if meant is None:
            notes.append(f"{entry} is not read: the name means nothing here")
        elif meant in found and not np.array_equal(found[meant], array):
            raise ValueError(f"{entry} is a second entry for {meant}; leave one of them out")
        else:
            found[meant] = array
    return found


def options_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """The options of a Question, as far as they are said; None where one is said to be none."""
    found: dict[str, Any] = {name: None for name in OPTIONAL if name in arrays}
    for name, (read, want) in _READ.items():
        if arrays.get(name) is None:
            continue
        try:
            found[name] = read(np.asarray(arrays[name]))
        except (ValueError, TypeError) as error:
            shown = np.asarray(arrays[name]).tolist()
            raise ValueError(f"{name} is {shown!r}; it must be {want}") from error
    return found


def restore(arrays: Arrays, notes: list[str]) -> None:
    """Bring numbers to a float dtype: bits of bfloat16, and 16-bit numbers that were widened."""
    floats = {n: _floating(n, a) for n, a in arrays.items() if n not in (*INTEGERS, *OPTIONS)}
    arrays.update(floats)
    for narrow in (BFLOAT16, np.dtype(np.float16)):
        told = narrowed(floats, narrow)
        if {"q", "k", "v"} <= told.keys() and told.keys() & {*TENSORS}:
            arrays.update(told)
            notes.append(f"{', '.join(sorted(told))}: all numbers are of {narrow}, read as such")
            return


def narrowed(arrays: Arrays, dtype: np.dtype) -> Arrays:
    """Those wider than ``dtype`` that are nothing but numbers of it, hardly by chance, in it."""
    found: Arrays = {}
    for name, array in arrays.items():
        with np.errstate(over="ignore"):
            x = array.astype(dtype)
            same = np.array_equal(x.astype(array.dtype), array, equal_nan=True)
        numbers = array.ravel()[:1000]
        numbers = numbers[np.isfinite(numbers)]
        telling = len(np.unique(numbers)) >= ENOUGH and np.any(numbers % 1)
        if array.dtype.itemsize > 2 and same and telling:
            found[name] = x
    return found


def _floating(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype in (BFLOAT16, np.uint16, np.dtype("V2")):  # as numpy.save writes bfloat16
        return array.view(BFLOAT16)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise ValueError(f"{name} has dtype {array.dtype}; it must be floating, or uint16 bits")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


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
    offsets, total = Arrays(), dict[str, int]()
    for side, (batch, rows) in {"q": q.shape[:2], "k": k.shape[:2]}.items():
        known = (offsets_of(inputs, name) for name in (side, "q"))
        given = next((x for x in known if x is not None), np.arange(batch + 1) * rows)
        lengths = np.diff(given)
        packed = given[-1] == batch * rows or (batch == 1 and given[-1] <= rows)
        if not packed and not (len(lengths) == batch > 1 and lengths.max(initial=0) <= rows):
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
        if (given := inputs.get(name)) is None:
            continue
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
        sequences = len(frame.offsets["k"]) - 1, "sequence"
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

"""The arrays of a .npz file by rawattn's names, whatever they are called there."""

import json
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import TENSORS, Question
from rawattn.check.diagnose.files.layouts import LENGTHS, Arrays

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OPTIONAL = ("softmax_scale", "sliding", "softcap")  # may be None
INTEGERS = (*LENGTHS, "block_indices", "block_counts", "seqused_k", "layout")
GIVEN = {"out": "given out", "lse": "given lse"}  # fields of Question that share a result's name

# Names in a file besides rawattn's own; upper and lower case and separators do not matter.
ALIASES = {
    **{"q": "query queries", "k": "key keys", "v": "value values"},
    "cu_seqlens_q": "qo_indptr cu_seqlens_query cu_seqlens cu_seqlen indptr offsets",
    "cu_seqlens_k": "kv_indptr cu_seqlens_key cu_seqlens_kv",
    "lengths_q": "seqlens_q lengths seqlens seq_lengths",
    "lengths_k": "seqlens_k lengths_kv seqlens_kv",
    "dout": "do grad_out grad_output grad_o out_grad o_grad",
    "dlse": "grad_lse lse_grad grad_softmax_lse grad_logsumexp dlogsumexp dsoftmax_lse",
    **{f"t{x}": f"dd{x} {x}_tangent tangent_{x} grad_grad_{x} {x}_dot" for x in "qkv"},
    **{"given out": "out_given passed_out", "given lse": "lse_given passed_lse"},
    "block_indices": "selected_block_indices selected_blocks",
    "block_counts": "selected_block_counts",
    **{"block_scale": "sel_scale gate gates block_scales", "tblock_scale": "ddblock_scale"},
    **{"causal": "is_causal", "window": "window_size"},
    "softmax_scale": "scale sm_scale scaling attn_scale",
    "softcap": "logits_soft_cap logit_cap",
    "sinks": "sink attn_sink attn_sinks learnable_sink s_aux",
    "seqused_k": "seqlens_used_k cache_seqlens",
    **{"tsinks": "ddsinks", "dsinks": "grad_sinks sinks_grad dsink"},
    **{"own": "include_own_block", "sliding": "window_of_sliding"},
    "out": "o output attn_out attn_output attention_output",
    "lse": "softmax_lse logsumexp log_sum_exp",
    **{"sliding out": "sliding_window_out", "sliding lse": "sliding_window_lse"},
    "delta": "dsum softmax_d",
    **{"dq": "grad_q q_grad grad_query", "dk": "grad_k k_grad grad_key"},
    **{"dv": "grad_v v_grad grad_value", "dblock_scale": "grad_block_scale block_scale_grad"},
}
OWN_NAMES = (*(f.name for f in fields(Question) if f.name not in GIVEN), *TENSORS, "layout")
# They change what is computed into something that there is no reference for.
FOREIGN = ("dropoutp", "dropout", "alibislopes", "bias")
ENOUGH = 16  # different numbers, all of 16 bits, that are no coincidence


def of_file(path: Path) -> tuple[Arrays, dict[str, Any], list[str]]:
    """The arrays of a file, its "about", and notes on what it has besides."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .npz file; write one with numpy.savez(file, q=q, k=k, ...)")
    found: Arrays = {}
    notes = []
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


_MEANT = {
    **{_plain(alias): name for name, others in ALIASES.items() for alias in others.split()},
    **{_plain(name): name for name in (*ALIASES, *OWN_NAMES)},
}


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


def _pair(value: np.ndarray) -> tuple[int, int]:
    left, right = (int(n) for n in value)
    return left, right


def _flag(value: np.ndarray) -> bool:
    text = str(value.item()).lower()
    return text == "true" if text in ("true", "false") else bool(float(text))


_READ: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    **dict.fromkeys(("window", "sliding"), (_pair, "two integers (left, right), -1 for open")),
    **dict.fromkeys(("causal", "own"), (_flag, "true or false")),
    "softmax_scale": (lambda value: float(value.item()), "one number"),
    "softcap": (lambda value: float(value.item()) or None, "one number, 0 for none"),
    "block_size": (lambda value: int(value.item()), "one integer"),
}
OPTIONS = (*_READ,)


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

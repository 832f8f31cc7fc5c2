"""What a diagnosis knows: the inputs of one attention problem, and what somebody computed of it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.transfer import Array

Answers = dict[str, np.ndarray]  # what somebody computed, by the names of STAGES

STAGES = {
    "forward": ("out", "lse", "sliding out", "sliding lse"),
    "backward": ("delta", "dq", "dk", "dv", "dblock_scale"),
    "second": ("ddout", "ddlse", "gq", "gk", "gv", "gblock_scale"),
    "jvp": ("jvp out", "tout", "jvp lse", "tlse"),
}
BY_ROW = ("lse", "sliding lse", "delta", "ddlse", "jvp lse", "tlse")  # (num_heads_q, total_q)
OF_KEYS = ("dk", "dv", "gk", "gv")  # (total_k, num_heads_kv, ...)
OF_SLOTS = ("dblock_scale", "gblock_scale")  # like block_indices
OF_SINKS = ("dsinks", "gsinks")  # (num_heads_q,), judged apart: they have no rows
TENSORS = (*(name for names in STAGES.values() for name in names), *OF_SINKS)
WIDE = (*BY_ROW, *OF_SLOTS, *OF_SINKS)  # not of the dtype of q, but as exact as lse
LISTS = ("block_indices", "block_counts", "block_scale", "tblock_scale")
BY_TOKENS = {  # what a question has by rows of q and of k
    "q": ("q", "dout", "tq", "out", "dlse", "lse", *LISTS),
    "k": ("k", "v", "tk", "tv"),
}


@dataclass(frozen=True, eq=False)
class Question:
    """One packed problem as NumPy arrays, with the names and shapes of rawattn's functions. ``tq``,
    ``tk``, ``tv`` and ``tblock_scale`` are a direction: the tangents of ``jvp``, and what
    ``double_backward`` calls ddq, ddk, ddv and ddblock_scale; ``tsinks`` is that of the sinks.
    ``out`` and ``lse`` are those that a backward pass was given; None where it used those of its
    own forward. With ``block_indices`` attention is block-sparse, ``own`` is include_own_block, and
    ``sliding`` the window of the second branch. ``whole``: the pack that this begins."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    dout: Array | None = None
    dlse: Array | None = None
    tq: Array | None = None
    tk: Array | None = None
    tv: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    block_indices: Array | None = None
    block_counts: Array | None = None
    block_scale: Array | None = None
    tblock_scale: Array | None = None
    block_size: int = 64
    own: bool = True
    sliding: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: Array | None = None
    tsinks: Array | None = None
    seqused_k: Array | None = None
    whole: "Question | None" = None

    @cached_property
    def lengths_q(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.diff(self.cu_seqlens_q))

    @cached_property
    def lengths_k(self) -> tuple[int, ...]:
        """The keys of every sequence that are in use."""
        given = np.diff(self.cu_seqlens_k)
        used = given if self.seqused_k is None else np.clip(self.seqused_k, 0, given)
        return tuple(int(n) for n in used)

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def num_heads_q(self) -> int:
        return int(self.q.shape[1])

    @property
    def num_heads_kv(self) -> int:
        return int(self.k.shape[1])

    @property
    def group(self) -> int:
        return self.num_heads_q // self.num_heads_kv

    @property
    def passed(self) -> tuple[Array, Array] | None:
        """The out and lse that backward passes were given; None for their own forward's."""
        return None if self.out is None or self.lse is None else (self.out, self.lse)

    def given_to_backward(self, answers: Answers) -> tuple[Array, Array] | None:
        """The same, most likely, of who gave ``answers``; None where right ones must be assumed."""
        of_forward = (answers["out"], answers["lse"]) if {"out", "lse"} <= answers.keys() else None
        return of_forward if self.passed is None else self.passed

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5 if self.softmax_scale is None else self.softmax_scale)

    @property
    def mask_window(self) -> tuple[int, int]:
        """The window with ``causal`` folded in: causal is a right side of 0."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def slots(self) -> int:
        return 0 if self.block_indices is None else int(self.block_indices.shape[2])

    @property
    def sparse(self) -> bool:
        return self.block_indices is not None

    @property
    def rare(self) -> tuple[str, ...]:
        return tuple(n for n in ("softcap", "sinks", "seqused_k") if getattr(self, n) is not None)

    @property
    def dtype(self) -> np.dtype:
        return np.asarray(self.q).dtype

    @property
    def stages(self) -> tuple[str, ...]:
        direction = (self.tq, self.tk, self.tv, self.tblock_scale, self.tsinks)
        moved, back = any(x is not None for x in direction), self.dout is not None
        there = {"forward": True, "backward": back, "second": back and moved, "jvp": moved}
        return tuple(stage for stage in STAGES if there[stage])

    def offsets(self, of: str) -> np.ndarray:
        """Where the sequences begin, and the last one ends, of a side or a tensor."""
        return np.asarray(self.cu_seqlens_q if side_of(of) == "q" else self.cu_seqlens_k)

    def span(self, of: str, b: int) -> slice:
        return slice(*self.offsets(of)[b : b + 2].tolist())

    def sequence_of(self, of: str) -> np.ndarray:
        """For every row of side "q" or "k", or of a tensor, its sequence, -1 past the last one."""
        offsets = self.offsets(of)
        found = np.full(len(self.q if side_of(of) == "q" else self.k), -1, dtype=np.int64)
        found[offsets[0] : offsets[-1]] = np.repeat(np.arange(self.batch), np.diff(offsets))
        return found

    def place_of(self, of: str) -> np.ndarray:
        """For every row its number in its sequence."""
        sequence = self.sequence_of(of)
        return np.asarray(np.arange(len(sequence)) - self.offsets(of)[sequence])


def side_of(tensor: str) -> str:
    return "k" if tensor in ("k", "v", "tk", "tv", *OF_KEYS) else "q"


def by_rows(tensor: str, array: Any) -> np.ndarray:
    """``array`` in float64 as (tokens, heads, width); not to be written to."""
    wide = np.asarray(array, dtype=np.float64)
    return wide.T[..., None] if tensor in BY_ROW else wide


def part(
    question: Question, answers: Answers, first: int, stop: int, past: int = 0
) -> tuple[Question, Answers]:
    """Sequences from ``first`` on, and keys ``past`` them with results of 0; no sums over all."""
    changes, rows = dict[str, Any](whole=None), dict[str, slice]()
    for of in "qk":
        offsets = question.offsets(of)[first : stop + 1]
        rows[of] = slice(int(offsets[0]), int(offsets[-1]) + past * (of == "k"))
        for name in BY_TOKENS[of]:
            if (x := getattr(question, name)) is not None:
                changes[name] = x[:, rows[of]] if name in ("dlse", "lse") else x[rows[of]]
        changes[f"cu_seqlens_{of}"] = offsets - offsets[0]
    if question.seqused_k is not None:
        changes["seqused_k"] = question.seqused_k[first:stop]
    found = {name: x for name, x in answers.items() if name not in OF_SINKS}
    for name, x in found.items():
        of = side_of(name)
        found[name] = x[:, rows["q"]] if name in BY_ROW else x[rows[of]]
        if past and of == "k":
            found[name] = found[name].copy()
            found[name][changes["cu_seqlens_k"][-1] :] = 0
    return replace(question, **changes), found

"""The reference on the numbers of one case: dense or sparse, by one set of functions."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.cases import Case, Direction, Tensors, make
from rawattn.check.diagnose.engine.attention import Rounding, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.sparse_cases import SparseCase
from rawattn.check.sparse_tensors import SparseTensors, make_sparse, seen
from rawattn.check.transfer import Array
from rawattn.reference import dense, second, sparse

Float64 = npt.NDArray[np.float64]
Results = dict[str, Float64]  # by name; what does not exist for a case is not in it

# The side of a result: it has rows like q or like k, or numbers for each row of q, slot or head.
SIDES = {
    **{"out": "q", "lse": "row", "dq": "q", "dk": "k", "dv": "k", "dblock_scale": "slot"},
    **{"tout": "q", "tlse": "row", "ddout": "q", "ddlse": "row"},
    **{"gq": "q", "gk": "k", "gv": "k", "gblock_scale": "slot"},
    **{"dsinks": "head", "gsinks": "head"},
    **{"sliding out": "q", "sliding lse": "row"},
}
HESSIAN = ("gq", "gk", "gv")  # the second derivatives times a direction


def gradients_of(case: Case) -> tuple[str, ...]:
    """The results of ``backward``, the last one if the case has what it is of."""
    return "dq", "dk", "dv", f"d{case.learned}"


def second_of(case: Case) -> tuple[str, ...]:
    """Those of ``double_backward``, likewise."""
    return "ddout", "ddlse", *of_direction(case)


def of_direction(case: Case) -> tuple[str, ...]:
    """Those of them that there is one of for each part of a direction."""
    return *HESSIAN, f"g{case.learned}"


@dataclass(frozen=True, slots=True)
class Exact:
    """The inputs of a case without their poison, and the functions that the case is about.

    The poison is taken out here: the reference shall not depend on its own isolation. ``zeros``
    says for a side which elements must be exactly 0. Every function has a ``rounding``.
    """

    case: Case
    first: ModuleType
    beyond: ModuleType
    tensors: tuple[Float64, Float64, Float64, Float64]  # q, k, v, dout
    dlse: Float64 | None
    where: tuple[Array, ...]
    options: dict[str, Any]
    zeros: dict[str, npt.NDArray[np.bool_]]

    def forward(self, rounding: Any = None) -> Results:
        """out and lse."""
        inputs = (*self.tensors[:3], *self.where)
        return _named(
            ("out", "lse"), self.first.forward(*inputs, rounding=rounding, **self.options)
        )

    def backward(self, out: Array, lse: Array, rounding: Any = None) -> Results:
        """The gradients."""
        q, k, v, dout = self.tensors
        inputs, mode = (dout, q, k, v, out, lse, *self.where), {"dlse": self.dlse} | self.options
        results = self.first.backward(*inputs, rounding=rounding, **mode)
        return _named(gradients_of(self.case), results)

    def jvp(self, direction: Direction, rounding: Any = None) -> Results:
        """tout and tlse."""
        parts, gate = self._parts(direction, "t")
        inputs, mode = (*self.tensors[:3], *parts, *self.where), gate | self.options
        _, tout, _, tlse = self.beyond.jvp(*inputs, rounding=rounding, **mode)
        return {"tout": tout, "tlse": tlse}

    def double_backward(
        self, direction: Direction, out: Array, lse: Array, rounding: Any = None
    ) -> Results:
        """ddout, ddlse and the second derivatives in ``direction``."""
        if rounding is not None and (self.case.softcap is not None or self.case.sinks):
            return self.rounded_second(direction, out, lse, rounding)
        parts, gate = self._parts(direction, "dd")
        q, k, v, dout = self.tensors
        inputs, mode = (*parts, dout, q, k, v, out, lse, *self.where), gate | self.options
        results = self.beyond.double_backward(*inputs, dlse=self.dlse, rounding=rounding, **mode)
        return _named(second_of(self.case), results)

    def rounded_second(
        self, direction: Direction, out: Array, lse: Array, rounding: Any
    ) -> Results:
        """``double_backward`` with each step of the diagnosis' engine rounded: for softcap and
        sinks, which the reference has no rounding for."""
        q, k, v, dout = self.tensors
        parts, moved = self._parts(direction, "t")
        tangents = dict(zip(("tq", "tk", "tv"), parts, strict=True)) | moved
        inputs = {"dout": dout, "dlse": self.dlse} | tangents | self.options
        question = Question(q, k, v, *self.where, **inputs)
        steps = Rounding(lambda x: np.asarray(x).astype(rounding).astype(np.float64))
        return solve(question, "second", rounding=steps, given=(out, lse))

    def _parts(self, direction: Direction, prefix: str) -> tuple[Direction, dict[str, Any]]:
        cleaned = tuple(None if part is None else clean(part) for part in direction)
        moved = zip((f"{prefix}{self.case.learned}",), cleaned[3:], strict=False)
        return cleaned[:3], dict(moved)


def exact(case: Case, seed: int = 0) -> tuple[Tensors, Exact]:
    """The inputs of ``case``, with the poison and without it."""
    if isinstance(case, SparseCase):
        sparsely = make_sparse(case, seed)
        return sparsely, _sparse(case, sparsely)
    tensors = make(case, seed)
    where = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    options = {
        **{"window": case.mask_window, "softmax_scale": case.softmax_scale},
        **{"softcap": case.softcap, "seqused_k": tensors.seqused_k},
        "sinks": None if tensors.sinks is None else clean(tensors.sinks),
    }
    zeros = {side: case.unseen(side)[:, None, None] for side in "qk"}
    zeros["head"] = np.zeros(case.num_heads_q, dtype=bool)
    return tensors, Exact(case, dense, second, *_cleaned(tensors), where, options, zeros)


def sliding(case: SparseCase, exact: Exact, rounding: Any = None) -> Results:
    """out and lse of the sliding branch."""
    inputs = (*exact.tensors[:3], *exact.where[:2])
    results = dense.forward(
        *inputs, window=case.mask_window, softmax_scale=case.softmax_scale, rounding=rounding
    )
    return _named(("sliding out", "sliding lse"), results)


def clean(array: Array) -> Float64:
    """``array`` in float64, with 0 for NaN."""
    return np.asarray(np.nan_to_num(array.astype(np.float64)))


def _sparse(case: SparseCase, tensors: SparseTensors) -> Exact:
    t, there = tensors, seen(case, tensors.selection)
    options = {
        "block_size": case.block_size,
        "include_own_block": case.own,
        "causal": case.causal,
        "softmax_scale": case.softmax_scale,
        "block_counts": t.block_counts,
        "block_scale": None if t.block_scale is None else clean(t.block_scale),
    }
    where = (t.cu_seqlens_q, t.cu_seqlens_k, t.block_indices)
    zeros = {"q": ~there.q[..., None], "k": ~there.k[..., None], "slot": ~there.slots}
    return Exact(case, sparse, sparse, *_cleaned(tensors), where, options, zeros)


def _cleaned(t: Tensors) -> tuple[tuple[Float64, Float64, Float64, Float64], Float64 | None]:
    arrays = (clean(t.q), clean(t.k), clean(t.v), clean(t.dout))
    return arrays, None if t.dlse is None else clean(t.dlse)


def _named(names: tuple[str, ...], results: tuple[Float64 | None, ...]) -> Results:
    return {n: array for n, array in zip(names, results, strict=False) if array is not None}

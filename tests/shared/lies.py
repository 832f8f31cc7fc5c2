"""Problems whose offsets lie: past the tokens, falling, negative; and every function on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import rawattn
from rawattn.check.cases import HALF, dtype_of
from rawattn.variants import METHODS
from tests.shared.gpu_arrays import Arrays, moved

FAR = 2**31 - 1
LIES = {
    "past": (0, 1000),
    "past-in-the-middle": (0, 100, 400),
    "falling": (0, 40, 20, 64),
    "all-falling": (64, 40, 0),
    "falls-from-far": (0, FAR, 5),
    "negative-start": (-3, 64),
    "negative-in-the-middle": (0, -50, 64),
    "from-10": (10, 64),
    "backwards": (64, 0),
    "far": (0, 64, FAR),
    "from-far": (FAR, FAR),
    "everywhere": (-FAR - 1, FAR),
    "everywhere-backwards": (FAR, -FAR - 1),
    "negative-far": (0, -FAR - 1, 64),
    "many": (0, *(FAR - n for n in range(300)), 64),
}
TOKENS = ((64, 64), (64, 300), (300, 64))
SIDES = ("q", "k", "qk")  # whose offsets lie


@dataclass(frozen=True)
class Form:
    """What decides on the kernels that are compiled."""

    dtype: str
    dims: tuple[int, int]
    heads: tuple[int, int] = (4, 2)
    mask: tuple[tuple[str, Any], ...] = ()
    block_size: int = 0  # of sparse attention

    def __str__(self) -> str:
        d, dv = self.dims
        return "-".join([self.dtype, f"d{d}-{dv}", *(f"{k}{v}" for k, v in self.mask)])


DENSE = (
    Form(HALF[0], (64, 64)),
    Form(HALF[1], (128, 32), mask=(("causal", True),)),
    Form(HALF[0], (32, 256), (3, 1), mask=(("window", (20, 5)),)),
    Form(HALF[1], (64, 64), (2, 2), mask=(("window", (9, -1)),)),
    Form(HALF[0], (128, 128), mask=(("window", (-1, 9)),)),
    Form(HALF[1], (192, 128), mask=(("causal", True),)),
)
SPARSE = (
    Form(HALF[0], (64, 64), (4, 2), (("causal", True),), 16),
    Form(HALF[1], (128, 128), (16, 1), (("causal", True),), 64),
    Form(HALF[0], (192, 32), (2, 1), (("causal", False), ("include_own_block", False)), 32),
    Form(HALF[1], (64, 64), (16, 1), (("causal", False),), 128),
)


class Problem:
    """Finite inputs, and offsets that lie on some ``sides``; the other side's are true."""

    def __init__(self, form: Form, lie: str, sides: str, tokens: tuple[int, int]) -> None:
        self.rng, (d, dv) = np.random.default_rng(0), form.dims
        dtype = dtype_of(form.dtype)
        of_q, of_k = zip(tokens, form.heads, strict=True)
        self.q, self.tq = (self.normal(dtype, *of_q, d) for _ in range(2))
        self.k, self.tk = (self.normal(dtype, *of_k, d) for _ in range(2))
        self.v, self.tv = (self.normal(dtype, *of_k, dv) for _ in range(2))
        self.out, self.dout = (self.normal(dtype, *of_q, dv) for _ in range(2))
        self.lse = moved(np.full(of_q[::-1], 4, np.float32))  # about that of the scores there are
        self.cu_q, self.cu_k = (
            moved(np.array(LIES[lie] if side in sides else even(total, lie), np.int32))
            for side, total in zip("qk", tokens, strict=True)
        )
        self.options = {"cu_seqlens_k": self.cu_k, "backend": "cuda", **dict(form.mask)}
        if form.block_size:
            chosen = self.rng.integers(-1, 8, (tokens[0], form.heads[1], 3))
            self.block_indices = moved(chosen.astype(np.int32))
            self.block_scale = self.normal("float32", *chosen.shape) / 8  # P stays small
            self.options["block_size"] = form.block_size

    def normal(self, dtype: Any, *shape: int) -> Any:
        return moved(self.rng.standard_normal(shape).astype(dtype))

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v

    @property
    def direction(self) -> tuple[Any, ...]:
        return self.tq, self.tk, self.tv

    @property
    def passed(self) -> tuple[Any, ...]:
        return self.dout, *self.inputs, self.out, self.lse, self.cu_q


def even(total: int, lie: str) -> Any:
    """True offsets of as many sequences as a lie has."""
    return np.linspace(0, total, len(LIES[lie])).astype(np.int32)


def room(**likes: Any) -> Arrays:
    """Arrays of zeros for results: what belongs to no sequence may stay unwritten."""
    return {name: moved(np.zeros(like.shape, like.dtype)) for name, like in likes.items()}


def dense(p: Problem) -> dict[str, Any]:
    """The results of every function that must be finite."""
    out = rawattn.forward(*p.inputs, p.cu_q, **room(out=p.out), **p.options)
    tangents = room(out=p.out, tout=p.out)
    rawattn.jvp(*p.inputs, *p.direction, p.cu_q, **tangents, **p.options)
    results = {"forward": [out], "jvp": list(tangents.values())}
    for method in METHODS:
        rooms = room(dq=p.q, dk=p.k, dv=p.v)
        results[method] = rawattn.backward(*p.passed, method=method, **rooms, **p.options)
    for exact in (False, True):
        rooms = room(ddout=p.out, ddlse=p.lse, gq=p.q, gk=p.k, gv=p.v)
        options = p.options | rooms | {"deterministic": exact}
        results[f"second, {exact}"] = rawattn.double_backward(*p.direction, *p.passed, **options)
    return results


def sparse(p: Problem) -> dict[str, Any]:
    which, gate = p.block_indices, {"block_scale": p.block_scale}
    inputs, passed = (*p.inputs, p.cu_q, which), (*p.passed, which)
    out = rawattn.sparse_forward(*inputs, **room(out=p.out), **p.options)
    gated = rawattn.sparse_forward(*inputs, **gate, **room(out=p.out), **p.options)
    results = {"forward": [out, gated]}
    for exact in (False, True):
        rooms = room(dq=p.q, dk=p.k, dv=p.v)
        options = p.options | rooms | gate | {"deterministic": exact}
        results[f"backward, {exact}"] = rawattn.sparse_backward(*passed, **options)
    moving = {"tblock_scale": p.block_scale}
    tangents = rawattn.sparse_jvp(
        *p.inputs, *p.direction, p.cu_q, which, **moving, **gate, **p.options
    )
    moving = {"ddblock_scale": p.block_scale}
    second = rawattn.sparse_double_backward(*p.direction, *passed, **moving, **gate, **p.options)
    return results | {"jvp": tangents[:2], "second": second}

"""What the tests on a GPU share: random problems of second order, their truth, verdicts, builds.

The truth of second derivatives and of forward mode comes from torch's autograd of dense attention,
sequence by sequence: in float64, and in the kernels' dtype for the error that is allowed to them.
Long, since a problem, its truth and its verdict are read together.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import launch, variants
from rawattn.build import NO_DIRECTION, Build, prelude
from rawattn.check.cases import NEIGHBOUR, Case, Tensors, dtype_of, lse_dtype, make
from rawattn.check.compiled import warm_build
from rawattn.check.expected import Target
from rawattn.check.transfer import loaded_torch, to_framework, to_numpy
from rawattn.check.workers import work
from rawattn.ops.arguments import args_bytes
from rawattn.problem import Problem
from rawattn.reference.dense import allowed
from rawattn.variants import Row
from rawattn.variants.steps import STEPS, Step, steps_beside
from tests.shared.device import device_arch
from tests.shared.gpu_arrays import Arrays

ARCH = device_arch() or 90  # without a GPU the cases of 9.0 are collected, and skipped
Direction = tuple[bool, bool, bool]  # which parts of (ddq, ddk, ddv) there are
WHOLE: Direction = (True, True, True)
PARTIAL: tuple[Direction, ...] = (
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, True, False),
    (True, False, True),
    (False, True, True),
)
OF_JVP = ("out", "tout", "lse", "tlse")
DOUBLE_BACKWARD = ("ddout", "ddlse", "gq", "gk", "gv")
OF_SCORES = ("tlse", "ddlse", "gv")  # 0 in a direction that leaves the scores as they are
STEMS = ("jvp", "double_backward_out", "double_backward_kv", "double_backward_q")


# ---- cases ------------------------------------------------------------------------------------


def sized(d: int, dv: int | None = None) -> dict[str, int]:
    return {"head_dim": d, "head_dim_v": d if dv is None else dv}


def poisoned(
    name: str, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...] | None = None, **changes: Any
) -> Case:
    """A case with a NaN sequence in its middle."""
    at = len(lengths_q) // 2
    with_q, with_k = (
        (*n[:at], NEIGHBOUR, *n[at:])
        for n in (lengths_q, lengths_q if lengths_k is None else lengths_k)
    )
    return Case(name, with_q, with_k, poisoned=(at,), **changes)


def mask_of(case: Case, t: Tensors) -> dict[str, Any]:
    options = {"causal": case.causal, "window": case.window, "softmax_scale": case.softmax_scale}
    return options | {"cu_seqlens_k": t.cu_seqlens_k}


def spelled(case: Case) -> str:
    """Everything of a case that a failure may hang on."""
    lengths = f"{case.lengths_q} x {case.lengths_k}, poisoned {case.poisoned}"
    heads = f"heads {case.num_heads_q}/{case.num_heads_kv} of {case.head_dim}/{case.head_dim_v}"
    parts = "".join(name for name, there in zip("qkv", case.direction, strict=True) if there)
    options = f"window {case.mask_window}, scale {case.softmax_scale}, dlse {case.dlse}, dd{parts}"
    return f"{case}: {lengths}, past {case.past_q}/{case.past_k}, {heads}, {options}"


LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
MASKS = ("full", "causal", "window", "left", "right")


def random_case(rng: np.random.Generator, mask: str, long: bool = False, **changes: Any) -> Case:
    """Some 60 to 300 tokens, or ``long``; the kind of mask settles which of its sides are open.

    One sequence, the anchor, is long enough for the mask: where every query sees a single key, all
    results of second order are rounding and nothing else.
    """

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    anchor = int(rng.integers(600, 1100)) if long else pick(63, 64, 65, 95, 96, 97, 127, 128, 129)
    pairs = [(anchor, anchor + pick(0, 0, 0, 2, 33))]
    room, equal = 0 if long else int(rng.integers(0, 250 - anchor)), rng.random() < 0.4
    while room > 0:
        length = pick(*(n for n in LENGTHS if n <= room))
        pairs.append((length, length if equal else pick(*LENGTHS)))
        room -= max(length, 16)
    at, bad = int(rng.integers(len(pairs))), bool(rng.random() < 0.7)
    pairs[0], pairs[at] = pairs[at], pairs[0]
    if bad:
        pairs.insert(at, (NEIGHBOUR, NEIGHBOUR))
    lengths_q, lengths_k = (tuple(n) for n in zip(*pairs, strict=True))
    group = pick(1, 3) if long else pick(1, 3, 8)
    wide = max(changes.get("head_dim", 64), changes.get("head_dim_v", 64)) > 128
    left, right = int(rng.integers(8, 60)), int(rng.integers(0, 40))
    window, causal = {
        "full": ((-1, -1), False),
        "causal": ((-1, pick(-1, 7)), True),
        "window": ((left, right), pick(False, False, True)),
        "left": ((left, -1), False),
        "right": ((-1, right), False),
    }[mask]
    scale = pick(None, None, 1.3 * changes.get("head_dim", 64) ** -0.5)
    case = Case("", lengths_q, lengths_k, group=group, window=window, causal=causal)
    return replace(
        case,
        num_heads_kv=1 if wide or long or group == 8 else pick(1, 2),
        softmax_scale=scale,
        dlse=bool(rng.random() < 0.7),
        strided=bool(rng.random() < 0.2),
        poisoned=(at,) if bad else (),
        past_q=pick(0, 3, 40),
        past_k=pick(0, 3, 40),
        **changes,
    )


@dataclass(frozen=True)
class Chunk:
    """Random problems of one dtype and one pair of head_dims, few kinds of masks and directions."""

    dtype: str
    dims: tuple[int, int]
    kinds: tuple[tuple[str, Direction], ...]
    seed: int
    size: int = 25

    def __str__(self) -> str:
        return f"{self.seed}-{self.dtype}-d{self.dims[0]}-{self.dims[1]}"

    def cases(self) -> Iterator[Case]:
        """The problems; the last one is long."""
        for i in range(self.size):
            mask, direction = self.kinds[i % len(self.kinds)]
            fixed = {"dtype": self.dtype, "direction": direction, **sized(*self.dims)}
            rng, long = np.random.default_rng([self.seed, i]), i == self.size - 1
            yield random_case(rng, mask, long, name=f"random-{self.seed}-{i}", **fixed)


# ---- the truth --------------------------------------------------------------------------------


def dense_attention(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """out and lse of one sequence, written out; lse of a query without a key is 0, not -inf.

    k and v are repeated for every query head, as torch's own dense attention does it.
    """
    torch = loaded_torch()
    Q, K, V = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
    dead = ~mask.any(dim=1)
    S = (scale * (Q @ K.mT)).masked_fill(~mask, -torch.inf).masked_fill(dead[:, None], 0)
    P = torch.softmax(S, dim=-1) * ~dead[:, None]
    lse = torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), dim=-1) * ~dead
    return (P @ V).transpose(0, 1), lse


def by_autograd(
    inputs: tuple[Any, ...], direction: tuple[Any, ...], mask: Any, scale: Any
) -> Arrays:
    """All results of one sequence by a double backward; inputs are q, k, v, dout and dlse."""
    torch = loaded_torch()
    grad = torch.autograd.grad
    q, k, v, dout, dlse = (x.detach().clone().requires_grad_() for x in inputs)
    out, lse = dense_attention(q, k, v, mask, scale)
    first = grad((out, lse), (q, k, v), (dout, dlse), create_graph=True)
    used = [(g, x) for g, x in zip(first, direction, strict=True) if x is not None]
    second = grad(
        [g for g, _ in used] or [dout],
        (dout, dlse, q, k, v),
        [x for _, x in used] or [torch.zeros_like(dout)],
        materialize_grads=True,  # a result may depend on nothing: gv on (0, 0, ddv)
    )
    lse = lse.masked_fill(~mask.any(dim=1), -float("inf"))
    return dict(zip(("out", "lse", *DOUBLE_BACKWARD), (out, lse, *second), strict=True))


def sequences(case: Case) -> Iterator[tuple[slice, slice, Any]]:
    """Rows of q, rows of k and the mask (NumPy) of every healthy sequence that has both."""
    bounds_q, bounds_k = (np.cumsum([0, *n]).tolist() for n in (case.lengths_q, case.lengths_k))
    for b, (seqlen_q, seqlen_k) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        if seqlen_q and seqlen_k and b not in case.poisoned:
            rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
            yield rows, keys, allowed(seqlen_q, seqlen_k, case.mask_window)


def scale_of(case: Case) -> float:
    return case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale


def dense(case: Case, t: Tensors, kind: str) -> Arrays:
    """All results of a case in the arithmetic of dtype ``kind``, as float64 NumPy arrays."""
    torch = loaded_torch()
    dtype, wide = getattr(torch, kind), getattr(torch, lse_dtype(kind).name)
    total_q, heads = t.q.shape[:2]
    by_row, by_head = (total_q, heads, case.head_dim_v), (heads, total_q)
    zero = partial(torch.zeros, dtype=torch.float64, device=t.q.device)
    results = {"out": zero(by_row), "ddout": zero(by_row), "ddlse": zero(by_head)}
    results |= {f"g{name}": zero(getattr(t, name).shape) for name in "qkv"}
    results["lse"] = zero(by_head) - torch.inf
    dlse = zero(by_head) if t.dlse is None else t.dlse
    for rows, keys, mask in sequences(case):
        inputs = [x.to(dtype) for x in (t.q[rows], t.k[keys], t.v[keys], t.dout[rows])]
        direction = [
            None if part is None else part[at].to(dtype)
            for part, at in zip(t.direction, (rows, keys, keys), strict=True)
        ]
        mask = torch.from_numpy(mask).to(t.q.device)
        own = by_autograd((*inputs, dlse[:, rows].to(wide)), direction, mask, scale_of(case))
        for name, array in own.items():
            results[name][place(name, rows, keys)] = array.detach().double()
    return {name: to_numpy(array) for name, array in results.items()}


def place(name: str, rows: slice, keys: slice) -> Any:
    """Where a sequence lies in the result called ``name``."""
    return (slice(None), rows) if name.endswith("lse") else keys if name in ("gk", "gv") else rows


@dataclass(frozen=True)
class Posed:
    """A case on the GPU, as torch tensors, and what must come of it.

    ``out`` and ``lse`` are the truth, rounded, and NaN in the rows of no healthy sequence.
    """

    case: Case
    tensors: Tensors
    out: Any
    lse: Any
    targets: dict[str, Target]


def along(posed: Posed, direction: tuple[Any, Any, Any]) -> Posed:
    """The same in another direction, to which the targets do not belong."""
    tensors = replace(posed.tensors, **dict(zip(("tq", "tk", "tv"), direction, strict=True)))
    return replace(posed, tensors=tensors, targets={})


# The tests of a case follow each other; that is how often its truth is computed.
@lru_cache(maxsize=4)
def pose(case: Case) -> Posed:
    """Inputs and targets; those of float64 allow 1e-12 of a tensor's largest element."""
    tensors = make(case).on("torch")
    narrow, wide = dtype_of(case.dtype), lse_dtype(case.dtype)
    exact = dense(case, tensors, "float64")
    runs = {kind: dense(case, tensors, kind) for kind in {case.dtype, wide.name} - {"float64"}}
    targets = {}
    for name, array in exact.items():
        statistic, side = name.endswith("lse"), "k" if name in ("gk", "gv") else "q"
        same = runs.get(wide.name if statistic else case.dtype, exact)[name]
        if case.dtype == "float64":
            same = array + 0.5e-12 * np.abs(array[np.isfinite(array)]).max(initial=0.0)
        zero = name not in ("out", "lse") and not any(case.direction)
        zero = zero or (name in OF_SCORES and not any(case.direction[:2]))
        zeros = case.unseen(side) | zero
        zeros = zeros[None] if statistic else zeros[:, None, None]
        targets[name] = Target(
            array,
            same,
            wide if statistic else narrow,
            case.sequence_of(side),
            case.poisoned,
            None if name == "lse" else zeros,
            token_axis=int(statistic),
            terms=case.terms,
        )
    targets |= {"tout": targets["ddout"], "tlse": targets["ddlse"]}
    return Posed(case, tensors, *given_to_backward(case, exact), targets)


def given_to_backward(case: Case, exact: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """The true out and lse, rounded, as torch tensors; NaN in the rows of no healthy sequence."""
    out = exact["out"].astype(dtype_of(case.dtype))
    lse = exact["lse"].astype(lse_dtype(case.dtype))
    outside = np.isin(case.sequence_of("q"), (*case.poisoned, -1))
    out[outside], lse[:, outside] = np.nan, np.nan
    return to_framework(out, "torch"), to_framework(lse, "torch")


# ---- running and judging ----------------------------------------------------------------------


def run_jvp(posed: Posed, **options: Any) -> Arrays:
    """``rawattn.jvp`` into arrays of NaN."""
    t, options = posed.tensors, mask_of(posed.case, posed.tensors) | options
    targets = {name: loaded_torch().full_like(posed.out, np.nan) for name in ("out", "tout")}
    results = rawattn.jvp(t.q, t.k, t.v, *t.direction, t.cu_seqlens_q, **targets, **options)
    assert results[0] is targets["out"] and results[1] is targets["tout"]
    return dict(zip(OF_JVP, results, strict=True))


def run_double_backward(posed: Posed, **options: Any) -> Arrays:
    """``rawattn.double_backward`` into arrays of NaN."""
    t, options = posed.tensors, mask_of(posed.case, posed.tensors) | options
    likes = zip(DOUBLE_BACKWARD, (posed.out, posed.lse, t.q, t.k, t.v), strict=True)
    targets = {name: loaded_torch().full_like(like, np.nan) for name, like in likes}
    passed = (t.dout, t.q, t.k, t.v, posed.out, posed.lse, t.cu_seqlens_q)
    results = rawattn.double_backward(*t.direction, *passed, dlse=t.dlse, **targets, **options)
    assert all(a is b for a, b in zip(results, targets.values(), strict=True))
    return targets


def inner(case: Case, direction: tuple[Any, ...], arrays: tuple[Any, ...]) -> float:
    """The inner product over the healthy sequences; a part that is None is zero."""
    total = 0.0
    for rows, keys, _ in sequences(case):
        for part, array, at in zip(direction, arrays, (rows, keys, keys), strict=True):
            if part is not None:
                total += float((part[at].double() * array[at].double()).sum())
    return total


def faults(posed: Any, results: Arrays) -> list[str]:
    """The verdict on every wrong tensor, and where its error sits; ``posed`` has the targets."""
    wrong = []
    for name, array in results.items():
        target, found = posed.targets[name], to_numpy(array)
        verdict = target.judge(found)
        if not verdict.ok:
            wrong.append(f"{name}: {verdict}, {target.shares(found)[:3]}")
    return wrong


def judge(posed: Any, results: Arrays) -> None:
    wrong = faults(posed, results)
    assert not wrong, "\n".join(wrong)


# ---- builds ahead of time ---------------------------------------------------------------------


def problem_of(case: Case, tokens: int = 0) -> Problem:
    """The Problem that a case poses; ``tokens`` asks for one sequence of so many in its place."""
    batch = 1 if tokens else len(case.lengths_q)
    total_q = tokens or sum(case.lengths_q) + case.past_q
    total_k = tokens or sum(case.lengths_k) + case.past_k
    sizes = (case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v)
    return Problem(case.dtype, batch, total_q, total_k, *sizes, *case.mask_window, 1.0, ARCH, 0)


def chosen(stem: str, case: Case, *, by_size: bool = False) -> Row:
    """The CUDA row that the kernel ``stem`` of a case runs on; ``by_size`` as of ``select``."""
    return variants.select(stem, problem_of(case), backend="cuda", by_size=by_size)


def large_rows(case: Case, stems: Iterable[str]) -> dict[str, Row]:
    """By stem the row that a case of the same widths, but of many tokens, runs on."""
    problem = problem_of(case, tokens=2**20)
    return {
        stem: variants.select(stem, problem, backend="cuda", by_size=True)
        for stem in dict.fromkeys(stems)
    }


def stems_of(step: str) -> tuple[str, ...]:
    """The kernels of "forward" or of a step of STEPS."""
    return ("forward",) if step == "forward" else tuple(of.stem for of in STEPS[step])


def builds_of(case: Case, step: str, row: Row | None = None) -> Iterator[Build]:
    """What "forward" or a step of STEPS compiles for a case; ``row`` is its stem's if given."""
    d, dv = case.head_dim, case.head_dim_v
    sides = tuple(n >= 0 for n in case.mask_window)
    # the gathered tensor's own head_dim comes first: of dK and dV both, else of dQ
    gathered = {(d, dv), (dv, d)} if step == "atomic_dkv" else {(d, dv)}
    of_keys = row if row is not None and row.stem == "backward_kv" else chosen("backward_kv", case)
    steps = (Step("forward"),) if step == "forward" else steps_beside(of_keys, step)
    for stem, atomic, *_ in steps:
        used = row if row is not None and row.stem == stem else chosen(stem, case)
        direction = case.direction if used.kernel.directed else NO_DIRECTION
        for dims in gathered if stem == "backward_postprocess" else {(d, dv)}:
            fixed = (used, case.dtype, *dims, *sides, atomic, direction)
            yield Build(*fixed, args_bytes=args_bytes(stem, used.family))


def built(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What is loaded from now on: each source with its constants."""
    asked: set[tuple[str, str]] = set()
    real = launch.Loaded

    def loaded(build: Build, *where: Any) -> launch.Loaded:
        asked.add((build.path, prelude(build)))
        return real(build, *where)

    monkeypatch.setattr(launch, "Loaded", loaded)
    launch.forget()
    return asked


def kernels_of(builds: Iterable[Build]) -> set[tuple[str, str]]:
    """What ``built`` notes of builds: those that differ in nothing that is read are one."""
    return {(build.path, prelude(build)) for build in builds}


def warm(builds: Iterable[Build]) -> None:
    """Fill the cache of cubins from several processes, where that saves time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # that many processes compile anyway
    wanted = list(dict.fromkeys(builds))
    if len(wanted) > 16:
        work([partial(warm_build, build, f"sm_{ARCH}") for build in wanted], "compiling")

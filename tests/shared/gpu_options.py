"""Random problems with softcap, sinks and seqused_k: their truth, runs and verdicts.

The cases are those of gpu_problems.py and the truth, as there, is torch's autograd of dense
attention; here of both orders at once. NaN are also the keys that are not in use. Long, since a
problem, its truth and its verdict are read together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import rawattn
from rawattn.check.cases import Case, Tensors, dtype_of, lse_dtype, make
from rawattn.check.diff import distance
from rawattn.check.expected import Target
from rawattn.check.transfer import loaded_torch, to_framework, to_numpy
from rawattn.reference.dense import allowed
from rawattn.variants import METHODS
from tests.shared import gpu_problems
from tests.shared.gpu_arrays import Arrays
from tests.shared.gpu_problems import OF_JVP, mask_of, random_case, scale_of, spelled

OPTIONS = ("softcap", "sinks", "seqused_k")
# A softcap and the size of scores: where tanh bends and where it hardly does, both; above the cap.
CAPS = ((2.0, 1.0), (5.0, 3.0), (3.0, 9.0), (50.0, 20.0), (50.0, 1.0), (50.0, 60.0), (20.0, 10.0))
OF_HEADS = (0.0, 0.0, 3.0, -np.inf, 30.0, -30.0)  # where sinks lie; scores lie around 0
OF_SINKS = ("dsinks", "gsinks")
ORDERS = 4  # runs in float32, the first in the order that the kernels have too
FIRST = ("dq", "dk", "dv", "dsinks")
SECOND = ("ddout", "ddlse", "gq", "gk", "gv", "gsinks")


@dataclass(frozen=True)
class Problem:
    """A case with options; ``used`` are the keys in use of each sequence, None: all of them."""

    case: Case
    softcap: float | None = None
    sinks: bool = False
    used: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{spelled(self.case)}, softcap {self.softcap}, sinks {self.sinks}, used {self.used}"

    @property
    def in_use(self) -> tuple[int, ...]:
        """Keys of each sequence that are there to be seen."""
        there = self.case.lengths_k
        used = there if self.used is None else self.used
        return tuple(min(max(n, 0), m) for n, m in zip(used, there, strict=True))

    def sequences(self) -> Iterator[tuple[slice, slice, Any]]:
        """Rows, keys in use and mask of every healthy sequence with queries; of those without keys
        only with sinks."""
        case, lengths = self.case, (self.case.lengths_q, self.case.lengths_k)
        starts = (np.cumsum([0, *n])[:-1].tolist() for n in lengths)
        for b, (q, k, n, m) in enumerate(zip(*starts, lengths[0], self.in_use, strict=True)):
            if n and (m or self.sinks) and b not in case.poisoned:
                yield slice(q, q + n), slice(k, k + m), allowed(n, m, case.mask_window)

    def unseen(self, side: str) -> Any:
        """Rows without an allowed partner, of no sequence, or not in use."""
        case, rows = self.case, []
        for n, m, there in zip(case.lengths_q, self.in_use, case.lengths_k, strict=True):
            mask = allowed(n, m, case.mask_window)
            rows.append(~mask.any(axis=1 if side == "q" else 0))
            rows += [np.ones(there - m, bool)] * (side == "k")
        return np.concatenate([*rows, np.ones(case.past_q if side == "q" else case.past_k, bool)])


def random_problem(
    rng: np.random.Generator,
    mask: str,
    options: tuple[str, ...],
    long: bool = False,
    **of_case: Any,
) -> Problem:
    """A random case with the ``options`` of OPTIONS, and others' scores, heads or keys for them."""
    case = random_case(rng, mask, long, **of_case)
    softcap = used = None
    if "softcap" in options:
        softcap, size = CAPS[rng.integers(len(CAPS))]
        case = replace(case, softmax_scale=size * case.head_dim**-0.5)
    if "sinks" in options and case.group == 1:
        case = replace(case, num_heads_kv=3)  # the sums of so few heads are not all small by chance
    if "seqused_k" in options:
        anchor = max(case.lengths_q)
        used = tuple(
            int(rng.integers(m - m // 2 if n == anchor else -2, m + 4))
            for n, m in zip(case.lengths_q, case.lengths_k, strict=True)
        )
    return Problem(case, softcap, "sinks" in options, used)


# ---- the truth --------------------------------------------------------------------------------


def attention(p: Problem, q: Any, k: Any, v: Any, sinks: Any, mask: Any) -> tuple[Any, Any, Any]:
    """out and lse of one sequence, and which rows of lse see neither key nor sink: there it is 0.

    ``sinks`` (heads, rows) or None.
    """
    torch = loaded_torch()
    Q, K, V = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
    S = scale_of(p.case) * products(Q, K, p.case.dtype)
    if p.softcap is not None:
        S = p.softcap * torch.tanh(S / p.softcap)
    S, dead = S.masked_fill(~mask, -torch.inf), ~mask.any(dim=1).expand(S.shape[:2])
    if sinks is not None:
        S, dead = torch.cat([S, sinks[..., None]], dim=-1), dead & (sinks == -torch.inf)
    S = S.masked_fill(dead[..., None], 0)
    P = torch.softmax(S, dim=-1)[..., : K.shape[1]] * ~dead[..., None]
    lse = torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), dim=-1) * ~dead
    return (P @ V).transpose(0, 1), lse, dead


def products(Q: Any, K: Any, dtype: str) -> Any:
    """Q K^T; where float32 stands for 16 bits, as the GPU's tensor cores sum their products: they
    cut off what float32 would round, so that scores of hundreds are too small by some units."""
    torch = loaded_torch()
    S = Q @ K.mT
    if not Q.is_cuda or Q.dtype != torch.float32 or dtype == "float32":
        return S
    narrow = getattr(torch, dtype)
    own = torch.bmm(Q.detach().to(narrow), K.detach().to(narrow).mT, out_dtype=torch.float32)
    return S + (own - S).detach()


def by_autograd(p: Problem, inputs: list[Any], direction: list[Any], mask: Any) -> Arrays:
    """All results of one sequence; inputs are dout, dlse, q, k, v and with sinks these, and the
    direction is that of the last three or four."""
    grad = loaded_torch().autograd.grad
    dout, dlse, q, k, v, *of_sinks = inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse, dead = attention(p, q, k, v, of_sinks[0] if of_sinks else None, mask)
    first = grad((out, lse), inputs[2:], (dout, dlse), create_graph=True)
    moved = [(g, x) for g, x in zip(first, direction, strict=True) if x is not None]
    second = grad([g for g, _ in moved], inputs, [x for _, x in moved], materialize_grads=True)
    results = {"out": out, "lse": lse.masked_fill(dead, -float("inf"))}
    # the last names are those of sinks, which may not be there
    first, second = zip(FIRST, first, strict=False), zip(SECOND, second, strict=False)
    return results | dict(first) | dict(second)


def dense(posed: "Posed", kind: str) -> Arrays:
    """All results in the arithmetic of dtype ``kind``, as float64 NumPy arrays; of sinks the terms
    of every row, (num_heads_q, total_q)."""
    torch, p, t = loaded_torch(), posed.problem, posed.tensors
    narrow, wide = getattr(torch, kind), getattr(torch, lse_dtype(kind).name)
    (total_q, heads), device = t.q.shape[:2], t.q.device
    shapes = {"out": t.dout.shape, "lse": (heads, total_q), "ddout": t.dout.shape}
    shapes |= {"ddlse": (heads, total_q)} | dict.fromkeys(
        OF_SINKS if p.sinks else (), (heads, total_q)
    )
    shapes |= {f"{order}{name}": getattr(t, name).shape for order in "dg" for name in "qkv"}
    zero = partial(torch.zeros, dtype=torch.float64, device=device)
    results = {name: zero(shape) for name, shape in shapes.items()}
    results["lse"] -= torch.inf
    dlse = zero((heads, total_q)) if t.dlse is None else t.dlse
    for rows, keys, mask in p.sequences():
        inputs = [t.dout[rows], dlse[:, rows].to(wide), t.q[rows], t.k[keys], t.v[keys]]
        direction = [
            None if part is None else part[at]
            for part, at in zip(t.direction, (rows, keys, keys), strict=True)
        ]
        if p.sinks:
            of_rows = (heads, rows.stop - rows.start)
            inputs.append(posed.sinks[:, None].expand(of_rows))
            direction.append(
                None if posed.tsinks is None else posed.tsinks[:, None].expand(of_rows)
            )
        cast = [x if x is None or x is inputs[1] else x.to(narrow) for x in (*inputs, *direction)]
        at = torch.from_numpy(mask).to(device)
        for name, array in by_autograd(p, cast[: len(inputs)], cast[len(inputs) :], at).items():
            results[name][place(name, rows, keys)] = array.detach().double()
    if p.case.poisoned:
        for name in OF_SINKS if p.sinks else ():
            results[name][:] = torch.nan  # the sums go over all sequences
    return {name: to_numpy(array) for name, array in results.items()}


def in_another_order(posed: "Posed", n: int) -> "Posed":
    """The same problem with head_dim in a random order: scores are the same but for rounding."""
    if n == 0:
        return posed
    t = posed.tensors
    order = np.random.default_rng(n).permutation(t.q.shape[-1])
    parts = {name: getattr(t, name) for name in ("q", "k", "tq", "tk")}
    parts = {name: None if x is None else x[..., order] for name, x in parts.items()}
    return replace(posed, tensors=replace(t, **parts))


def beside(given: Any, own: Any, ddlse: Any) -> Any:
    """ddlse, a sum of P times something, with P = exp(S - lse) of the lse that is given: a P that
    its own lse normalises does not show what is common to the errors of a row's scores."""
    dead = ddlse == 0
    return ddlse * np.exp(np.where(dead, 0.0, own) - np.where(dead, 0.0, given))


def place(name: str, rows: slice, keys: slice) -> Any:
    """Where a sequence lies in the result called ``name``."""
    if name.endswith(("lse", "sinks")):
        return slice(None), rows
    return keys if name in ("dk", "dv", "gk", "gv") else rows


@dataclass(frozen=True)
class Posed:
    """A problem on the GPU, as torch tensors, and what must come of it.

    ``out`` and ``lse`` are the truth, rounded, and NaN in the rows of no healthy sequence.
    """

    problem: Problem
    tensors: Tensors
    sinks: Any = None
    tsinks: Any = None
    used: Any = None
    out: Any = None
    lse: Any = None
    targets: dict[str, Target] | None = None

    @property
    def options(self) -> dict[str, Any]:
        of_all = {"softcap": self.problem.softcap, "sinks": self.sinks, "seqused_k": self.used}
        return mask_of(self.problem.case, self.tensors) | of_all


def place_on_gpu(p: Problem, seed: int = 0) -> Posed:
    """The inputs. Sinks are numbers that 16 bits hold, of the case's dtype or in float32."""
    case, rng = p.case, np.random.default_rng([seed, sum(p.case.name.encode())])
    t, heads = make(case, seed).on("torch"), case.num_heads_q
    starts = np.cumsum([0, *case.lengths_k])[:-1]
    for start, n, m in zip(starts, p.in_use, case.lengths_k, strict=True):
        for x in (t.k, t.v, t.tk, t.tv):
            if x is not None:
                x[start + n : start + m] = np.nan
    sinks = tsinks = used = None
    if p.sinks:
        drawn = rng.standard_normal((2, heads))
        drawn[0, 1:] += rng.choice(OF_HEADS, heads - 1)
        if p.softcap is not None:  # beside scores that are large
            drawn[0] += 0.8 * min(p.softcap, 3 * scale_of(case) * case.head_dim**0.5)
        drawn = drawn.astype(dtype_of(case.dtype))
        drawn = drawn.astype(np.float32) if rng.random() < 0.5 else drawn
        sinks, tsinks = (to_framework(np.ascontiguousarray(x), "torch") for x in drawn)
        tsinks = None if rng.random() < 0.3 and any(case.direction) else tsinks
    if p.used is not None:
        dtype = rng.choice([np.int32, np.int64])
        used = to_framework(np.array(p.used, dtype), "torch")
    return Posed(p, t, sinks, tsinks, used)


def pose(p: Problem) -> Posed:
    """Inputs and targets; see ``gpu_problems.pose``.

    What is allowed to a sum over rows, as of sinks, is three standard deviations of a sum of their
    errors: that of the few numbers themselves may be small by chance. For the same reason float32's
    error is the largest of some runs.
    """
    posed, case = place_on_gpu(p), p.case
    narrow, wide = dtype_of(case.dtype), lse_dtype(case.dtype)
    exact = dense(posed, "float64")
    same = dense(posed, case.dtype)
    out, lse = gpu_problems.given_to_backward(case, exact)
    given = to_numpy(lse).astype(np.float64)
    runs = [dense(in_another_order(posed, n), wide.name) for n in range(ORDERS)]
    for run in runs:
        run["ddlse"] = beside(given, run["lse"], run["ddlse"])
    moves_scores = any(case.direction[:2]) or posed.tsinks is not None
    targets = {}
    for name, array in exact.items():
        statistic, side = name.endswith("lse"), "k" if name[1:] in ("k", "v") else "q"
        if name in OF_SINKS:
            exact_sum = array.sum(axis=1, keepdims=True)
            rounded = 1.5 * np.sqrt(np.square(same[name] - array).sum(axis=1, keepdims=True))
            kind, rows = str(posed.sinks.dtype).removeprefix("torch."), np.zeros(len(array), int)
            fixed = (dtype_of(kind), rows, (), None, 0, case.terms)
            targets[name] = Target(exact_sum, exact_sum + rounded, *fixed)
            continue
        rounded = same[name]
        if statistic:
            rounded = array + np.max([distance(run[name], array) for run in runs], axis=0)
        unseen = p.unseen(side)
        if name == "ddlse" and p.sinks:
            unseen = case.sequence_of("q") < 0  # a sink moves the lse of all others
        zeros = unseen | (name in ("ddlse", "gv") and not moves_scores)
        targets[name] = Target(
            array,
            rounded,
            wide if statistic else narrow,
            case.sequence_of(side),
            case.poisoned,
            None if name == "lse" else zeros[None] if statistic else zeros[:, None, None],
            token_axis=int(statistic),
            terms=case.terms,
        )
    targets |= {"tout": targets["ddout"], "tlse": targets["ddlse"]}
    return replace(posed, targets=targets, out=out, lse=lse)


def faults(posed: Posed, results: Arrays) -> list[str]:
    """The verdict on every wrong tensor; each head of sinks stands for a row."""
    rows = {name: x[:, None] if name in OF_SINKS else x for name, x in results.items()}
    return gpu_problems.faults(posed, rows)


# ---- running ----------------------------------------------------------------------------------


def run(posed: Posed, step: str, **options: Any) -> Arrays:
    """A step of ``variants.steps.STEPS``, or "forward", into arrays of NaN."""
    t, options = posed.tensors, posed.options | options
    likes = {"out": t.dout, "tout": t.dout, "ddout": t.dout, "ddlse": posed.lse}
    likes |= {f"{order}{name}": getattr(t, name) for order in "dg" for name in "qkv"}
    likes |= dict.fromkeys(OF_SINKS, posed.sinks)
    inputs, passed = (t.q, t.k, t.v), (t.dout, t.q, t.k, t.v, posed.out, posed.lse, t.cu_seqlens_q)

    def rooms(*names: str) -> Arrays:
        there = [name for name in names if likes[name] is not None]
        return {name: loaded_torch().full_like(likes[name], np.nan) for name in there}

    if step == "forward":
        found = rooms("out")
        _, lse = rawattn.forward(*inputs, t.cu_seqlens_q, return_lse=True, **found, **options)
        return found | {"lse": lse}
    if step == "jvp":
        found, moved = rooms("out", "tout"), {"tsinks": posed.tsinks}
        results = rawattn.jvp(*inputs, *t.direction, t.cu_seqlens_q, **moved, **found, **options)
        return dict(zip(OF_JVP, results, strict=True))
    options["dlse"] = t.dlse
    if step in METHODS:
        found = rooms(*FIRST)
        rawattn.backward(*passed, method=step, **found, **options)
        return found
    found, moved = rooms(*SECOND), {"ddsinks": posed.tsinks}
    options["deterministic"] = step == "second/two_pass"
    rawattn.double_backward(*t.direction, *passed, **moved, **found, **options)
    return found


def alone(posed: Posed) -> tuple[Posed, slice, slice]:
    """The longest healthy sequence without the others, its rows and all of its keys."""
    p, t = posed.problem, posed.tensors
    starts = [np.cumsum([0, *n]).tolist() for n in (p.case.lengths_q, p.case.lengths_k)]
    healthy = [b for b in range(len(p.case.lengths_q)) if b not in p.case.poisoned]
    b = max(healthy, key=lambda b: min(p.case.lengths_q[b], p.case.lengths_k[b]))
    rows, keys = (slice(*of[b : b + 2]) for of in starts)
    at = {name: rows for name in ("q", "dout", "tq")} | {
        name: keys for name in ("k", "v", "tk", "tv")
    }
    parts = {name: getattr(t, name) for name in at}
    parts = {name: None if x is None else x[at[name]] for name, x in parts.items()}
    own = loaded_torch().tensor(
        [[0, n.stop - n.start] for n in (rows, keys)], dtype=loaded_torch().int32, device=t.q.device
    )
    t = replace(
        t,
        **parts,
        cu_seqlens_q=own[0],
        cu_seqlens_k=own[1],
        dlse=None if t.dlse is None else t.dlse[:, rows],
    )
    used = None if posed.used is None else posed.used[b : b + 1]
    made = replace(
        posed, tensors=t, used=used, out=posed.out[rows], lse=posed.lse[:, rows], targets=None
    )
    return made, rows, keys

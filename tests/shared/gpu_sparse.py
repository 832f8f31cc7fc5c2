"""What the sparse tests on a GPU share: random selections of blocks, their truth, and calls.

Long, since truth, calls and poison know each other.

A problem is a dense case with blocks of keys that its queries select. Its truth is torch's autograd
of dense attention with a mask for each item, sequence by sequence: in float64, and in the kernels'
dtype for the error that is allowed to them. Blocks that nobody selects are full of NaN, and so are
the factors of slots that do not count.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import call, problem
from rawattn.check.cases import Case, Tensors, dtype_of, lse_dtype, make
from rawattn.check.expected import Target
from rawattn.check.transfer import loaded_torch, to_framework, to_numpy
from tests.shared.gpu_arrays import Arrays
from tests.shared.gpu_problems import place, scale_of, spelled

OF_FIRST = ("out", "lse", "dq", "dk", "dv", "dblock_scale")
OF_SECOND = ("ddout", "ddlse", "gq", "gk", "gv", "gblock_scale")
OF_JVP = ("out", "tout", "lse", "tlse")
OF_SCORES = ("tlse", "ddlse", "gv")  # 0 in a direction that leaves the scores as they are
OWN, FORBIDDEN = -1, -2  # slots of the own block that is not selected, and of no slot at all


# ---- problems ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """A dense case (its window stays open) and how its queries select blocks.

    ``gate``: there is a block_scale, ``tg``: a direction of it. ``per_head``: query heads select
    each for themselves. ``all_first``: all select their sequence's first block.
    """

    case: Case
    block_size: int = 64
    num_selected: int = 4
    own: bool = True
    gate: bool = False
    tg: bool = False
    counts: bool = False
    per_head: bool = False
    all_first: bool = False

    def __str__(self) -> str:
        flags = "".join(f"-{f}" for f in ("own", "gate", "counts", "per_head") if getattr(self, f))
        return f"{self.case}-block{self.block_size}{flags}"

    @property
    def num_heads_sel(self) -> int:
        return self.case.num_heads_q if self.per_head else self.case.num_heads_kv

    @property
    def direction(self) -> tuple[bool, ...]:
        return (*self.case.direction, self.tg)

    def spelled(self) -> str:
        """Everything that a failure may hang on."""
        return f"{spelled(self.case)}, {self.num_selected} blocks of {self.block_size}, {self}"


@dataclass(frozen=True)
class Chosen:
    """What a selection adds to the tensors of a case; its own arrays as in the public functions."""

    block_indices: Any
    block_counts: Any
    block_scale: Any
    tg: Any

    def on(self, framework: str) -> "Chosen":
        parts = (self.block_indices, self.block_counts, self.block_scale, self.tg)
        return Chosen(*(to_framework(part, framework) for part in parts))


def wild(rng: np.random.Generator, shape: tuple[int, ...], blocks: int = 0) -> Any:
    """Numbers of no block: padding, and what is out of range."""
    some = (-1, -1, -1, blocks, blocks + 1, 2**31 - 1, -(2**31), 2**30, -7)
    return rng.choice(np.array(some, dtype=np.int64), shape).astype(np.int32)


def widened(indices: Any) -> Any:
    """As int64, with padding that is no int32: its lower 32 bits are those of block 0 or 1."""
    far = np.array([2**32, -(2**32) + 1, 2**40 + 1, 2**63 - 2**32, -(2**63)])
    filler = np.resize(far, indices.shape)
    return np.where((indices < 0) | (indices > 2**29), filler, indices.astype(np.int64))


def select(sparse: Sparse, rng: np.random.Generator) -> tuple[Any, Any]:
    """Random block_indices, with duplicates and padding, and block_counts.

    Of most sequences some blocks are never selected.
    """
    case, chosen = sparse.case, []
    for seqlen_q, seqlen_k in zip(case.lengths_q, case.lengths_k, strict=True):
        blocks = -(-seqlen_k // sparse.block_size)
        shape = (seqlen_q, sparse.num_heads_sel, sparse.num_selected)
        open_to_all = np.flatnonzero((rng.random(blocks) < 0.6) | (np.arange(blocks) == 0))
        own = wild(rng, shape, blocks)
        if blocks:
            usual = rng.random(shape) < 0.8
            own[usual] = rng.choice(open_to_all, shape)[usual]
        chosen.append(own)
    chosen.append(wild(rng, (case.past_q, sparse.num_heads_sel, sparse.num_selected), 1))
    indices = np.concatenate(chosen).astype(np.int32)
    if sparse.all_first:
        indices[:, :, 0] = 0
    counts = rng.integers(-1, sparse.num_selected + 3, indices.shape[:2]).astype(np.int32)
    return indices, counts if sparse.counts else None


def pairs(case: Case) -> Iterator[tuple[int, slice, slice]]:
    """Number, rows of q and rows of k of every sequence."""
    bounds_q, bounds_k = (np.cumsum([0, *n]).tolist() for n in (case.lengths_q, case.lengths_k))
    for b in range(len(case.lengths_q)):
        yield b, slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])


def slots_of_blocks(sparse: Sparse, indices: Any, counts: Any, seqlen_k: int) -> Any:
    """(rows, num_heads_sel, blocks) of one sequence: the slot that each block counts for, or OWN,
    or FORBIDDEN."""
    seqlen_q, _, selected = indices.shape
    blocks = -(-seqlen_k // sparse.block_size)
    pos = (np.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None]
    slots = np.full((*indices.shape[:2], blocks), FORBIDDEN)
    for slot in reversed(range(selected)):  # the lowest one stays
        n = indices[:, :, slot].astype(np.int64)
        counted = (n >= 0) & (n < blocks)
        counted &= (slot < counts) if counts is not None else True
        counted &= (n * sparse.block_size <= pos) if sparse.case.causal else True
        row, head = np.nonzero(counted)
        slots[row, head, n[row, head]] = slot
    if sparse.own:
        row = np.flatnonzero(pos[:, 0] >= 0)
        own = slots[row, :, pos[row, 0] // sparse.block_size]
        slots[row, :, pos[row, 0] // sparse.block_size] = np.where(own == FORBIDDEN, OWN, own)
    return slots


def slots_of_keys(sparse: Sparse, slots: Any, seqlen_k: int) -> Any:
    """(rows, num_heads_sel, keys) of one sequence: as above for each key that may be seen."""
    keys, seqlen_q = np.arange(seqlen_k), len(slots)
    of_keys = slots[:, :, keys // sparse.block_size]
    late = (keys > (np.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None])[:, None]
    of_keys[late & (sparse.case.causal | (of_keys == OWN))] = FORBIDDEN
    return of_keys


def every_sequence(sparse: Sparse, chosen: Chosen) -> Iterator[tuple[int, slice, slice, Any]]:
    """Number, rows of q, rows of k and slots of blocks of every sequence."""
    for b, rows, keys in pairs(sparse.case):
        counts = None if chosen.block_counts is None else chosen.block_counts[rows]
        indices, seqlen_k = chosen.block_indices[rows], keys.stop - keys.start
        yield b, rows, keys, slots_of_blocks(sparse, indices, counts, seqlen_k)


def of_kv_heads(sparse: Sparse, seen: Any) -> Any:
    """(rows, num_heads_sel, anything) to (num_heads_kv, anything): whether any row has it."""
    heads, ratio = sparse.case.num_heads_kv, sparse.num_heads_sel // sparse.case.num_heads_kv
    return seen.any(axis=0).reshape(heads, ratio, seen.shape[2]).any(axis=1)


@lru_cache(maxsize=4)
def host_of(sparse: Sparse, seed: int = 0) -> tuple[Tensors, Chosen]:
    """The inputs, as NumPy arrays; NaN wherever nothing may be read."""
    case, tensors = sparse.case, make(sparse.case, seed)
    rng = np.random.default_rng([seed, 1, zlib.crc32(case.name.encode())])
    indices, counts = select(sparse, rng)
    selected = (len(tensors.q), sparse.num_heads_sel, sparse.num_selected)
    wide = lse_dtype(case.dtype)
    factors = (0.75 + 0.5 * rng.standard_normal(selected)).astype(wide)
    tg = rng.standard_normal(selected).astype(wide)
    chosen = Chosen(indices, counts, factors, tg)
    counting = np.zeros(selected, dtype=bool)
    unread = np.zeros((len(tensors.k), case.num_heads_kv), dtype=bool)
    for b, rows, keys, slots in every_sequence(sparse, chosen):
        if b in case.poisoned:
            continue
        for slot in range(sparse.num_selected):
            counting[rows, :, slot] = (slots == slot).any(axis=2)
        block = np.arange(keys.stop - keys.start) // sparse.block_size
        unread[keys] = ~of_kv_heads(sparse, slots != FORBIDDEN)[:, block].T
    factors[~counting] = tg[~counting] = np.nan

    def poison(array: Any) -> Any:
        if array is None:
            return None
        base = (array if array.base is None else array.base).copy()
        view = base if array.base is None else base[tuple(slice(n) for n in array.shape)]
        view[unread] = np.nan
        return view

    names = ("k", "v", "tk", "tv")
    tensors = replace(tensors, **{name: poison(getattr(tensors, name)) for name in names})
    return tensors, Chosen(indices, counts, factors, tg)


# ---- the truth --------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, g: Any, slots: Any, scale: float) -> tuple[Any, Any]:
    """out and lse of one sequence, written out; lse of a query without a key is 0, not -inf.

    ``slots`` (rows, num_heads_sel, keys) are those of keys; g has one factor for each slot.
    """
    torch = loaded_torch()
    Q, K, V = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
    share = q.shape[1] // g.shape[1]
    one = q.new_ones((*g.shape[:2], 1))
    factors = torch.cat([g.to(q.dtype), one], dim=2).gather(2, slots.where(slots >= 0, g.shape[2]))
    G, mask = (x.transpose(0, 1).repeat_interleave(share, 0) for x in (factors, slots >= OWN))
    dead = ~mask.any(dim=2)
    S = (scale * (Q @ K.mT) * G).masked_fill(~mask, -torch.inf).masked_fill(dead[..., None], 0)
    P = torch.softmax(S, dim=-1) * ~dead[..., None]
    lse = torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), dim=-1) * ~dead
    return (P @ V).transpose(0, 1), lse


def by_autograd(
    inputs: list[Any], direction: list[Any], slots: Any, scale: float, second: bool
) -> Arrays:
    """All results of one sequence; inputs are q, k, v, block_scale, dout and dlse."""
    torch = loaded_torch()
    grad = partial(torch.autograd.grad, materialize_grads=True)
    q, k, v, g, dout, dlse = (x.detach().clone().requires_grad_() for x in inputs)
    out, lse = attention(q, k, v, g, slots, scale)
    first = grad((out, lse), (q, k, v, g), (dout, dlse), create_graph=second)
    dead = ~(slots >= OWN).any(dim=2).T.repeat_interleave(q.shape[1] // g.shape[1], 0)
    values = (out, lse.masked_fill(dead, -torch.inf), *first)
    results = dict(zip(OF_FIRST, values, strict=True))
    if second:
        used = [(x, part) for x, part in zip(first, direction, strict=True) if part is not None]
        of = [x for x, _ in used] or [dout]
        along = [part for _, part in used] or [torch.zeros_like(dout)]
        results |= zip(OF_SECOND, grad(of, (dout, dlse, q, k, v, g), along), strict=True)
    return results


def dense(sparse: Sparse, t: Tensors, chosen: Chosen, kind: str, second: bool) -> Arrays:
    """All results in the arithmetic of dtype ``kind``, as float64 NumPy arrays."""
    torch, case = loaded_torch(), sparse.case
    dtype, wide = getattr(torch, kind), getattr(torch, lse_dtype(kind).name)
    x, c = t.on("torch"), chosen.on("torch")
    of_q, of_row = (len(t.q), case.num_heads_q, case.head_dim_v), (case.num_heads_q, len(t.q))
    shapes = (of_q, of_row, t.q.shape, t.k.shape, t.v.shape, c.block_scale.shape)
    zero = partial(torch.zeros, dtype=torch.float64, device=x.q.device)
    likes = dict(zip(OF_FIRST, shapes, strict=True))
    likes |= zip(OF_SECOND, shapes, strict=True) if second else ()
    results = {name: zero(shape) for name, shape in likes.items()}
    results["lse"] -= torch.inf
    dlse = zero(of_row) if t.dlse is None else x.dlse
    for b, rows, keys, slots in every_sequence(sparse, chosen):
        if b in case.poisoned or rows.start == rows.stop or keys.start == keys.stop:
            continue
        of_keys = torch.from_numpy(slots_of_keys(sparse, slots, keys.stop - keys.start))
        factors = c.block_scale[rows] if sparse.gate else torch.ones_like(c.block_scale[rows])
        narrow = [part.nan_to_num().to(dtype) for part in (x.q[rows], x.k[keys], x.v[keys])]
        inputs = [*narrow, factors.nan_to_num().to(wide), x.dout[rows].to(dtype)]
        of_g = c.tg[rows].nan_to_num().to(wide) if sparse.tg else None
        parts = zip(x.direction, (rows, keys, keys), strict=True)
        direction = [None if p is None else p[at].nan_to_num().to(dtype) for p, at in parts]
        own = by_autograd(
            [*inputs, dlse[:, rows].to(wide)],
            [*direction, of_g],
            of_keys.to(x.q.device),
            scale_of(case),
            second,
        )
        for name, array in own.items():
            at = keys if name in ("dk", "dv") else place(name, rows, keys)
            results[name][at] = array.detach().double()
    return {name: to_numpy(array) for name, array in results.items()}


def zeros_of(sparse: Sparse, chosen: Chosen) -> Arrays:
    """What must be exactly 0 by side: "q" and "k" (rows, heads, 1), "slot" like block_scale."""
    case = sparse.case
    unseen = {
        "q": np.ones((len(chosen.block_indices), case.num_heads_q, 1), dtype=bool),
        "k": np.ones((sum(case.lengths_k) + case.past_k, case.num_heads_kv, 1), dtype=bool),
        "slot": np.ones(chosen.block_scale.shape, dtype=bool),
    }
    for _, rows, keys, slots in every_sequence(sparse, chosen):
        of_keys = slots_of_keys(sparse, slots, keys.stop - keys.start)
        seen = np.repeat(of_keys >= OWN, case.num_heads_q // sparse.num_heads_sel, axis=1)
        unseen["q"][rows, :, 0] = ~seen.any(axis=2)
        unseen["k"][keys, :, 0] = ~of_kv_heads(sparse, of_keys >= OWN).T
        for slot in range(sparse.num_selected):
            unseen["slot"][rows, :, slot] = ~(slots == slot).any(axis=2)
    return unseen


@dataclass(frozen=True)
class Posed:
    """A problem on the GPU, as torch tensors, and what must come of it.

    ``out`` and ``lse`` are the truth, rounded, and NaN in the rows of no healthy sequence.
    """

    sparse: Sparse
    tensors: Tensors
    chosen: Chosen
    out: Any
    lse: Any
    targets: dict[str, Target]


@lru_cache(maxsize=4)
def pose(sparse: Sparse, second: bool = False) -> Posed:
    """Inputs and targets; those of float64 allow 1e-12 of a tensor's largest element."""
    case, (t, chosen) = sparse.case, host_of(sparse)
    narrow, wide = dtype_of(case.dtype), lse_dtype(case.dtype)
    exact = dense(sparse, t, chosen, "float64", second)
    kinds = {case.dtype, wide.name} - {"float64"}
    runs = {kind: dense(sparse, t, chosen, kind, second) for kind in kinds}
    zeros, targets = zeros_of(sparse, chosen), {}
    for name, array in exact.items():
        of_row, of_slot = name.endswith("lse"), name.endswith("block_scale")
        side = "k" if name in ("dk", "dv", "gk", "gv") else "slot" if of_slot else "q"
        same = runs.get(wide.name if of_row else case.dtype, exact)[name]
        if case.dtype == "float64":
            same = array + 0.5e-12 * np.abs(array[np.isfinite(array)]).max(initial=0.0)
        elif name == "gblock_scale":
            # Where autograd multiplies ddO and D out, kernels have ddout rounded and get out
            # rounded; that error of a row is the same for all keys, and adds up in this sum.
            same = array + 2 * (same - array)
        none = name in OF_SECOND and not any(sparse.direction)
        none |= name in OF_SCORES and not (any(case.direction[:2]) or sparse.tg)
        at = zeros[side] | none
        targets[name] = Target(
            array,
            same,
            wide if of_row or of_slot else narrow,
            case.sequence_of("k" if side == "k" else "q"),
            case.poisoned,
            None if name == "lse" else at[:, :, 0].T if of_row else at,
            token_axis=int(of_row),
            terms=case.terms,
        )
    if second:
        targets |= {"tout": targets["ddout"], "tlse": targets["ddlse"]}
    out, lse = exact["out"].astype(narrow), exact["lse"].astype(wide)
    outside = np.isin(case.sequence_of("q"), (*case.poisoned, -1))
    out[outside], lse[:, outside] = np.nan, np.nan
    passed = (to_framework(out, "torch"), to_framework(lse, "torch"))
    return Posed(sparse, t.on("torch"), chosen.on("torch"), *passed, targets)


# ---- calls ------------------------------------------------------------------------------------


def options_of(posed: Posed, table: Any = None) -> dict[str, Any]:
    """Keywords of every call; those of the selection, or its ``table``."""
    sparse, t, c = posed.sparse, posed.tensors, posed.chosen
    return {
        "cu_seqlens_k": t.cu_seqlens_k,
        "block_size": sparse.block_size,
        "block_counts": None if table is not None else c.block_counts,
        "include_own_block": sparse.own,
        "causal": sparse.case.causal,
        "block_scale": c.block_scale if sparse.gate else None,
        "softmax_scale": sparse.case.softmax_scale,
    }


def table_of(posed: Posed, **options: Any) -> Any:
    """The BlockTable of a problem."""
    case, t = posed.sparse.case, posed.tensors
    given = options_of(posed) | {"num_heads_kv": case.num_heads_kv, "total_k": len(t.k)}
    given |= {"num_heads_q": case.num_heads_q, "head_dim": case.head_dim}
    for name in ("block_scale", "softmax_scale"):
        del given[name]
    table = rawattn.BlockTable
    return table.of_indices(posed.chosen.block_indices, t.cu_seqlens_q, **given | options)


def in_chunks(tokens: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a fixture yields from: chunks of so many query tokens, as of long sequences, whose lists
    are cut into several segments."""
    monkeypatch.setattr(problem, "_SEGMENT_ROWS", 64)
    monkeypatch.setattr(call, "default_chunk", lambda *_sizes: tokens)
    call.pose_selection.cache_clear()
    yield
    call.pose_selection.cache_clear()


def blank(like: Any) -> Any:
    return loaded_torch().full_like(like, np.nan)


def run_forward(posed: Posed, table: Any = None, **options: Any) -> Arrays:
    """``rawattn.sparse_forward`` into an array of NaN."""
    t, options = posed.tensors, options_of(posed, table) | options
    which = posed.chosen.block_indices if table is None else table
    target = blank(posed.out)
    inputs = (t.q, t.k, t.v, t.cu_seqlens_q, which)
    out, lse = rawattn.sparse_forward(*inputs, return_lse=True, out=target, **options)
    assert out is target
    return {"out": out, "lse": lse}


def run_backward(posed: Posed, table: Any = None, **options: Any) -> Arrays:
    """``rawattn.sparse_backward`` of the true out and lse, into arrays of NaN."""
    t, options = posed.tensors, options_of(posed, table) | options
    which = posed.chosen.block_indices if table is None else table
    targets = {name: blank(like) for name, like in (("dq", t.q), ("dk", t.k), ("dv", t.v))}
    passed = (t.dout, t.q, t.k, t.v, posed.out, posed.lse, t.cu_seqlens_q, which)
    *grads, dgate = rawattn.sparse_backward(*passed, dlse=t.dlse, **targets, **options)
    assert all(a is b for a, b in zip(grads, targets.values(), strict=True))
    assert (dgate is None) == (not posed.sparse.gate)
    return targets | ({} if dgate is None else {"dblock_scale": dgate})


def run_double_backward(posed: Posed, table: Any = None, **options: Any) -> Arrays:
    t, options = posed.tensors, options_of(posed, table) | options
    which = posed.chosen.block_indices if table is None else table
    tg = posed.chosen.tg if posed.sparse.tg else None
    passed = (t.dout, t.q, t.k, t.v, posed.out, posed.lse, t.cu_seqlens_q, which)
    results = rawattn.sparse_double_backward(
        *t.direction, *passed, ddblock_scale=tg, dlse=t.dlse, **options
    )
    assert (results[-1] is None) == (not posed.sparse.gate)
    return {k: x for k, x in zip(OF_SECOND, results, strict=True) if x is not None}


def run_jvp(posed: Posed, table: Any = None, **options: Any) -> Arrays:
    t, options = posed.tensors, options_of(posed, table) | options
    which = posed.chosen.block_indices if table is None else table
    tg = posed.chosen.tg if posed.sparse.tg else None
    inputs = (t.q, t.k, t.v, *t.direction, t.cu_seqlens_q, which)
    return dict(zip(OF_JVP, rawattn.sparse_jvp(*inputs, tblock_scale=tg, **options), strict=True))

"""Two thousand random packed batches: right in all that is of first order, the same run after run,
and a sequence alone to the bit what it is in its batch.

The truth is torch's autograd of dense attention, sequence by sequence, as in gpu_problems.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.check.cases import HALF, NEIGHBOUR, Case, Tensors, dtype_of, lse_dtype, make
from rawattn.check.expected import Target
from rawattn.check.transfer import to_numpy
from rawattn.variants import METHODS
from tests.shared.gpu_arrays import Arrays, bits
from tests.shared.gpu_problems import (
    MASKS,
    Posed,
    dense_attention,
    judge,
    mask_of,
    scale_of,
    sequences,
    sized,
)

torch = pytest.importorskip("torch")

LONGEST, ROOM = 3000, 3500  # tokens of a sequence, and of a batch with more than one
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (40, 72))
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Batches:
    """Batches of one dtype, pair of head_dims and kind of mask, which share their kernels."""

    dtype: str
    dims: tuple[int, int]
    mask: str
    size: int = 25

    def __str__(self) -> str:
        return f"{self.dtype}-d{self.dims[0]}-{self.dims[1]}-{self.mask}"

    def cases(self) -> Iterator[Case]:
        for i in range(self.size):
            rng = np.random.default_rng(
                [HALF.index(self.dtype), *self.dims, MASKS.index(self.mask), i]
            )
            drawn = (random_batch(rng, self, f"batch-{i}") for _ in count())
            yield next(filter(has_gradients, drawn))


def has_gradients(case: Case) -> bool:
    """Whether a query sees two keys: if none does, dq and dk are 0, whatever the inputs."""
    return any(mask.sum(axis=1).max() > 1 for *_, mask in sequences(case))


def random_batch(rng: np.random.Generator, of: Batches, name: str) -> Case:
    """Lengths from 0 to LONGEST, short ones as often as long ones; most have a NaN neighbour."""

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def length(room: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(min(room, LONGEST) + 2)))) - 1

    pairs, room, equal = [], ROOM, rng.random() < 0.5
    for _ in range(rng.integers(1, 9)):
        pairs.append((length(room), length(room)))
        room = max(room - max(pairs[-1]), 0)
    pairs = [(n, n) if equal else (n, m) for n, m in pairs]
    at, bad = int(rng.integers(len(pairs) + 1)), bool(rng.random() < 0.7)
    if bad:
        pairs.insert(at, (NEIGHBOUR, NEIGHBOUR))
    lengths_q, lengths_k = (tuple(n) for n in zip(*pairs, strict=True))
    left, right = int(rng.integers(0, 700)), int(rng.integers(0, 300))
    window = {"window": (left, right), "left": (left, -1), "right": (-1, right)}
    heads_kv, group = pick((1, 1), (2, 1), (1, 3), (2, 3), (1, 8))
    return Case(
        name,
        lengths_q,
        lengths_k,
        of.dtype,
        heads_kv,
        group,
        causal=of.mask == "causal",
        window=window.get(of.mask, (-1, -1)),
        softmax_scale=pick(None, None, 1.3 * of.dims[0] ** -0.5),
        dlse=bool(rng.random() < 0.7),
        strided=bool(rng.random() < 0.2),
        poisoned=(at,) if bad else (),
        past_q=pick(0, 3, 40),
        past_k=pick(0, 3, 40),
        **sized(*of.dims),
    )


def first_order(case: Case, t: Tensors, kind: str) -> Arrays:
    """out, lse and gradients in the arithmetic of dtype ``kind``, as float64 tensors."""
    dtype, wide = getattr(torch, kind), getattr(torch, lse_dtype(kind).name)
    heads, total_q = t.q.shape[1], len(t.q)
    zero = partial(torch.zeros, dtype=torch.float64, device=t.q.device)
    results = {"out": zero(t.dout.shape), "lse": zero((heads, total_q)) - torch.inf}
    results |= {f"d{name}": zero(getattr(t, name).shape) for name in "qkv"}
    for rows, keys, allowed in sequences(case):
        mask = torch.from_numpy(allowed).to(t.q.device)
        inputs = [x.to(dtype).requires_grad_() for x in (t.q[rows], t.k[keys], t.v[keys])]
        out, lse = dense_attention(*inputs, mask, scale_of(case))
        dlse = torch.zeros_like(lse) if t.dlse is None else t.dlse[:, rows].to(wide)
        found = torch.autograd.grad((out, lse), inputs, (t.dout[rows].to(dtype), dlse))
        results["out"][rows] = out.detach().double()
        results["lse"][:, rows] = lse.detach().double().masked_fill(~mask.any(dim=1), -torch.inf)
        for name, at, array in zip(GRADIENTS, (rows, keys, keys), found, strict=True):
            results[name][at] = array.double()
    return results


def pose(case: Case) -> Posed:
    tensors = make(case).on("torch")
    narrow, wide = dtype_of(case.dtype), lse_dtype(case.dtype)
    exact = first_order(case, tensors, "float64")
    same = first_order(case, tensors, case.dtype)
    same["lse"] = first_order(case, tensors, wide.name)["lse"]
    targets = {}
    for name, array in exact.items():
        side = "k" if name in ("dk", "dv") else "q"
        targets[name] = Target(
            to_numpy(array),
            to_numpy(same[name]),
            wide if name == "lse" else narrow,
            case.sequence_of(side),
            case.poisoned,
            None if name == "lse" else case.unseen(side)[:, None, None],
            token_axis=int(name == "lse"),
            terms=case.terms,
        )
    return Posed(case, tensors, exact["out"], exact["lse"], targets)


def run(case: Case, t: Tensors, method: str, **options: Any) -> Arrays:
    """The forward and the backward into arrays of NaN; the backward of what the forward gave."""
    options |= mask_of(case, t)
    arrays = {f"d{name}": torch.full_like(getattr(t, name), np.nan) for name in "qkv"}
    out = torch.full_like(t.dout, np.nan)
    _, lse = rawattn.forward(t.q, t.k, t.v, t.cu_seqlens_q, return_lse=True, out=out, **options)
    passed = (t.dout, t.q, t.k, t.v, out, lse, t.cu_seqlens_q)
    rawattn.backward(*passed, dlse=t.dlse, method=method, **arrays, **options)
    return {"out": out, "lse": lse, **arrays}


def alone(case: Case, t: Tensors) -> tuple[slice, Arrays]:
    """The longest healthy sequence without the others: its rows, out and lse."""
    rows, keys, _ = max(sequences(case), key=lambda of: of[0].stop - of[0].start)
    options = mask_of(case, t) | {"cu_seqlens_k": offsets(t, keys)}
    inputs = (t.q[rows], t.k[keys], t.v[keys], offsets(t, rows))
    return rows, dict(
        zip(("out", "lse"), rawattn.forward(*inputs, return_lse=True, **options), strict=True)
    )


def offsets(t: Tensors, rows: slice) -> Any:
    return torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=t.q.device)


BATCHES = [Batches(*of) for of in product(HALF, DIMS, MASKS)]


@pytest.mark.gpu
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_random_batches(batches: Batches) -> None:
    for i, case in enumerate(batches.cases()):
        posed = pose(case)
        t, method = posed.tensors, METHODS[i % len(METHODS)]
        results = run(case, t, method, backend="cuda")
        judge(posed, results)
        again = run(case, t, method, backend="cuda")
        repeatable = results if method == "deterministic" else ("out", "lse")
        for name in repeatable:
            assert bits(again[name]) == bits(results[name]), (case, name)
        if any(True for _ in sequences(case)):
            rows, single = alone(case, t)
            assert bits(single["out"]) == bits(results["out"][rows]), case
            assert bits(single["lse"]) == bits(results["lse"][:, rows]), case


@pytest.mark.usefixtures("one_thread")
def test_truth_of_batches_is_that_of_the_reference() -> None:
    """Needs no GPU; of batches that are small enough for it."""
    small = [
        case
        for batches in (Batches(HALF[1], (40, 72), mask, 4) for mask in MASKS)
        for case in batches.cases()
        if sum(case.lengths_q) + sum(case.lengths_k) < 700
    ]
    assert len(small) > 3
    for case in small:
        posed = pose(case)
        judge(posed, run(case, posed.tensors, METHODS[-1], backend="reference"))

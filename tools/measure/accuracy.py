"""How exact out and lse are, ours and the peers', against float64 on the same 16-bit inputs.

Packed sequences of unequal length, with scores that are normal, of deviation 30, rising or falling
by 40 (as natural logarithms) from one block of keys to the next, or dominated by one key. Errors of
out are rms, relative to the rms of out; that of lse is the largest, relative to its size.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import click

from measure.cases import BenchCase
from measure.timing import DEFAULT_PEERS

Row = dict[str, Any]

# Of ours to that of the most exact peer. Where one key dominates there is nothing to be off by.
LIMITS = {"normal": 1.4, "rising": 1.4, "falling": 1.4, "deviation 30": 1.1}
DOMINATING = "dominating"
SCORES = (*LIMITS, DOMINATING)
LSE_LIMIT = 1e-5

LENGTHS = (1000, 700, 64)
NUM_HEADS = 8
BLOCK = 64  # keys of a step
STEP = 40.0
DOMINATING_STEPS = 27  # 2^10 and 56 more: what noise and rounding may take
DOMINATED = 2**9  # between the lse of rows that see the dominating key and that of the others


def cases() -> list[BenchCase]:
    """Every kind of scores, which is the case's name, at three head_dims, in both dtypes."""
    return [
        BenchCase("accuracy", scores, LENGTHS, NUM_HEADS, NUM_HEADS, head_dim, causal, dtype)
        for scores in SCORES
        for head_dim in (64, 128, 256)
        for dtype in ("bfloat16", "float16")
        for causal in (False, True)
    ]


def dominating_keys(seqlen: int) -> list[int]:
    """One for each head: the first, the last, amid, and at edges of tiles of 64 and 128 keys."""
    middle = seqlen // 2
    places = (0, seqlen - 1, middle, 63, 64, 127, 128, middle // 128 * 128)
    return [min(place, seqlen - 1) for place in places]


def inputs(case: BenchCase, data: Any) -> Any:
    """``data`` with the scores that the case is named after.

    Steps stand in the first channel: 16 for each in k, where 16 bits hold them exactly, and in q
    the same for every token.
    """
    import torch

    if case.name == "normal":
        return data
    if case.name == "deviation 30":
        return data._replace(q=30 * data.q)
    steps = torch.zeros(data.k.shape[:2])
    for start, end in pairwise(accumulate(case.lengths, initial=0)):
        if case.name == DOMINATING:
            for head, key in enumerate(dominating_keys(end - start)):
                steps[start + key, head] = DOMINATING_STEPS
        else:
            sign = 1 if case.name == "rising" else -1
            steps[start:end] = sign * (torch.arange(end - start) // BLOCK)[:, None]
    q, k = data.q.clone(), data.k.clone()
    q[..., 0] = STEP / 16 * case.head_dim**0.5
    k[..., 0] = (16 * steps).to(k)
    return data._replace(q=q, k=k)


def reference(case: BenchCase, data: Any) -> tuple[Any, Any]:
    """out and lse in float64, one sequence at a time."""
    import torch

    outs, lses = [], []
    heads_first = (x.double().transpose(0, 1) for x in (data.q, data.k, data.v))
    for q, k, v in zip(*(x.split(case.lengths, 1) for x in heads_first), strict=True):
        scores = q @ k.mT * case.head_dim**-0.5
        if case.causal:
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1][..., None]).exp() @ v)
    return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)


def peer_out(name: str, case: BenchCase, data: Any) -> Any:
    """out of a peer, packed; one sequence at a time where it takes no unequal lengths; None where
    it does not cover the case."""
    import torch

    from measure.contenders import Data, theirs

    def out(case: BenchCase, data: Data) -> Any:
        contender = theirs(name, case, data, "forward")
        return contender and contender.packed(contender.prepare()()[0])

    if (whole := out(case, data)) is not None:
        return whole
    parts = (x.split(case.lengths) for x in data[: Data._fields.index("cu_seqlens")])
    outs = []
    for seqlen, *tensors in zip(case.lengths, *parts, strict=True):
        alone = replace(case, lengths=(seqlen,))
        outs.append(out(alone, Data(*tensors, data.cu_seqlens.new_tensor([0, seqlen]), None)))
    return None if outs[0] is None else torch.cat(outs)


def measure_row(case: BenchCase, peers: Iterable[str], device: str = "cuda") -> Row:
    """What records hold of it; ``errors`` says which peers failed, and how."""
    from torch.linalg import vector_norm

    from measure.contenders import make, ours
    from measure.peers import importable

    data = inputs(case, make(case, device))
    expected, expected_lse = reference(case, data)
    # a row before its dominating key is one of normal scores
    counted = (expected_lse > (DOMINATED if case.name == DOMINATING else -math.inf)).T

    def rms(out: Any) -> float:
        apart = vector_norm(out[counted].double() - expected[counted])
        return four_digits(apart / vector_norm(expected[counted]))

    out, lse = ours(case, data, "forward").prepare()()
    lse_error = ((lse - expected_lse).abs() / expected_lse.abs().clamp(min=1)).max()
    row: Row = {
        "suite": case.suite,
        "scores": case.name,
        "head_dim": case.head_dim,
        "dtype": case.dtype,
        "causal": case.causal,
        "ours_rms": rms(out),
        "peers_rms": {},
        "lse_error": four_digits(lse_error),
    }
    if case.name == DOMINATING:
        row["exact"] = row["ours_rms"] == 0
    for name in filter(importable, peers):
        try:
            if (out := peer_out(name, case, data)) is None:
                continue
            if not math.isfinite(its := rms(out)):
                raise ValueError(f"its rms error is {its}")
        except Exception as error:  # foreign code: it may fail in any way, and the rest goes on
            row.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:200]
        else:
            row["peers_rms"][name] = its
    return row


def four_digits(value: Any) -> float:
    """Of a tensor with one element, as much as a record needs."""
    return float(f"{float(value):.4g}")


def measure(peers: Iterable[str] = DEFAULT_PEERS, budget: float = 300.0) -> list[Row]:
    """The rows that start within ``budget`` seconds."""
    began, rows = time.monotonic(), []
    for case in cases():
        if time.monotonic() - began > budget:
            click.echo(f"budget of {budget:.0f} s spent: stopped the accuracy", err=True)
            break
        try:
            rows.append(measure_row(case, peers))
        except Exception as error:  # one that fails must not cost the run the others
            name = label(case.name, case.head_dim, case.dtype, case.causal)
            click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
    return rows


def to_most_exact(row: Row) -> float | None:
    """Ours to the smallest error of the peers, None where that is 0 or there is none."""
    best = min(row["peers_rms"].values(), default=0.0)
    return row["ours_rms"] / best if best else None


def faults(row: Row) -> list[str]:
    """What is less exact than it must be."""
    limit, found = LIMITS.get(row["scores"]), []
    if limit and (ratio := to_most_exact(row)) is not None and not ratio <= limit:
        found.append(f"out is {ratio:.2f} times as far off as the most exact peer's, limit {limit}")
    if not row["lse_error"] <= LSE_LIMIT:
        found.append(f"lse is off by {row['lse_error']:.0e} of its size, limit {LSE_LIMIT:.0e}")
    if not row.get("exact", True):
        found.append("out is not the dominating key's value")
    name = label(row["scores"], row["head_dim"], row["dtype"], row["causal"])
    return [f"{name}: {what}" for what in found]


def label(scores: str, head_dim: int, dtype: str, causal: bool) -> str:
    return f"{scores} d{head_dim} {dtype} {'causal' if causal else 'full'}"

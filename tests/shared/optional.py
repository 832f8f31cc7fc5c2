"""softcap, sinks and seqused_k through every public function, beside the reference.

Keys that are not in use, and rows of no sequence, are NaN.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import rawattn
from rawattn.reference import dense, second
from rawattn.variants import METHODS

OPTIONS = {
    "softcap": {"softcap": 1.5},
    "high softcap": {"softcap": 40.0},
    "sinks": {"sinks": True},
    "seqused_k": {"seqused_k": True},
    "all": {"softcap": 3.0, "sinks": True, "seqused_k": True},
}


@dataclass(frozen=True)
class Problem:
    """Lengths, how many keys of each sequence are in use, widths, mask and scores' size."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    used: tuple[int, ...]
    head_dim: int
    head_dim_v: int
    group: int = 2
    num_heads_kv: int = 2
    window: tuple[int, int] = (-1, 0)
    scale: float = 1.0  # of q
    past: int = 2
    seed: int = 0


Reference = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Run:
    """What to call, what it must give, and the names of that."""

    name: str
    names: tuple[str, ...]
    call: Callable[..., tuple[Any, ...]]
    exact: Reference


def runs(
    p: Problem, dtype: Any, chosen: dict[str, Any], place: Callable[[Any], Any], **options: Any
) -> Iterator[Run]:
    """Of all functions, on arrays that ``place`` has put where they belong."""
    rng = np.random.default_rng(p.seed)
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (p.lengths_q, p.lengths_k))
    rows, keys, heads = cu_q[-1] + p.past, cu_k[-1] + p.past, p.group * p.num_heads_kv
    used = np.array(p.used, np.int32) if chosen.get("seqused_k") else None

    def drawn(total: int, heads: int, size: int) -> Any:
        return rng.standard_normal((total, heads, size)).astype(dtype)

    def inputs(scale: float = 1.0) -> list[Any]:
        q, k, v = (
            (drawn(rows, heads, p.head_dim) * np.asarray(scale, dtype)).astype(dtype),
            drawn(keys, p.num_heads_kv, p.head_dim),
            drawn(keys, p.num_heads_kv, p.head_dim_v),
        )
        q[cu_q[-1] :] = np.nan
        for x in (k, v):
            x[cu_k[-1] :] = np.nan
            if used is not None:
                for start, stop, n in zip(cu_k, cu_k[1:], used, strict=False):
                    x[min(start + max(n, 0), stop) : stop] = np.nan
        return [q, k, v]

    real = np.float64 if dtype == np.float64 else np.float32
    qkv, us = inputs(p.scale), inputs()
    dout, dlse = drawn(rows, heads, p.head_dim_v), rng.standard_normal((heads, rows)).astype(real)
    dout[cu_q[-1] :] = np.nan
    sinks, us_sinks = (rng.standard_normal(heads).astype(real) for _ in range(2))
    mask = {"window": p.window} | {k: v for k, v in chosen.items() if k == "softcap"}
    exactly = mask | {"seqused_k": used}
    given = mask | options | {"cu_seqlens_k": place(cu_k)}
    if used is not None:
        given["seqused_k"] = place(used)
    moved: dict[str, Any] = {}
    if chosen.get("sinks"):
        exactly["sinks"], given["sinks"] = sinks, place(sinks)
        moved = {"sinks": us_sinks}
    of_sinks = bool(moved)
    out, lse = dense.forward(*qkv, cu_q, cu_k, **exactly)
    passed = (dout, *qkv, out.astype(dtype), lse.astype(real))
    at = [place(x) for x in (*qkv, cu_q)]
    at_us, at_passed = [place(x) for x in us], [place(x) for x in passed]

    yield Run(
        *("forward", ("out", "lse")),
        lambda: rawattn.forward(*at, return_lse=True, **given),
        (out, lse),
    )
    names = ("dq", "dk", "dv") + ("dsinks",) * of_sinks
    exact = dense.backward(*passed, cu_q, cu_k, dlse=dlse, **exactly)
    for method in METHODS:
        yield Run(
            *(method, names),
            lambda method=method: rawattn.backward(
                *at_passed, at[3], dlse=place(dlse), method=method, **given
            ),
            exact,
        )
    for some in ((0, 1, 2), (2,), (0,), ()):
        parts = [x if n in some else None for n, x in enumerate(us)]
        at_parts = [x if n in some else None for n, x in enumerate(at_us)]
        along = moved if len(some) != 1 or some == (2,) else {}
        ts, dds = ({f"{prefix}{n}": x for n, x in along.items()} for prefix in ("t", "dd"))
        if not some and not ts:
            continue
        yield Run(
            *(f"jvp {some}", ("out", "tout", "lse", "tlse")),
            lambda at_parts=at_parts, ts=ts: rawattn.jvp(
                *at[:3], *at_parts, at[3], **given, **{n: place(x) for n, x in ts.items()}
            ),
            second.jvp(*qkv, *parts, cu_q, cu_k, **exactly, **ts),
        )
        for deterministic in (False, True):
            yield Run(
                f"double_backward {some} {deterministic}",
                ("ddout", "ddlse", "gq", "gk", "gv") + ("gsinks",) * of_sinks,
                lambda at_parts=at_parts, dds=dds, deterministic=deterministic: (
                    rawattn.double_backward(
                        *at_parts,
                        *at_passed,
                        at[3],
                        dlse=place(dlse),
                        deterministic=deterministic,
                        **given,
                        **{n: place(x) for n, x in dds.items()},
                    )
                ),
                second.double_backward(*parts, *passed, cu_q, cu_k, dlse=dlse, **exactly, **dds),
            )


def wrong(run: Run, bound: float) -> list[str]:
    """Results that differ by more than ``bound`` of the size of the exact ones."""
    found = [np.asarray(x).astype(np.float64) for x in run.call()]
    assert len(found) == len(run.exact)
    texts = []
    for name, got, exact in zip(run.names, found, run.exact, strict=True):
        same = (np.isfinite(got) == np.isfinite(exact)).all()
        alive = np.isfinite(exact)
        size = max(1.0, float(np.abs(exact[alive]).max(initial=0.0)))
        apart = float(np.abs(got[alive] - exact[alive]).max(initial=0.0)) / size
        if not same or not apart <= bound:
            texts.append(f"{run.name} {name}: {apart:.2g}" + ("" if same else ", not finite"))
    return texts

"""Attention with a softcap, sinks and keys that are not in use; the same with bugs planted in it.

Whole sequences of a head at once, in complex numbers: their imaginary parts, which are too small to
be felt by the real ones, are tangents. Written apart from rawattn.reference and from what
rawattn-check plants. What is wrong is a field of ``Kernel``; by default nothing is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, STAGES, Answers, Question

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

DTYPES = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
MASKS: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (9, 4)}, {})
TINY = 1e-30  # of the imaginary parts
EVERY, FIRST = tuple(STAGES), ("forward", "backward")


@dataclass(frozen=True)
class Kernel:
    """What an implementation does; wrong where it is not True."""

    caps: bool = True
    slope: bool = True  # the derivative of the softcap
    bend: bool = True  # that of the slope
    sinks_in_out: bool = True
    sinks_in_lse: bool = True
    own_lse: bool = False  # the backward pass makes it anew
    dsinks: str = "right"  # "negative", "zero", "without dlse"
    used: bool = True  # keys from seqused_k on are left out
    diagonal_of_used: bool = True


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    kernel: Kernel
    also: tuple[str, ...] = ()

    def at(self, stage: str) -> Kernel:
        return self.kernel if stage in self.stages else Kernel()


PLANTED: tuple[Planted, ...] = (
    Planted("softcap-dropped", "everywhere", EVERY, Kernel(caps=False)),
    Planted("softcap-dropped", "forward", ("forward",), Kernel(caps=False)),
    Planted("softcap-dropped", "backward", ("backward",), Kernel(caps=False)),
    Planted("softcap-dropped", "beyond first order", EVERY[2:], Kernel(caps=False)),
    Planted("softcap-slope-omitted", "backward", ("backward",), Kernel(slope=False)),
    Planted("softcap-slope-omitted", "tangent", ("jvp",), Kernel(slope=False)),
    Planted("softcap-slope-omitted", "second", ("second",), Kernel(slope=False, bend=False)),
    Planted("softcap-slope-omitted", "its own one", ("second",), Kernel(bend=False)),
    Planted(
        "sinks-dropped", "forward", ("forward",), Kernel(sinks_in_out=False, sinks_in_lse=False)
    ),
    Planted("sinks-dropped", "tangent", ("jvp",), Kernel(sinks_in_out=False, sinks_in_lse=False)),
    Planted("sinks-dropped", "lse", ("forward",), Kernel(sinks_in_lse=False)),
    Planted("sinks-dropped", "out", ("forward",), Kernel(sinks_in_out=False)),
    Planted("sinks-dropped", "backward", ("backward",), Kernel(own_lse=True, sinks_in_lse=False)),
    Planted("sinks-gradient", "sign", ("backward",), Kernel(dsinks="negative")),
    Planted("sinks-gradient", "zero", ("backward", "second"), Kernel(dsinks="zero")),
    Planted("sinks-gradient", "no dlse", ("backward",), Kernel(dsinks="without dlse")),
    Planted("seqused-ignored", "everywhere", EVERY, Kernel(used=False)),
    Planted("seqused-ignored", "forward", ("forward",), Kernel(used=False)),
    Planted("seqused-ignored", "backward", ("backward",), Kernel(used=False)),
    Planted("seqused-ignored", "diagonal", EVERY, Kernel(diagonal_of_used=False)),
)


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows; dtypes take turns."""
    for number in range(count):
        rng = np.random.default_rng([seed, number, crc32(planted.variant.encode())])
        yield draw(rng, DTYPES[number % len(DTYPES)], planted.bug.partition("-")[0])


def draw(rng: np.random.Generator, dtype: np.dtype[Any], of: str = "") -> Question:
    """A random problem, with what is ``of`` a "softcap", "sinks" or "seqused" at least."""
    batch, heads_kv, group, dim = 3, 2, int(rng.integers(1, 4)), 16
    lengths_q, lengths_k = rng.integers(5, 30, (2, batch))
    lengths_k = np.maximum(lengths_k, 8)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    wide = np.float64 if dtype == np.float64 else np.float32

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    def of_q() -> Array:
        return normal(cu_q[-1], heads_kv * group, dim)

    def of_k() -> Array:
        return normal(cu_k[-1], heads_kv, dim)

    there = {name: name == of or rng.random() < 0.5 for name in ("softcap", "sinks", "seqused")}
    heads = heads_kv * group
    sinks, tsinks = rng.standard_normal((2, heads)).astype(wide)
    return Question(
        *(of_q(), of_k(), of_k(), cu_q, cu_k),
        **MASKS[int(rng.integers(len(MASKS) - (of == "seqused")))],
        dout=of_q(),
        dlse=rng.standard_normal((heads, int(cu_q[-1]))).astype(wide),
        **{"tq": of_q(), "tk": of_k(), "tv": of_k()},
        softcap=float(rng.uniform(0.8, 3.0)) if there["softcap"] else None,
        sinks=sinks if there["sinks"] else None,
        tsinks=tsinks if there["sinks"] else None,
        seqused_k=lengths_k - rng.integers(2, 7, batch) if there["seqused"] else None,
    )


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """All results with the bug in them, in the dtypes of right ones; None: nothing is wrong."""
    q = question
    kernels = {stage: Kernel() if planted is None else planted.at(stage) for stage in STAGES}
    wide = np.float64 if q.dtype == np.float64 else np.float32
    stored: dict[str, Array] = {}

    def store(**results: Array) -> None:
        for name, x in results.items():
            rows = name in BY_ROW or name.endswith("sinks")
            stored[name.replace("_", " ")] = x.astype(wide if rows else q.dtype)

    still, moved = inputs(q), inputs(q, TINY)
    out, lse = forward(q, kernels["forward"], still)
    store(out=out.real, lse=lse.real)
    given = stored["out"].astype(np.complex128), stored["lse"].astype(np.complex128)
    first = backward(q, kernels["backward"], still, *given)
    store(**{name: x.real for name, x in first.items()})
    out, lse = forward(q, kernels["jvp"], moved)
    store(jvp_out=out.real, jvp_lse=lse.real, tout=out.imag / TINY, tlse=lse.imag / TINY)
    out, lse = forward(q, kernels["second"], moved)
    beyond = backward(q, kernels["second"], moved, out, lse)
    store(ddout=out.imag / TINY, ddlse=lse.imag / TINY)
    store(**{name.replace("d", "g", 1): x.imag / TINY for name, x in beyond.items()})
    return stored


def inputs(q: Question, tiny: float = 0.0) -> Arrays:
    """q, k, v and sinks, moved along their direction by ``tiny`` i; without sinks such of -inf."""
    found = {"sinks": np.full(q.num_heads_q, -np.inf, dtype=np.complex128)}
    for name in ("q", "k", "v", "sinks"):
        x, t = (getattr(q, f"{prefix}{name}") for prefix in ("", "t"))
        if x is not None:
            found[name] = x.astype(np.complex128) + 1j * tiny * t.astype(np.float64)
    return found


def heads(q: Question, kernel: Kernel) -> Iterator[tuple[int, int, slice, slice, Array]]:
    """Head, its key/value head, rows, keys and mask of all sequences."""
    left, right = (n if n >= 0 else np.inf for n in q.mask_window)
    for b in range(q.batch):
        (i0, i1), (j0, j1) = q.cu_seqlens_q[b : b + 2], q.cu_seqlens_k[b : b + 2]
        used = j1 - j0 if q.seqused_k is None else int(q.seqused_k[b])
        keys = used if kernel.used else j1 - j0
        last = keys if kernel.diagonal_of_used else j1 - j0
        behind = np.arange(keys)[None] - np.arange(i1 - i0)[:, None] - last + (i1 - i0)
        mask = (behind >= -left) & (behind <= right)
        for h in range(q.num_heads_q):
            yield h, h // q.group, slice(i0, i1), slice(j0, j0 + keys), mask


def scores(
    q: Question, kernel: Kernel, x: Arrays, h: int, g: int, i: slice, j: slice
) -> tuple[Array, Array]:
    """Capped scores, and the slope of the cap."""
    X = q.scale * (x["q"][i, h] @ x["k"][j, g].T)
    if q.softcap is None or not kernel.caps:
        return X, np.ones_like(X)
    T = np.tanh(X.real / q.softcap)
    slope = 1 - T**2
    bend = -2 * T * slope / q.softcap * kernel.bend
    S = q.softcap * T + 1j * X.imag * (slope if kernel.slope else 1.0)
    return S, slope + 1j * X.imag * bend if kernel.slope else np.ones_like(X)


def log_sum(S: Array, mask: Array, sink: Any) -> Array:
    """log(sum of exp(S) where it is seen, and exp(sink)); -inf for nothing."""
    top = np.maximum(np.where(mask, S.real, -np.inf).max(axis=1, initial=-np.inf), sink.real)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.where(mask, np.exp(np.where(mask, S, 0.0) - top[:, None]), 0.0).sum(axis=1)
    if sink.real > -np.inf:
        total = total + np.exp(sink - top)
    dead = total.real == 0
    return np.where(dead, -np.inf, np.log(np.where(dead, 1.0, total)) + top)


def weights(S: Array, mask: Array, L: Array) -> Array:
    dead = np.isneginf(L.real)
    shifted = np.where(mask, S, 0.0) - np.where(dead, 0.0, L)[:, None]
    return np.where(mask & ~dead[:, None], np.exp(np.where(mask, shifted, 0.0)), 0.0)


def forward(q: Question, kernel: Kernel, x: Arrays) -> tuple[Array, Array]:
    out = np.zeros((*q.q.shape[:2], q.v.shape[2]), dtype=np.complex128)
    lse = np.full(q.q.shape[1::-1], -np.inf, dtype=np.complex128)
    for h, g, i, j, mask in heads(q, kernel):
        S, _ = scores(q, kernel, x, h, g, i, j)
        with_sink, without = (
            log_sum(S, mask, sink) for sink in (x["sinks"][h], np.float64(-np.inf))
        )
        lse[h, i] = with_sink if kernel.sinks_in_lse else without
        out[i, h] = weights(S, mask, with_sink if kernel.sinks_in_out else without) @ x["v"][j, g]
    return out, lse


def backward(q: Question, kernel: Kernel, x: Arrays, out: Array, lse: Array) -> Arrays:
    """dq, dk, dv, with sinks dsinks, and delta in real numbers."""
    names = ("q", "k", "v", "sinks") if q.sinks is not None else ("q", "k", "v")
    found = {f"d{name}": np.zeros_like(x[name]) for name in names}
    dout, dlse = (np.asarray(a).astype(np.float64) for a in (q.dout, q.dlse))
    for h, g, i, j, mask in heads(q, kernel):
        S, slope = scores(q, kernel, x, h, g, i, j)
        L = log_sum(S, mask, np.float64(-np.inf)) if kernel.own_lse else lse[h, i]
        P, dO = weights(S, mask, L), dout[i, h]
        OdO = (dO * out[i, h]).sum(axis=1)
        D = OdO - dlse[h, i]
        dX = slope * P * (dO @ x["v"][j, g].T - D[:, None])
        found["dq"][i, h] = q.scale * (dX @ x["k"][j, g])
        found["dk"][j, g] += q.scale * (dX.T @ x["q"][i, h])
        found["dv"][j, g] += P.T @ dO
        if q.sinks is not None:
            row = OdO if kernel.dsinks == "without dlse" else D
            factor = {"negative": -1.0, "zero": 0.0}.get(kernel.dsinks, 1.0)
            with np.errstate(invalid="ignore"):  # of a forward without sinks, where lse is -inf
                P0 = np.exp(x["sinks"][h] - lse[h, i])
                found["dsinks"][h] -= factor * (P0 * row).sum()
    return found

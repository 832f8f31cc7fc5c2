"""Random packed problems on several ranks, and what is wrong with their results.

Every rank draws the whole problem from the same seed; rank 0 computes the truth in one process,
and each rank compares its own part.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from rawattn.torch import context_parallel as cp
from rawattn.torch import varlen_attn
from rawattn.torch.context_parallel import attention, exchange, first_order, plans, stages, ulysses

METHODS = ("gather", "ring", "ulysses")
LAYOUTS = ("contiguous", "zigzag")
SPECIAL = ((7,), (698,), (1,), (0, 5), (3, 0, 4))  # lengths that other libraries get wrong
CLOSE = 1e-12
OF_BEYOND = ("tout", "tlse", "ddout", "ddlse", "gq", "gk", "gv", "gsinks")
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Problem:
    """Lengths of all sequences, sizes, the mask, and how the batch is split."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    causal: bool
    window: tuple[int, int]
    layout: str
    min_chunk: int
    overlap: int | None
    softcap: float | None
    sinks: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


def draw(rng: np.random.Generator, ranks: int, longest: int = 300) -> Problem:
    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    if rng.random() < 0.15:
        lengths = pick(*(n for n in SPECIAL if sum(n) <= 3 * longest))
    else:
        lengths = tuple(
            int(pick(0, 1, rng.integers(2, 20), rng.integers(2, longest + 1)))
            for _ in range(rng.integers(1, 6))
        )
    others = lengths
    if rng.random() < 0.3:
        others = tuple(max(0, n + int(pick(0, -3, 5, 40))) for n in lengths)
    group = int(pick(1, 2, 3))
    heads_kv = int(pick(1, 2, 3)) * (ranks if rng.random() < 0.4 else 1)
    heads = heads_kv * group
    if heads % ranks:  # for Ulysses
        heads_kv, heads = heads_kv, heads_kv * ranks
    left, right = int(rng.integers(0, 40)), int(rng.integers(0, 40))
    causal, window = pick(
        (True, (-1, -1)),
        (True, (-1, -1)),
        (False, (-1, -1)),
        (True, (left, -1)),
        (False, (left, right)),
        (False, (left, -1)),
        (False, (-1, right)),
    )
    return Problem(
        lengths,
        others,
        (heads, heads_kv),
        (8, int(pick(8, 16))),
        causal,
        window,
        pick(*LAYOUTS),
        int(pick(1, 4, 16)),
        pick(None, 2, 3),
        pick(None, None, None, 3.0),
        bool(rng.random() < 0.25),
    )


def inputs_of(p: Problem, seed: int) -> list[Tensor | None]:
    """dout, dlse, q, k, v and sinks of the whole batch."""
    made = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(p.lengths_q), sum(p.lengths_k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    (heads, heads_kv), (d, dv) = p.heads, p.head_dims
    return [
        normal(total_q, heads, dv),
        normal(heads, total_q),
        normal(total_q, heads, d),
        normal(total_k, heads_kv, d),
        normal(total_k, heads_kv, dv),
        normal(heads) if p.sinks else None,
    ]


def offsets(lengths: tuple[int, ...]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def truth(p: Problem, inputs: list[Tensor | None]) -> list[Tensor]:
    """out, lse, dq, dk, dv and dsinks of one process."""
    dout, dlse, *primals = inputs
    wanted = [x.clone().requires_grad_() for x in primals if x is not None]
    cu_q, cu_k = (torch.tensor(offsets(n), dtype=torch.int32) for n in (p.lengths_q, p.lengths_k))
    sinks = wanted[3] if p.sinks else None
    out, lse = varlen_attn(*wanted[:3], cu_q, cu_k, sinks=sinks, return_lse=True, **p.options)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), wanted, (dout, dlse))]


def wrong(p: Problem, seed: int, methods: tuple[str, ...] = METHODS) -> list[str]:
    """What differs by more than ``CLOSE`` on this rank."""
    inputs = inputs_of(p, seed)
    dout, dlse, *primals = inputs
    exact = truth(p, inputs) if dist.get_rank() == 0 else None
    shapes = [x for x in (dout, dlse, *primals) if x is not None]
    if exact is None:
        exact = [torch.empty_like(x) for x in shapes]
    for x in exact:
        dist.broadcast(x, 0)
    texts = []
    for method in methods:
        plan = plan_of(p, method)
        own = [
            cp.shard(x, plan, of=of).clone().requires_grad_()
            for x, of in zip(primals[:3], "qkk", strict=True)
        ]
        sinks = None if primals[3] is None else primals[3].clone().requires_grad_()
        out, lse = cp.attn(*own, plan, sinks=sinks, return_lse=True, **p.options)
        wanted = own if sinks is None else [*own, sinks]
        cotangents = cp.shard(dout, plan), cp.shard(dlse, plan, 1)
        found = [out, lse, *torch.autograd.grad((out, lse), wanted, cotangents)]
        parts = [cp.shard(exact[0], plan), cp.shard(exact[1], plan, 1)]
        parts += [cp.shard(x, plan, of=of) for x, of in zip(exact[2:5], "qkk", strict=True)]
        if sinks is not None:
            dist.all_reduce(found[5])
            parts.append(exact[5])
        texts += differences(method, NAMES, found, parts, p)
    return texts


def plan_of(p: Problem, method: str) -> cp.Plan:
    return cp.plan(
        offsets(p.lengths_q),
        cu_seqlens_k=offsets(p.lengths_k),
        layout=p.layout,
        method=method,
        min_chunk=p.min_chunk,
        overlap=p.overlap,
    )


def differences(
    method: str, names: tuple[str, ...], found: list[Tensor], exact: list[Tensor], p: Problem
) -> list[str]:
    """What is further apart than ``CLOSE`` on this rank."""
    texts = []
    for name, x, y in zip(names, found, exact, strict=False):
        error = torch.where(x == y, 0.0, (x - y).abs()).max().item() if x.numel() else 0.0
        size = y.where(y.isfinite(), 0.0).abs().max().item() if y.numel() else 0.0
        if not error <= CLOSE * max(1.0, size):
            texts.append(f"{method} {name}: {error:.2g} on rank {dist.get_rank()}, {p}")
    return texts


def sweep(
    seed: int, count: int, longest: int = 300, methods: tuple[str, ...] = METHODS
) -> list[str]:
    """Of ``count`` problems."""
    rng = np.random.default_rng([seed, dist.get_world_size()])
    texts = []
    for n in range(count):
        texts += wrong(draw(rng, dist.get_world_size(), longest), 1000 * seed + n, methods)
    return texts


def beyond(p: Problem, seed: int, methods: tuple[str, ...] = METHODS) -> list[str]:
    """The same of second order and of forward mode."""
    made = torch.Generator().manual_seed(seed + 1)
    inputs = inputs_of(p, seed)
    along = [
        None if x is None else torch.randn(x.shape, generator=made, dtype=x.dtype) for x in inputs
    ]
    cu_q, cu_k = (torch.tensor(offsets(n), dtype=torch.int32) for n in (p.lengths_q, p.lengths_k))

    def results(attend: Any, own: list[Tensor | None], along: list[Tensor | None]) -> list[Tensor]:
        """Of the direction in q, k, v and sinks: gradients of everything, and tangents."""
        own = [x if x is None else x.detach().requires_grad_() for x in own]
        there = [x for x in own if x is not None]
        dout, dlse, *primals = own
        moved = [x for x in along[2:] if x is not None]
        wanted = [x for x in primals if x is not None]
        first = torch.autograd.grad(attend(*primals), wanted, (dout, dlse), create_graph=True)
        second = torch.autograd.grad(first, there, moved)
        with forward_ad.dual_level():
            dual = [
                x if x is None else forward_ad.make_dual(x.detach(), t)
                for x, t in zip(primals, along[2:], strict=True)
            ]
            tangents = [forward_ad.unpack_dual(x).tangent for x in attend(*dual)]
        return [*tangents, *second]

    def whole(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return varlen_attn(q, k, v, cu_q, cu_k, sinks=sinks, return_lse=True, **p.options)

    exact, texts = results(whole, inputs, along), []
    for method in methods:
        plan = plan_of(p, method)

        def parts(all_of: list[Tensor | None], plan: cp.Plan = plan) -> list[Tensor | None]:
            dout, dlse, q, k, v, sinks = all_of
            parts = [cp.shard(x, plan, of=of) for x, of in ((q, "q"), (k, "k"), (v, "k"))]
            return [cp.shard(dout, plan), cp.shard(dlse, plan, 1), *parts, sinks]

        def here(q: Any, k: Any, v: Any, sinks: Any, plan: cp.Plan = plan) -> Any:
            return cp.attn(q, k, v, plan, sinks=sinks, return_lse=True, **p.options)

        own, moved = parts(inputs), parts(along)
        found = results(here, own, moved)
        if p.sinks:
            dist.all_reduce(found[-1])
        tangents = [cp.shard(exact[0], plan), cp.shard(exact[1], plan, 1)]
        expected = [
            *tangents,
            *(x for x in parts([*exact[2:], *[None] * (not p.sinks)]) if x is not None),
        ]
        texts += differences(method, OF_BEYOND, found, expected, p)
    return texts


def beyond_sweep(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng([seed, dist.get_world_size(), 2])
    texts = []
    for n in range(count):
        texts += beyond(draw(rng, dist.get_world_size(), 80), 1000 * seed + n)
    return texts


# ---- mistakes that must be seen ---------------------------------------------------------------


def _changed(module: Any, name: str, change: Any) -> Any:
    return module, name, change(getattr(module, name))


def mutants() -> dict[str, tuple[Any, str, Any]]:
    """By name: where to put what in the place of a piece."""
    route, heads = exchange.Route, ulysses.Heads

    def no_return(real: Any) -> Any:
        def load_back(self: Any, g: Tensor, total: Tensor) -> Any:
            load = real(self, g, total)

            def land() -> Tensor:
                for rows in load.into:
                    rows.zero_()
                return load.land()

            return load._replace(land=land)

        return load_back

    def other_window(real: Any) -> Any:
        return lambda calls, meeting, keys, shift, window: real(
            calls, meeting, keys, shift + 1, window
        )

    def unweighted(real: Any) -> Any:
        return lambda out, lse, part, part_lse: (out + part, real(out, lse, part, part_lse)[1])

    def unordered(real: Any) -> Any:
        def load(self: Any, *given: Any) -> Any:
            load = real(self, *given)
            return load._replace(land=lambda: torch.cat([*load.into]))

        return load

    def other_heads(real: Any) -> Any:
        return lambda *sizes: (real(*sizes)[0], real(*sizes)[1][::-1])

    def no_sinks(real: Any) -> Any:
        return lambda dout, dlse, sinks, out, lse: torch.zeros_like(sinks)

    def twice(real: Any) -> Any:
        return lambda pieces, there, lengths, window: real(
            pieces, [[*runs, *runs[:1]] for runs in there], lengths, window
        )

    def whole_segment(real: Any) -> Any:
        return lambda *args: replace(real(*args), seqused_k=None)

    return {
        "gradients that do not come home": _changed(route, "load_back", no_return),
        "a window that is off by one": _changed(stages, "_place", other_window),
        "parts added without weights": _changed(attention, "merged", unweighted),
        "tokens in the order of ranks": _changed(heads, "load", unordered),
        "key heads of another rank": _changed(ulysses, "heads_of", other_heads),
        "sinks without a gradient": _changed(first_order, "gradient_of_sinks", no_sinks),
        "keys that are met twice": _changed(stages, "stage", twice),
        "keys behind those in use": _changed(plans, "work", whole_segment),
    }


def unseen(seed: int, count: int) -> list[str]:
    """Mistakes that none of ``count`` problems shows."""
    found = []
    for name, (module, attribute, mutant) in mutants().items():
        real = getattr(module, attribute)
        setattr(module, attribute, mutant)
        try:
            methods = METHODS[2:] if module in (ulysses, ulysses.Heads) else METHODS[:2]
            if not any(_shown(seed, n, methods) for n in range(count)):
                found.append(name)
        finally:
            setattr(module, attribute, real)
    return found


def _shown(seed: int, n: int, methods: tuple[str, ...]) -> bool:
    """Whether a rank finds the problem's results wrong."""
    seen = torch.tensor(len(sweep(100 * seed + n, 1, 50, methods)))
    dist.all_reduce(seen)
    return bool(seen)

"""Context parallelism in 16 bits, judged by one rank's own error, and its bits by a second run.

Exact are float64's results of the same rounded inputs. What the ranks' may differ from them by is
twice what one rank's do, and a rounding, as a share of the largest number.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rawattn.torch import context_parallel as cp
from rawattn.torch import varlen_attn
from rawattn.torch.context_parallel import exchange
from tests.shared.parallel import METHODS, NAMES, Problem, draw, inputs_of, offsets, plan_of, truth

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (96, 64))


def drawn(seed: int, head_dims: tuple[int, int]) -> Problem:
    """As in float64, of head dimensions that kernels are built for."""
    rng, made = np.random.default_rng([seed, dist.get_world_size(), 3]), {}
    made.update(vars(draw(rng, dist.get_world_size(), 700)), head_dims=head_dims)
    return Problem(**made)


def results(attend: Any, own: list[Tensor | None], cotangents: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv and dsinks."""
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in own]
    out, lse = attend(*leaves)
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), wanted, cotangents)]


def wrong(seed: int, device: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> list[str]:
    """What one problem shows on this rank."""
    p = drawn(seed, head_dims)
    rounded = [x if x is None else x.to(dtype) for x in inputs_of(p, seed)]
    rounded[1] = inputs_of(p, seed)[1]  # lse is float32, and so is its cotangent
    assert rounded[1] is not None
    rounded[1] = rounded[1].float()
    exact = truth(p, [x if x is None else x.double() for x in rounded])
    placed = [x if x is None else x.to(device) for x in rounded]
    dout, dlse, *primals = placed
    assert dout is not None and dlse is not None
    cu_q, cu_k = (
        torch.tensor(offsets(n), dtype=torch.int32, device=device)
        for n in (p.lengths_q, p.lengths_k)
    )

    def alone(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return varlen_attn(q, k, v, cu_q, cu_k, sinks=sinks, return_lse=True, **p.options)

    of_one, texts = results(alone, primals, (dout, dlse)), []
    for method in METHODS:
        plan = plan_of(p, method)

        def part(x: Tensor, n: int, plan: cp.Plan = plan) -> Tensor:
            """Of a result or an input, by its place in NAMES."""
            return x if n == 5 else cp.shard(x, plan, int(n == 1), of="k" if n in (3, 4) else "q")

        def together(q: Any, k: Any, v: Any, sinks: Any, plan: cp.Plan = plan) -> Any:
            return cp.attn(
                *(q, k, v, plan),
                sinks=sinks,
                return_lse=True,
                deterministic=True,
                **p.options,
            )

        own = [x if x is None else part(x, n + 2) for n, x in enumerate(primals)]
        found, again = (results(together, own, (part(dout, 0), part(dlse, 1))) for _ in range(2))
        for n, (name, x) in enumerate(zip(NAMES, found, strict=False)):
            if not torch.equal(x, again[n]):
                texts.append(f"{method} {name}: other bits in another run, {p}")
            if name == "dsinks":
                dist.all_reduce(x)
            texts += far(f"{method} {name}", x, part(of_one[n], n), part(exact[n], n), exact[n], p)
    return texts


def far(what: str, x: Tensor, one: Tensor, exact: Tensor, whole: Tensor, p: Problem) -> list[str]:
    if not x.numel():
        return []
    x, one = x.double().cpu(), one.double().cpu()
    size = float(whole.where(whole.isfinite(), 0.0).abs().max())
    error, of_one = (torch.where(y == exact, 0.0, (y - exact).abs()).max() for y in (x, one))
    rounding = torch.finfo(torch.bfloat16 if "lse" not in what else torch.float32).eps
    if error <= 2 * of_one + rounding * max(size, 1e-3):
        return []
    return [f"{what}: {error:.3g}, of one rank {of_one:.3g}, largest {size:.3g}, {p}"]


def sweep(seed: int, count: int, device: str) -> list[str]:
    texts = []
    for n in range(count):
        dtype, head_dims = DTYPES[n % len(DTYPES)], HEAD_DIMS[n % len(HEAD_DIMS)]
        texts += wrong(1000 * seed + n, device, dtype, head_dims)
    return texts


def by_nccl(seed: int, count: int, device: str) -> list[str]:
    """The same where no rank reaches another's memory."""
    real = exchange.peer_memory
    exchange.peer_memory = lambda *_: None
    try:
        return sweep(seed, count, device)
    finally:
        exchange.peer_memory = real

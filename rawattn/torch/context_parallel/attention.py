"""Attention of this rank's rows to keys that come from others, stage by stage.

In first order a stage's keys are on their way while the one before is computed, and go again for
the backward, so that no rank keeps what it does not own; rows that meet keys in several calls have
their results merged by lse in float32. What is beyond first order is composed of differentiable
pieces: the exchange, which is linear, ``varlen_attn``, which knows its own derivatives, and the
merge.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rawattn import api
from rawattn.torch.context_parallel.exchange import (
    Flight,
    Route,
    at_least_float32,
    exchange,
    nothing,
    on_device,
)
from rawattn.torch.context_parallel.stages import Call, Segment, Window
from rawattn.torch.varlen import varlen_attn

INF = float("inf")


@dataclass(frozen=True, eq=False)
class Work:
    """A call, with offsets on the device: rows of this rank beside the buffer of its stage."""

    rows: slice | Tensor
    window: Window
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """Its rows: a view where they lie together."""
        if isinstance(self.rows, slice):
            return x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)
        return x.index_select(dim, self.rows)

    def put(self, x: Tensor, part: Tensor, dim: int = 0) -> None:
        """``part`` in the place of its rows."""
        if isinstance(self.rows, slice):
            self.of(x, dim).copy_(part)
        else:
            x.index_copy_(dim, self.rows, part)


def work(call: Call, segments: list[Segment], device: torch.device) -> Work:
    """The call's offsets; a segment that it does not meet is a sequence without queries."""
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + segment.stop - segment.start)
    rows, used, cu_seqlens_q = [], [b - a for a, b in pairwise(starts)], [0]
    of_segment = {meeting.segment: meeting for meeting in call.meetings}
    for n, segment in enumerate(segments):
        count = 0
        if n in of_segment:
            meeting = of_segment[n]
            count = meeting.stop - meeting.start
            used[n] = meeting.end - segment.start
            rows.append((meeting.row, meeting.row + count))
        cu_seqlens_q.append(cu_seqlens_q[-1] + count)
    together = all(a[1] == b[0] for a, b in pairwise(rows))
    whole = all(n == b - a for n, (a, b) in zip(used, pairwise(starts), strict=True))
    return Work(
        slice(rows[0][0], rows[-1][1])
        if together
        else on_device(torch.cat([torch.arange(*run) for run in rows]), device),
        call.window,
        on_device(torch.tensor(cu_seqlens_q, dtype=torch.int32), device),
        on_device(torch.tensor(starts, dtype=torch.int32), device),
        None if whole else on_device(torch.tensor(used, dtype=torch.int32), device),
    )


@dataclass(frozen=True, eq=False)
class Job:
    """Stages of a mask, with how to compute. ``once``: every row with keys stands in one call.
    ``parts``: as many times keys come, each time of other heads."""

    stages: list[tuple[Route, list[Work]]]
    once: bool
    parts: int
    softmax_scale: float | None
    softcap: float | None
    deterministic: bool
    backend: str | None

    @property
    def options(self) -> dict[str, Any]:
        names = ("softmax_scale", "softcap", "backend")
        return {name: getattr(self, name) for name in names}


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    if any(x is not None and is_dual(x) for x in (q, k, v, sinks)):
        return composed(q, k, v, sinks, job)
    out, lse = Staged.apply(q, k, v, sinks, job)  # type: ignore[no-untyped-call]
    return out, lse


def is_dual(x: Tensor) -> bool:
    """Whether it carries a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


class There(NamedTuple):
    """Keys and values of a stage of some heads, that have come, with what is to be done."""

    works: list[Work]
    route: Route
    heads_q: slice
    heads_kv: slice
    k: Tensor
    v: Tensor


def fetched(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Iterator[There]:
    """By stage and part of the heads; what comes next is under way meanwhile."""

    def heads(x: Tensor, n: int) -> slice:
        size = x.shape[1] // job.parts
        return slice(n * size, (n + 1) * size)

    steps = [(*stage, n) for stage in job.stages for n in range(job.parts)]

    def begin(at: int) -> list[Flight]:
        if at == len(steps):
            return []
        route, _, n = steps[at]
        return [route.start(x[:, heads(x, n)]) for x in (k, v)]

    flights = begin(0)
    for at, (route, works, n) in enumerate(steps):
        k_there, v_there = (flight.land() for flight in flights)
        flights = begin(at + 1)
        yield There(works, route, heads(q, n), heads(k, n), k_there, v_there)


class Staged(torch.autograd.Function):
    """First order; its derivatives are those of ``composed``."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        wide = at_least_float32(q.dtype)
        shape = (*q.shape[:2], v.shape[2])
        out = q.new_zeros(shape, dtype=q.dtype if job.once else wide)
        lse = q.new_full((q.shape[1], q.shape[0]), -INF, dtype=wide)
        if sinks is not None:
            lse.copy_(sinks[:, None])
        for there in fetched(job, q, k, v):
            at = there.heads_q
            q_part, out_part, lse_part = q[:, at], out[:, at], lse[at]
            own_sinks = sinks[at] if sinks is not None and job.once else None
            for w in there.works:
                inside: dict[str, Any] = (
                    {"out": w.of(out_part)} if job.once and isinstance(w.rows, slice) else {}
                )
                made, made_lse = api.forward(
                    w.of(q_part),
                    there.k,
                    there.v,
                    w.cu_seqlens_q,
                    cu_seqlens_k=w.cu_seqlens_k,
                    seqused_k=w.seqused_k,
                    window=w.window,
                    sinks=own_sinks,
                    return_lse=True,
                    **job.options,
                    **inside,
                )
                if not job.once:
                    made, made_lse = merged(w.of(out_part), w.of(lse_part, 1), made, made_lse)
                if not inside:
                    w.put(out_part, made)
                w.put(lse_part, made_lse, 1)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.job = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled():  # somebody wants derivatives of this
            inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
            out, lse = composed(q, k, v, sinks, ctx.job)
            results = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse)]
            outputs, cotangents = zip(*results, strict=True)
            wanted = [x for x in inputs if x.requires_grad]
            grads = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True))
            found = [next(grads) if x is not None and x.requires_grad else None for x in inputs]
            return (*found, *[None] * (5 - len(found)))
        dq, dk, dv = gradients(dout, dlse, q, k, v, out, lse, ctx.job)
        dsinks = None if sinks is None else gradient_of_sinks(dout, dlse, sinks, out, lse)
        return dq, dk, dv, dsinks, None


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    job: Job,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; what comes of foreign keys is on its way home while the next are computed."""
    wide = at_least_float32(q.dtype)
    dq = torch.zeros_like(q, dtype=q.dtype if job.once else wide)
    sums = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
    home: list[tuple[Flight, Tensor]] = []
    for there in fetched(job, q, k, v):
        at = there.heads_q
        q_part, dq_part, out_part, dout_part = (x[:, at] for x in (q, dq, out, dout))
        lse_part, dlse_part = lse[at], None if dlse is None else dlse[at]
        made: list[Tensor] = []
        for w in there.works:
            inside: dict[str, Any] = (
                {"dq": w.of(dq_part)} if job.once and isinstance(w.rows, slice) else {}
            )
            made_dq, *own = api.backward(
                w.of(dout_part),
                w.of(q_part),
                there.k,
                there.v,
                w.of(out_part),
                w.of(lse_part, 1),
                w.cu_seqlens_q,
                cu_seqlens_k=w.cu_seqlens_k,
                seqused_k=w.seqused_k,
                window=w.window,
                dlse=None if dlse_part is None else w.of(dlse_part, 1),
                deterministic=job.deterministic,
                **job.options,
                **inside,
            )
            if not inside:
                w.put(dq_part, made_dq if job.once else w.of(dq_part) + made_dq)
            made = [a.to(wide) + b for a, b in zip(made, own, strict=True)] if made else own
        made = made or [torch.zeros_like(x) for x in (there.k, there.v)]
        landing = home
        home = [
            (there.route.start_back(x.to(k.dtype)), total[:, there.heads_kv])
            for x, total in zip(made, sums, strict=True)
        ]
        land(landing)
    land(home)
    dk, dv = (x.to(k.dtype) for x in sums)
    return dq.to(q.dtype), dk, dv


def land(flights: list[tuple[Flight, Tensor]]) -> None:
    for flight, total in flights:
        flight.land_back(total)


def gradient_of_sinks(
    dout: Tensor, dlse: Tensor | None, sinks: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """Minus the sum of exp(sink - L) D over this rank's rows."""
    delta = api.backward_preprocess(out, dout, dlse=dlse)
    p = torch.exp(sinks[:, None].to(lse.dtype) - dead_to(INF, lse))
    gradient: Tensor = -(p * delta).sum(1).to(sinks.dtype)
    return gradient


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' results with those beside other keys, ``part``, in float32."""
    both = torch.logaddexp(lse, part_lse)
    safe = dead_to(INF, both)
    a, b = (torch.exp(x - safe).t()[..., None] for x in (lse, part_lse))
    return out * a + part * b, both


def dead_to(value: float, lse: Tensor) -> Tensor:
    """lse, but ``value`` for rows without keys, where it is -inf."""
    return torch.where(lse == -INF, value, lse)


def composed(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
) -> tuple[Tensor, Tensor]:
    """The same of differentiable pieces, whatever they are asked for."""
    wide, rows = at_least_float32(q.dtype), q.shape[0]
    shape = (*q.shape[:2], v.shape[2])
    zeros = q.new_zeros(shape, dtype=wide)
    touched = [q, k, v]
    dead = q.new_full((q.shape[1], rows), -INF, dtype=wide)
    outs, lses = [zeros], [dead if sinks is None else sinks[:, None].to(wide).expand_as(dead)]
    for route, works in job.stages:
        k_there, v_there = exchange(k, route), exchange(v, route)
        touched += [k_there, v_there]
        for w in works:
            at = w.rows
            if isinstance(at, slice):
                at = torch.arange(at.start, at.stop, device=q.device)
            out, lse = varlen_attn(
                *(q.index_select(0, at), k_there, v_there, w.cu_seqlens_q, w.cu_seqlens_k),
                seqused_k=w.seqused_k,
                window=w.window,
                return_lse=True,
                deterministic=job.deterministic,
                **job.options,
            )
            outs.append(zeros.index_copy(0, at, out.to(wide)))
            lses.append(dead.index_copy(1, at, lse))
    L = torch.stack(lses)
    largest = dead_to(0.0, L.detach().amax(0))
    weights = torch.exp(L - largest)  # of a part without keys 0
    total = weights.sum(0)
    alive = total > 0
    total = torch.where(alive, total, 1.0)
    shares = (weights / total).transpose(1, 2)[..., None]
    whole = (torch.stack(outs) * shares).sum(0)
    lse = torch.where(alive, torch.log(total) + largest, -INF)
    # the same graph on every rank, whatever it computes
    whole, lse = (x + nothing(x.shape, x, *touched) for x in (whole.to(q.dtype), lse))
    return whole, lse

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

from rawattn import api
from rawattn.torch.context_parallel.exchange import (
    Flight,
    Route,
    exchange,
    flight,
    flights,
    nothing,
)
from rawattn.torch.context_parallel.first_order import INF, Options, dead_to
from rawattn.torch.context_parallel.rows import at_least_float32, on_device
from rawattn.torch.context_parallel.stages import Call, Segment, Window
from rawattn.torch.varlen import varlen_attn

AHEAD = 2  # flights at once, where not all are to be there: one lands, one follows


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
    """Stages of a mask, with how to compute. ``once``: every row with keys stands in one call;
    ``all_rows``: and every row has keys. ``pairs``: every key gets one gradient or two. ``parts``:
    as many times others' keys come, each time of other heads."""

    stages: list[tuple[Route, list[Work]]]
    all_rows: bool
    pairs: bool
    once: bool
    parts: int
    options: Options

    def computed(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
        wide = at_least_float32(q.dtype)
        shape = (*q.shape[:2], v.shape[2])
        blank = q.new_empty if self.all_rows else q.new_zeros
        out = blank(shape, dtype=q.dtype if self.once else wide)
        lse = q.new_full((q.shape[1], q.shape[0]), -INF, dtype=wide)
        if sinks is not None:
            lse.copy_(sinks[:, None])
        for there in fetched(self, q, k, v):
            at = there.heads_q
            q_part, out_part, lse_part = q[:, at], out[:, at], lse[at]
            own_sinks = sinks[at] if sinks is not None and self.once else None
            for w in there.works:
                inside: dict[str, Any] = (
                    {"out": w.of(out_part)} if self.once and isinstance(w.rows, slice) else {}
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
                    **self.options.named,
                    **inside,
                )
                if not self.once:
                    made, made_lse = merged(w.of(out_part), w.of(lse_part, 1), made, made_lse)
                if not inside:
                    w.put(out_part, made)
                w.put(lse_part, made_lse, 1)
        return out.to(q.dtype), lse

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; what comes of foreign keys is on its way home while the next are
        computed."""
        q, k, v, out, lse = saved
        wide = at_least_float32(q.dtype)
        blank = q.new_empty if self.all_rows else q.new_zeros
        dq = blank(q.shape, dtype=q.dtype if self.once else wide)
        sums = [
            x.new_empty(x.shape) if self.pairs else x.new_zeros(x.shape, dtype=wide) for x in (k, v)
        ]
        home: list[Flight] = []
        for there in fetched(self, q, k, v):
            at = there.heads_q
            q_part, dq_part, out_part, dout_part = (x[:, at] for x in (q, dq, out, dout))
            lse_part, dlse_part = lse[at], None if dlse is None else dlse[at]
            route, totals = there.route, [total[:, there.heads_kv] for total in sums]
            in_place = self.pairs and route.idle and route.all_here and len(there.works) == 1
            made: list[Tensor] = []
            for w in there.works:
                inside: dict[str, Any] = (
                    {"dq": w.of(dq_part)} if self.once and isinstance(w.rows, slice) else {}
                )
                if in_place:
                    of_keys = (route.kept.back.inside(total) for total in totals)
                    inside |= dict(zip(("dk", "dv"), of_keys, strict=True))
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
                    deterministic=self.options.deterministic,
                    **self.options.named,
                    **inside,
                )
                if "dq" not in inside:
                    w.put(dq_part, made_dq if self.once else w.of(dq_part) + made_dq)
                made = [a.to(wide) + b for a, b in zip(made, own, strict=True)] if made else own
            if in_place:
                continue
            made = made or [torch.zeros_like(x) for x in (there.k, there.v)]
            own = [x.to(k.dtype) for x in made]
            loads = [route.load_back(x, total) for x, total in zip(own, totals, strict=True)]
            if route.idle:
                for load in loads:
                    load.land()
                continue
            home.append(flight(loads, route.group))
            if not self.once and len(home) > AHEAD:
                home.pop(0).land()
        for under_way in home:
            under_way.land()
        dk, dv = (x.to(k.dtype) for x in sums)
        return dq.to(q.dtype), dk, dv

    def composed(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same of differentiable pieces, whatever they are asked for."""
        wide, rows = at_least_float32(q.dtype), q.shape[0]
        shape = (*q.shape[:2], v.shape[2])
        zeros = q.new_zeros(shape, dtype=wide)
        touched = [q, k, v]
        dead = q.new_full((q.shape[1], rows), -INF, dtype=wide)
        outs, lses = [zeros], [dead if sinks is None else sinks[:, None].to(wide).expand_as(dead)]
        for route, works in self.stages:
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
                    deterministic=self.options.deterministic,
                    **self.options.named,
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


class There(NamedTuple):
    """Keys and values of a stage of some heads, that have come, with what is to be done."""

    works: list[Work]
    route: Route
    heads_q: slice
    heads_kv: slice
    k: Tensor
    v: Tensor


def fetched(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Iterator[There]:
    """By stage and part of the heads; what comes next is under way meanwhile: all of it where it
    is to be there at once in any case, else ``AHEAD``."""

    def heads(x: Tensor, n: int, parts: int) -> slice:
        size = x.shape[1] // parts
        return slice(n * size, (n + 1) * size)

    steps = [
        (route, works, n, parts)
        for route, works in job.stages
        for parts in [1 if route.idle else job.parts]
        for n in range(parts)
    ]
    ahead = len(steps) if job.once else AHEAD
    under_way: list[Flight] = []
    for at, (route, works, *part) in enumerate(steps):
        fleet = [
            [to.load(x[:, heads(x, *its)]) for x in (k, v)]
            for to, _, *its in steps[len(under_way) : at + ahead]
        ]
        under_way += flights(fleet, route.group)
        k_there, v_there = under_way[at].land()
        yield There(works, route, heads(q, *part), heads(k, *part), k_there, v_there)


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' results with those beside other keys, ``part``, in float32."""
    both = torch.logaddexp(lse, part_lse)
    safe = dead_to(INF, both)
    a, b = (torch.exp(x - safe).t()[..., None] for x in (lse, part_lse))
    return out * a + part * b, both

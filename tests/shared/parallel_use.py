"""What each rank of a group does to try context parallelism in its surroundings: wrong calls, other
ranks that fail, meshes, sharded and compiled models, checkpoints, transformers.

A function here runs on every rank, and returns what the test then looks at.
"""

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from rawattn.torch import context_parallel as cp
from rawattn.torch import varlen_attn

LENGTHS = [0, 50, 50, 53, 120, 200]
HEADS, HEAD_DIM = 4, 8


def here(
    plan: cp.Plan, heads: tuple[int, int] = (4, 2), dtype: Any = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """q, k and v of this rank; on a GPU of what its kernels are built for."""
    made = torch.Generator().manual_seed(1)
    if device != "cpu":
        dtype = torch.bfloat16
    tokens, head_dim = plan.num_tokens(), 64 if device != "cpu" else HEAD_DIM
    count = (heads[0], heads[1], heads[1])
    drawn = (torch.randn(tokens, n, head_dim, generator=made) for n in count)
    return [x.to(device, dtype).requires_grad_() for x in drawn]


# ---- calls that are wrong on some rank --------------------------------------------------------


def _other_lengths(odd: bool) -> None:
    cp.plan([0, 7, 20] if odd else [0, 8, 20])


def _other_layout(odd: bool) -> None:
    cp.plan(LENGTHS, layout="zigzag" if odd else "contiguous")


def _falling(odd: bool) -> None:
    cp.plan([0, 9, 4] if odd else [0, 4, 9])


def _no_method(odd: bool) -> None:
    cp.plan(LENGTHS, method="rings")


def _no_offsets(odd: bool) -> None:
    cp.plan(torch.tensor(LENGTHS, device="meta") if odd else LENGTHS)


def _other_batch_of_keys(odd: bool) -> None:
    cp.plan([0, 4, 9], cu_seqlens_k=[0, 9])


def _no_part(odd: bool) -> None:
    cp.plan(LENGTHS, min_chunk=0)


def _two_dimensions(odd: bool) -> None:
    cp.plan(LENGTHS, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")))


def _uneven_heads(odd: bool) -> None:
    plan = cp.plan(LENGTHS, method="ulysses")
    cp.attn(*here(plan, heads=(3, 3)), plan)


def _tokens(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    q, k, v = here(plan)
    cp.attn(q[1:] if odd else q, k, v, plan)


def _dtype(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan, dtype=torch.float32 if odd else torch.float64), plan)


def _mask(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, causal=odd)


def _window(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, window=(-2, 3) if odd else (2, 3))


def _head_dim_where_one_has_no_work(odd: bool) -> None:
    plan = cp.plan([0, 1])
    x = torch.randn(plan.num_tokens(), 2, 0)
    cp.attn(x, x, x, plan)


def _sinks(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, sinks=torch.zeros(3 if odd else 4))


def _gradients(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    q, k, v = here(plan)
    cp.attn(q, k.detach() if odd else k, v, plan)


def _foreign(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, max_seqlen=9)


def _not_a_part(odd: bool) -> None:
    cp.shard(torch.zeros(7, 2), cp.plan(LENGTHS))


# By name: what to call, and what the error says on the odd rank and on the other one.
WRONG: dict[str, tuple[Callable[[bool], None], tuple[str, str]]] = {
    "other lengths": (_other_lengths, ("ranks disagree in plan", "ranks disagree in plan")),
    "another layout": (_other_layout, ("ranks disagree in plan", "zigzag")),
    "offsets that fall": (_falling, ("do not fall", "plan failed on another rank")),
    "no such method": (_no_method, ("expected one of auto", "expected one of auto")),
    "offsets on a device": (_no_offsets, ("on the host", "rank 1: ValueError: cu_seqlens is on")),
    "other sequences of keys": (_other_batch_of_keys, ("equally many", "equally many")),
    "chunks of nothing": (_no_part, ("min_chunk is 0", "min_chunk is 0")),
    "a mesh of two dimensions": (_two_dimensions, ("mesh['cp']", "mesh['cp']")),
    "uneven heads": (_uneven_heads, ("multiple of these", "multiple of these")),
    "tokens of another plan": (_tokens, ("context_parallel.shard", "attn failed on another rank")),
    "another dtype": (_dtype, ("ranks disagree in attn", "ranks disagree in attn")),
    "another mask": (_mask, ("ranks disagree in attn", "ranks disagree in attn")),
    "a window of -2": (_window, ("window", "attn failed on another rank")),
    "head_dim 0": (_head_dim_where_one_has_no_work, ("head size 0", "head size 0")),
    "sinks of other heads": (_sinks, ("sinks", "attn failed on another rank")),
    "a leaf without gradient": (_gradients, ("ranks disagree in attn", "ranks disagree in attn")),
    "an argument of others": (_foreign, ("leave it out", "leave it out")),
    "a tensor of another batch": (_not_a_part, ("expected the 200", "expected the 200")),
}


def wrong_calls() -> dict[str, str]:
    """What each raises on this rank; all of them return, and the group still works."""
    odd, heard = dist.get_rank() == 1, {}
    for name, (call, _) in WRONG.items():
        try:
            call(odd)
            heard[name] = "nothing"
        except (TypeError, ValueError, RuntimeError) as error:
            heard[name] = str(error)
        dist.barrier()
    return heard


def not_in_the_group() -> str:
    group = dist.new_group([0, 1])
    try:
        cp.plan(LENGTHS, group)
    except ValueError as error:
        return str(error)
    return ""


# ---- ranks that fail --------------------------------------------------------------------------


def step(plan: cp.Plan, device: str = "cpu") -> None:
    q, k, v = here(plan, device=device)
    out = cp.attn(q, k, v, plan, causal=True)
    assert isinstance(out, Tensor)
    out.square().sum().backward()


class Gone:
    """In the place of an exchange: at its third call the process ends without a word."""

    def __init__(self) -> None:
        self.calls, self.real = 0, dist.all_to_all_single

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            os._exit(1)
        return self.real(*args, **named)


def failing(method: str, how: str, device: str = "cpu") -> float:
    """The last rank does what ``how`` says in the second step; seconds of the others' wait."""
    plan = cp.plan(LENGTHS, layout="zigzag", method=method, min_chunk=4)
    step(plan, device)
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "killed":
            dist.all_to_all_single = Gone()
        elif how == "raising":
            raise ArithmeticError("on this rank alone")
        else:
            time.sleep(3 * float(how))
            return 0.0
    began = time.monotonic()
    try:
        step(plan, device)
    except RuntimeError:
        return time.monotonic() - began
    return -1.0


def without_waiting() -> list[str]:
    """Which method's second step waits for the device."""
    found = []
    for method in ("gather", "ring", "ulysses"):
        plan = cp.plan(LENGTHS, layout="zigzag", method=method, min_chunk=4)
        q, k, v = here(plan, device="cuda")
        for waits in ("default", "error"):
            torch.cuda.set_sync_debug_mode(waits)
            try:
                out = cp.attn(q, k, v, plan, causal=True)
                assert isinstance(out, Tensor)
                torch.autograd.grad(out, (q, k, v), out)
            except RuntimeError as error:
                found.append(f"{method}: {error}")
            torch.cuda.set_sync_debug_mode("default")
    return found


# ---- what it stands in ------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with a projection before and one after."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, HEAD_DIM).unbind(1)
        return x + self.project(attend(q, k, v).flatten(1))


class Layers(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, attend, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = block(x, attend)
        return x


def batch(row: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(row)
    return torch.randn(LENGTHS[-1], HEADS * HEAD_DIM, generator=made, dtype=torch.float64)


def alone(rows: int = 1) -> dict[str, Tensor]:
    """Gradients of the parameters in one process: the mean over all tokens of all batches."""
    model, offsets = Layers(), torch.tensor(LENGTHS, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, offsets, causal=True)
        assert isinstance(out, Tensor)
        return out

    for row in range(rows):
        (model(batch(row), attend).square().mean() / rows).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def attend_by(plan: cp.Plan) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = cp.attn(q, k, v, plan, causal=True)
        assert isinstance(out, Tensor)
        return out

    return attend


def loss_of(model: Callable[..., Tensor], plan: cp.Plan, row: int = 0) -> Tensor:
    """This rank's part of the mean over the whole batch."""
    out = model(cp.shard(batch(row), plan), attend_by(plan))
    return out.square().sum() / (LENGTHS[-1] * out.shape[1])


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, over the size of what is wanted."""
    assert found.keys() == wanted.keys()
    size = max(float(x.abs().max()) for x in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / size


def summed(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        found[name] = p.grad
    return found


def in_models() -> dict[str, float]:
    """How far the parameters' gradients are from those of one process, by surroundings."""
    found, wanted = {}, alone()
    for method in ("gather", "ring", "ulysses"):
        plan = cp.plan(LENGTHS, layout="zigzag", method=method, min_chunk=4)
        for checkpointed in (False, True):
            model = Layers(checkpointed)
            loss_of(model, plan).backward()
            found[f"{method}, checkpointed {checkpointed}"] = worst(summed(model), wanted)
        model = Layers()
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled, plan).backward()
        found[f"{method}, compiled"] = worst(summed(model), wanted)
    return found


def on_a_mesh() -> dict[str, float]:
    """Two batches, each split over two ranks; weights split over all four, or over two."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found, wanted = {}, alone(rows=2)
    for sharded_over in ("all", "dp"):
        plan = cp.plan(LENGTHS, mesh["cp"], layout="zigzag", min_chunk=4)
        model = Layers()
        over = mesh["dp", "cp"]._flatten() if sharded_over == "all" else mesh["dp"]
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        # FSDP takes the mean over its ranks, of losses that are parts of a sum over "cp"
        loss = loss_of(model, plan, mesh.get_local_rank("dp"))
        (loss * (2 if sharded_over == "all" else 1)).backward()
        grads = {}
        for name, p in model.named_parameters():
            whole = p.grad.full_tensor()  # type: ignore[union-attr]
            if sharded_over == "dp":
                dist.all_reduce(whole, group=mesh["cp"].get_group())
            grads[name] = whole
        found[sharded_over] = worst(grads, wanted)
    return found


def in_transformers(names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Logits and gradients of the parameters of tiny models, beside each document alone."""
    from rawattn.torch import hugging_face
    from tests.shared import tiny_models

    hugging_face.register_with_transformers()
    given = tiny_models.packed()
    lengths = [0, *torch.tensor(tiny_models.LENGTHS).cumsum(0).tolist()]
    found = {}
    for name in names:
        wanted, of_parameters = tiny_models.expected(name)
        plan = cp.plan(lengths, layout="zigzag", min_chunk=2)
        model = tiny_models.MODELS[name].build(hugging_face.NAME)
        model.gradient_checkpointing_enable()
        model.train()
        logits = model(
            input_ids=cp.shard(given["input_ids"], plan, dim=1),
            position_ids=plan.position_ids[None],
            context_parallel=plan,
            use_cache=False,
        ).logits[0]
        apart = tiny_models.apart(cp.unshard(logits, plan), wanted)
        made = torch.Generator().manual_seed(2)
        weights = torch.randn(wanted.shape, generator=made)
        (logits * cp.shard(weights, plan)).sum().backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = summed(model)
        found[name] = apart, max(tiny_models.all_apart(grads, of_parameters).values())
    return found


def refused_in_transformers() -> list[str]:
    """What a plan does not go with."""
    from rawattn.torch import hugging_face

    hugging_face.register_with_transformers()
    plan, x = cp.plan([0, 9, 20]), torch.zeros(1, 4, 10, 8)
    texts = []
    for q, mask in ((x.expand(2, -1, -1, -1), None), (x, torch.ones(1, 10, dtype=torch.bool))):
        try:
            hugging_face.attend(nn.Module(), q, q, q, mask, context_parallel=plan)
        except ValueError as error:
            texts.append(str(error))
    return texts


def whole_again() -> list[bool]:
    """unshard of shard is the tensor; the gradient of unshard is the sum over ranks."""
    found = []
    for layout in ("contiguous", "zigzag"):
        plan = cp.plan(LENGTHS, layout=layout, min_chunk=4)
        x = torch.arange(400.0, dtype=torch.float64).view(2, 200)
        own = cp.shard(x, plan, 1).clone().requires_grad_()
        whole = cp.unshard(own, plan, 1)
        (whole * (dist.get_rank() + 1)).sum().backward()
        ranks = dist.get_world_size()
        assert own.grad is not None
        found += [torch.equal(whole, x), bool((own.grad == ranks * (ranks + 1) / 2).all())]
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(LENGTHS)])
        found.append(torch.equal(plan.position_ids, cp.shard(positions, plan)))
        begins = F.pad(plan.position_ids.diff() != 1, (1, 0), value=True).nonzero()[:, 0]
        found.append(set(begins.tolist()) <= {*plan.cu_seqlens})
    return found


def bytes_that_come() -> tuple[dict[str, int], dict[str, int]]:
    """Of a forward and a backward by each method, to the rank that gets most: counted, estimated.

    float64 statistics, one number a head beside head_dim of them, are not in the estimate.
    """
    real, count, counted, estimated = dist.all_to_all_single, [0], {}, {}

    def counting(there: Tensor, x: Tensor, received: list[int], *more: Any, **named: Any) -> Any:
        own = received[dist.get_rank()]
        if there.dim() == 2 and there.shape[1] > 2 * 8 * HEADS:  # not lse
            count[0] += (sum(received) - own) * there.shape[1]
        return real(there, x, received, *more, **named)

    heads = 2 * HEADS * dist.get_world_size()
    dist.all_to_all_single = counting
    for method in ("gather", "ring", "ulysses"):
        plan = cp.plan(LENGTHS, layout="zigzag", method=method, min_chunk=4)
        q, k, v = here(plan, heads=(heads, heads // 2))
        count[0] = 0
        out = cp.attn(q, k, v, plan, causal=True)
        assert isinstance(out, Tensor)
        out.sum().backward()
        most = torch.tensor(count[0])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        counted[method] = int(most)
        found = plan.estimate(heads, heads // 2, HEAD_DIM, causal=True, itemsize=8)
        estimated[method] = found[method].received
    dist.all_to_all_single = real
    return counted, estimated


def snippet(code: str) -> list[int]:
    """Sizes that a page's code leaves behind, run on this rank."""
    left: dict[str, Any] = {}
    exec(code, left)
    return [len(left["tokens"]), len(left["whole"]), *left["q"].grad.shape]

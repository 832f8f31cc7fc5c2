"""What each rank of a group does to try context parallelism in its surroundings: meshes, sharded
and compiled models, checkpoints, transformers.

A function here runs on every rank, and returns what the test then looks at.
"""

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
from rawattn.torch.context_parallel import exchange

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
        (logits * cp.shard(tiny_models.cotangents(wanted), plan)).sum().backward()
        grads = tiny_models.of_parameters(model)
        for grad in grads.values():
            dist.all_reduce(grad)
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
    real, count, counted, estimated = exchange.send, [0], {}, {}

    def counting(loads: Any, group: Any) -> Any:
        for load in loads:
            foreign = [x for r, x in enumerate(load.into) if r != dist.get_rank()]
            if load.into[0].dim() == 3:  # not lse
                count[0] += sum(x.numel() * x.element_size() for x in foreign)
        return real(loads, group)

    heads = 2 * HEADS * dist.get_world_size()
    exchange.send = counting
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
    exchange.send = real
    return counted, estimated


def snippet(code: str) -> list[int]:
    """Sizes that a page's code leaves behind, run on this rank."""
    left: dict[str, Any] = {}
    exec(code, left)
    return [len(left["tokens"]), len(left["whole"]), *left["q"].grad.shape]

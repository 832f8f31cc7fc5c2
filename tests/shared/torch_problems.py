"""What the torch tests share: a small crooked problem, masks, and dense attention made of torch."""

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import varlen_attn  # noqa: E402
from rawattn.torch import varlen_ops as torch_ops  # noqa: E402

LENGTHS = ((3, 0, 4, 1), (5, 2, 3, 0))  # unequal, a sequence without keys, one without queries
WIDTHS = {"heads": 4, "heads_kv": 2, "dim": 8, "dim_v": 16}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (1, 2), "softmax_scale": 0.3},
    "causal_window": {"causal": True, "window": (2, -1)},
}

# Of gradcheck and gradgradcheck: in a random direction at a time, which a wrong entry spoils; and
# since that one is a share of a sum, within far less than the default.
FAST: dict[str, Any] = {"fast_mode": True, "atol": 1e-7, "rtol": 1e-5}


def count_calls(monkeypatch):
    """The calls of rawattn's own functions by the adapter: name to arguments and keywords."""
    seen: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def counted(name, function, *args, **keywords):
        seen[name].append((args, keywords))
        return function(*args, **keywords)

    for module, names in (
        (torch_ops.api, ("forward", "backward")),
        (torch_ops.api_second, ("double_backward", "jvp")),
    ):
        for name in names:
            seen[name] = []
            monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    return seen


def offsets(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tensors(
    lengths_q=LENGTHS[0], lengths_k=None, dtype=torch.float64, grad=True, spare=1, seed=7, **widths
):
    """q, k, v with ``spare`` rows past the last sequence, and the two offsets."""
    w = {**WIDTHS, **widths}
    lengths_k = lengths_q if lengths_k is None else lengths_k
    generator = torch.Generator().manual_seed(seed)
    rows_q, rows_k = sum(lengths_q) + spare, sum(lengths_k) + spare
    shapes = (
        (rows_q, w["heads"], w["dim"]),
        (rows_k, w["heads_kv"], w["dim"]),
        (rows_k, w["heads_kv"], w["dim_v"]),
    )
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    qkv = [draw(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    return *qkv, offsets(lengths_q), offsets(lengths_k)


def allowed(rows, keys, *, causal=False, window=(-1, -1)):
    """Boolean (rows, keys): which query may see which key, aligned at their ends."""
    left, right = window[0], 0 if causal else window[1]
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask &= (distance >= -left) if left >= 0 else mask
    mask &= (distance <= right) if right >= 0 else mask
    return mask


def dense_attention(q, k, v, lengths_q, lengths_k, *, softmax_scale=None, **mask):
    """(out, lse) by products of whole matrices, which torch differentiates as often as asked."""
    outs, lses, row, key = [], [], 0, 0
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for rows, keys in zip(lengths_q, lengths_k, strict=True):
        queries = q[row : row + rows].transpose(0, 1)
        group = q.shape[1] // k.shape[1]
        shared = (x[key : key + keys].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        K, V = shared
        seen = allowed(rows, keys, **mask)
        alive = seen.any(1)
        P = torch.where(seen, (scale * queries @ K.transpose(1, 2)).exp(), 0)
        total = torch.where(alive, P.sum(-1), 1)
        outs.append((P / total[..., None] @ V).transpose(0, 1))
        lses.append(torch.where(alive, total.log(), -torch.inf))
        row, key = row + rows, key + keys
    spare = q.shape[0] - row
    outs.append(q.new_zeros(spare, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], spare), -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def finite(lse):
    return torch.where(torch.isfinite(lse), lse, 0)


class Problem:
    """q, k and v, a direction for each, weights of a loss, and the attention by both."""

    def __init__(self, mask="causal", lengths_k=LENGTHS[1], lengths_q=LENGTHS[0], **widths):
        options = MASKS[mask]
        *self.qkv, cu_q, cu_k = tensors(lengths_q, lengths_k, grad=False, **widths)
        *self.direction, _, _ = tensors(lengths_q, lengths_k, grad=False, seed=8, **widths)
        self.ours = partial(attention, cu_q=cu_q, cu_k=cu_k, **options)
        self.dense = partial(dense_attention, lengths_q=lengths_q, lengths_k=lengths_k, **options)
        rows, heads, _ = self.qkv[0].shape
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        self.dout, self.dlse = draw(rows, heads, self.qkv[2].shape[2]), draw(heads, rows)

    def loss_of(self, attend):
        """A loss of out and lse whose own second derivative is not zero."""

        def loss(*qkv):
            out, lse = attend(*qkv)
            return (out * self.dout).sin().sum() + (finite(lse) * self.dlse).sin().sum()

        return loss

    def hvp_of(self, attend):
        """The product of the Hessian of that loss with the direction, by two backwards."""
        inputs = leaves(self.qkv)
        grads = torch.autograd.grad(self.loss_of(attend)(*inputs), inputs, create_graph=True)
        return torch.autograd.grad(inner(grads, self.direction), inputs)

    def both(self, function):
        return function(self.ours), function(self.dense)


def attention(q, k, v, cu_q, cu_k, **options):
    return varlen_attn(q, k, v, cu_q, cu_k, return_lse=True, **options)


def leaves(values):
    return [x.detach().clone().requires_grad_() for x in values]


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def agree(got, want, **tolerance):
    """Nested tuples of tensors agree, and are not trivially zero."""
    if isinstance(want, torch.Tensor):
        assert not want.requires_grad or got.requires_grad
        assert bool(want[want.isfinite()].any())
        torch.testing.assert_close(got, want, **tolerance)
        return
    for one, other in zip(got, want, strict=True):
        agree(one, other, **tolerance)

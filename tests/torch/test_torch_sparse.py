"""rawattn.torch.sparse_attn on the CPU: values, derivatives of every kind, torch's subsystems.

The truth is torch's own differentiation of dense masked attention in float64. What does not depend
on what the operators compute is tested with those of varlen_attn, whose derivatives are the same
code. Long by the number of subsystems.
"""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rawattn  # noqa: E402
from rawattn.torch import sparse_attn, varlen_attn  # noqa: E402
from rawattn.torch import sparse_ops as torch_sparse_ops  # noqa: E402
from tests.shared.torch_problems import FAST, agree, finite, inner, leaves, offsets  # noqa: E402
from tests.shared.torch_sparse_problems import BLOCK, CROSS, MASKS, SELF, SMALL, Problem  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("sparse_forward", "sparse_backward", "sparse_double_backward", "sparse_jvp")


@pytest.fixture
def calls(monkeypatch):
    """The calls of rawattn's own functions by the operators: name to arguments and keywords."""
    seen = {name: [] for name in NAMES}

    def counted(name, function, *args, **keywords):
        seen[name].append((args, keywords))
        return function(*args, **keywords)

    for name in NAMES:
        function = getattr(torch_sparse_ops.api_sparse, name)
        monkeypatch.setattr(torch_sparse_ops.api_sparse, name, partial(counted, name, function))
    return seen


PROBLEMS = pytest.mark.parametrize(
    "problem",
    [
        *(
            pytest.param({"mask": mask, "lengths": lengths}, id=f"{mask}-{name}")
            for mask in MASKS
            for name, lengths in (("self", SELF), ("cross", CROSS))
        ),
        pytest.param({"heads": (4, 2, 4)}, id="heads_of_q"),
        pytest.param({"heads": (2, 2, 2), "lengths": CROSS}, id="group_1"),
        pytest.param({"counted": True, "mask": "no_own"}, id="counts"),
        pytest.param({"gated": False}, id="no_gate"),
        pytest.param({"gated": False, "counted": True, "heads": (6, 2, 6)}, id="no_gate_counts"),
    ],
)
FEW = pytest.mark.parametrize(
    "problem",
    [{}, {"gated": False, "lengths": CROSS}, {"mask": "open", "counted": True}],
    ids=["plain", "no_gate_cross", "open_counts"],
)


# ---- values and gradients ---------------------------------------------------------------------


@PROBLEMS
def test_values_and_gradients_are_those_of_dense_attention(problem):
    problem = Problem(**problem)
    inputs = leaves(problem.inputs)
    results, wanted = problem.ours(*inputs), problem.dense(*inputs)
    agree([x.detach() for x in results], [x.detach() for x in wanted])
    assert all(x.is_contiguous() for x in results)
    cotangents = (problem.dout, problem.dlse)
    of_ours, of_dense = (
        torch.autograd.grad((out, finite(lse)), inputs, cotangents)
        for out, lse in (results, wanted)
    )
    agree(of_ours, of_dense)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_a_loss_of_one_result_alone(used):
    problem = Problem()

    def grads(attend):
        inputs = leaves(problem.inputs)
        out, lse = attend(*inputs)
        loss = out.sin().sum() if used == "out" else finite(lse).sin().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        total = inner(first, problem.direction)
        return (*first, *torch.autograd.grad(total, inputs, materialize_grads=True))

    for got, want in zip(*problem.both(grads), strict=True):
        torch.testing.assert_close(got, want)


def test_a_gate_of_1_changes_nothing_and_has_the_gradient_of_a_straight_through_one():
    problem = Problem(gated=False)
    inputs = leaves(problem.inputs)
    score = torch.rand(problem.block_indices.shape, dtype=torch.float64, requires_grad=True)
    gate = score + (1 - score).detach()
    out, _ = problem.ours(*inputs, gate)
    assert torch.equal(out, problem.ours(*inputs)[0])
    (of_score,) = torch.autograd.grad((out * problem.dout).sum(), score)
    ones = torch.ones_like(gate).requires_grad_()
    (want,) = torch.autograd.grad((problem.dense(*inputs, ones)[0] * problem.dout).sum(), ones)
    agree(of_score, want)


def test_slots_that_do_not_count_have_gradient_0():
    problem = Problem(lengths=((33,), (33,)), heads=(2, 1, 1), selected=5)
    inputs, indices = leaves(problem.inputs), problem.block_indices
    out, lse = problem.ours(*inputs)
    (grad,) = torch.autograd.grad(out.square().sum() + finite(lse).square().sum(), inputs[3])
    for token in range(33):
        named, seen = indices[token, 0].tolist(), set()
        for slot, block in enumerate(named):
            counts = 0 <= block * BLOCK <= token and block not in seen
            assert bool(grad[token, 0, slot]) == counts
            seen.add(block)


@pytest.mark.parametrize("of_gate", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gate_may_have_any_dtype(dtype, of_gate):
    problem = Problem()
    *qkv, gate = problem.inputs
    inputs = [*(x.to(dtype).requires_grad_() for x in qkv), gate.to(of_gate).requires_grad_()]
    out, lse = problem.ours(*inputs)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert [g.dtype for g in grads] == [dtype, dtype, dtype, of_gate]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    agree(grads[3].double(), torch.autograd.grad(problem.dense(*wide)[0].sum(), wide)[3],
          rtol=0.1, atol=0.1)  # fmt: skip


def test_int64_indices_are_saved_as_int32():
    problem = Problem()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = problem.ours(*leaves(problem.inputs))
        wide = problem.ours(*leaves(problem.inputs))
        problem.given = (problem.given[0], problem.block_indices.long())
        again = problem.ours(*leaves(problem.inputs))
    assert torch.equal(out, again[0]) and torch.equal(lse, wide[1])
    assert {x.dtype for x in saved} == {torch.float64, torch.int32}


@pytest.mark.parametrize("value", [2**32, -(2**32) + 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_an_index_that_is_no_int32_is_padding(value):
    problem = Problem()
    narrow = problem.block_indices.clone()
    narrow[::3, :, 0] = -1
    results = []
    for indices in (narrow, narrow.long().where(narrow != -1, value)):
        problem.given = (problem.given[0], indices)
        inputs = leaves(problem.inputs)
        out, lse = problem.ours(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, (problem.dout, problem.dlse))
        results.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_without_keys_are_zero_with_zero_gradients_of_both_orders():
    problem = Problem("no_own", CROSS, selected=1)
    _, lse = problem.dense(*problem.inputs)
    dead = (lse == -torch.inf).all(0)
    assert dead[:-1].any() and not dead.all()
    inputs, cotangents = leaves(problem.inputs), leaves((problem.dout, problem.dlse))
    out, lse = problem.ours(*inputs)
    assert not out[dead].any() and (lse[:, dead] == -torch.inf).all()
    grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
    second = torch.autograd.grad(grads, (*inputs, *cotangents), problem.direction)
    for x in (grads[0], grads[3], second[0], second[3], second[4]):
        assert not x[dead].any() and x.isfinite().all() and x.any()


# ---- second order and forward mode ------------------------------------------------------------


@PROBLEMS
def test_second_derivatives_are_those_of_dense_attention(problem):
    """Gradients of all gradients with respect to all inputs and the cotangents dout and dlse."""
    problem = Problem(**problem)

    def second(attend):
        inputs, cotangents = leaves(problem.inputs), leaves((problem.dout, problem.dlse))
        out, lse = attend(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
        return torch.autograd.grad(grads, (*inputs, *cotangents), problem.direction)

    agree(*problem.both(second))


@PROBLEMS
def test_jvp_is_that_of_dense_attention(problem):
    problem = Problem(**problem)
    agree(*problem.both(lambda f: func.jvp(f, (*problem.inputs,), (*problem.direction,))))


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_only_the_directions_that_there_are_are_passed(calls, given):
    problem = Problem()

    def second(attend):
        inputs = leaves(problem.inputs)
        grads = torch.autograd.grad(problem.loss_of(attend)(*inputs), inputs, create_graph=True)
        chosen = [(grads[i] * problem.direction[i]).sum() for i in given]
        return torch.autograd.grad(sum(chosen), inputs, materialize_grads=True)

    def tangents(attend):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x, t) if i in given else x
                for i, (x, t) in enumerate(zip(problem.inputs, problem.direction, strict=True))
            ]
            return [tuple(forward_ad.unpack_dual(x)) for x in attend(*duals)]

    agree(*problem.both(second))
    for got, want in zip(*problem.both(tangents), strict=True):  # lse has no tangent of v's alone
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], torch.zeros_like(got[1]) if want[1] is None else want[1])
    wanted = [i in given for i in range(4)]
    ((args, keywords),) = calls["sparse_double_backward"]
    assert [x is not None for x in (*args[:3], keywords["ddblock_scale"])] == wanted
    ((args, keywords),) = calls["sparse_jvp"]
    assert [x is not None for x in (*args[3:6], keywords["tblock_scale"])] == wanted


@FEW
def test_hessian_vector_products_by_every_route(problem):
    problem = Problem(**problem)
    inputs, direction = (*problem.inputs,), (*problem.direction,)
    every, loss = tuple(range(len(inputs))), problem.loss_of(problem.ours)
    gradient = func.grad(loss, every)
    routes = (
        problem.hvp_of(problem.ours),
        func.jvp(gradient, inputs, direction)[1],
        func.grad(lambda *x: func.jvp(loss, x, direction)[1], every)(*inputs),
        func.grad(lambda *x: inner(gradient(*x), direction), every)(*inputs),
        torch.autograd.functional.hvp(loss, inputs, direction)[1],
    )
    want = problem.hvp_of(problem.dense)
    for got in routes:
        agree(got, want)


@FEW
def test_gradients_of_a_jvp(problem):
    problem = Problem(**problem)
    inputs = len(problem.inputs)

    def grads(attend):
        every = leaves((*problem.inputs, *problem.direction))
        (out, lse), (tout, tlse) = func.jvp(attend, (*every[:inputs],), (*every[inputs:],))
        of_values = (out * problem.dout).sin().sum() + (finite(lse) * problem.dlse).sin().sum()
        of_tangents = (tout * problem.dout).cos().sum() + (tlse * problem.dlse).sin().sum()
        return torch.autograd.grad(of_values + of_tangents, every)

    agree(*problem.both(grads))


@FEW
def test_second_derivatives_may_be_differentiated_in_their_direction(problem):
    problem = Problem(**problem)

    def third(attend):
        inputs, cotangents = leaves(problem.inputs), leaves((problem.dout, problem.dlse))
        direction = leaves(problem.direction)
        out, lse = attend(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
        wanted = (*inputs, *cotangents)
        second = torch.autograd.grad(grads, wanted, direction, create_graph=True)
        return torch.autograd.grad(second, direction, [x.sin() for x in wanted])

    agree(*problem.both(third))


@pytest.mark.parametrize("mask", ["plain", "open_no_own"])
def test_gradcheck_and_gradgradcheck(mask):
    problem = Problem(mask, SMALL, heads=(2, 1, 1), selected=2)
    *qkv, gate = leaves(problem.inputs)

    def function(*inputs):
        out, lse = problem.ours(*inputs)
        return out, finite(lse)

    inputs = (*qkv, gate)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, **FAST)
    assert torch.autograd.gradgradcheck(
        function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, **FAST
    )


def test_third_derivatives_and_a_jvp_of_a_jvp_are_refused_by_name():
    problem = Problem()
    inputs = leaves(problem.inputs)
    grads = torch.autograd.grad(problem.loss_of(problem.ours)(*inputs), inputs, create_graph=True)
    second = torch.autograd.grad(inner(grads, problem.direction), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative of sparse_attn"):
        torch.autograd.grad(inner(second, problem.direction), inputs)
    inputs, direction = (*problem.inputs,), (*problem.direction,)
    with pytest.raises(RuntimeError, match="does not exist for sparse_attn"):
        func.jvp(lambda *x: func.jvp(problem.ours, x, direction)[1], inputs, direction)
    with pytest.raises(RuntimeError, match="vmap does not exist for sparse_attn"):
        torch.vmap(lambda q: problem.ours(q, *inputs[1:]))(inputs[0][None])


def test_training_calls_nothing_of_second_order(calls):
    problem = Problem()
    problem.loss_of(problem.ours)(*leaves(problem.inputs)).backward()
    problem.ours(*problem.inputs)
    assert [len(calls[name]) for name in NAMES] == [2, 1, 0, 0]


# ---- tables -----------------------------------------------------------------------------------


def table_of(problem, block_indices=None, **source):
    options = {
        name: problem.options[name]
        for name in ("cu_seqlens_k", "block_size", "include_own_block", "causal")
        if name in problem.options
    }
    q, k, *_ = problem.inputs
    options |= {"num_heads_kv": k.shape[1], "total_k": k.shape[0]} | source
    table, cu_seqlens = rawattn.BlockTable, problem.given[0]
    if block_indices is not None:
        return table.of_indices(block_indices, cu_seqlens, **options)
    if "block_mask" in options:
        return table.of_mask(cu_seqlens=cu_seqlens, **options)
    return table.of_pattern(cu_seqlens, total_q=q.shape[0], **options)


@pytest.mark.parametrize("lengths", [SELF, CROSS], ids=["self", "cross"])
def test_a_table_of_the_same_selection_gives_the_same_to_every_order(lengths):
    problem = Problem(lengths=lengths)
    results = []
    for given in (problem.block_indices, table_of(problem, problem.block_indices)):
        problem.given = (problem.given[0], given)
        inputs = leaves(problem.inputs)
        loss = problem.loss_of(problem.ours)
        grads = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
        second = torch.autograd.grad(inner(grads, problem.direction), inputs)
        tangents = func.jvp(problem.ours, (*problem.inputs,), (*problem.direction,))
        results.append([*problem.ours(*problem.inputs), *grads, *second, *tangents[1]])
    agree([x.detach() for x in results[1]], [x.detach() for x in results[0]], rtol=0, atol=0)


def test_a_pattern_and_a_mask_have_gradients_too():
    problem = Problem(gated=False)
    rows = problem.inputs[0].shape[0]
    position = torch.cat([torch.arange(n) for n in (*SELF[0], 1)])
    own = (position // BLOCK)[:, None, None]
    mask = (own - torch.arange(3)).abs() <= 1  # blocks ahead are not causal, and do not count
    mask |= torch.arange(3) == 0
    indices = torch.where(mask, torch.arange(3), -1).expand(rows, 2, 3)
    grads = []
    for given in (
        indices.contiguous(),
        table_of(problem, block_mask=mask.expand(rows, 2, 3).contiguous()),
        table_of(problem, sliding_blocks=2, global_blocks=1),
    ):
        problem.given = (problem.given[0], given)
        inputs = leaves(problem.inputs)
        grads.append(torch.autograd.grad(problem.loss_of(problem.ours)(*inputs), inputs))
    agree(grads[1], grads[0])
    agree(grads[2], grads[0])


def test_a_table_in_compiled_code():
    torch._dynamo.reset()
    problem = Problem()
    table = table_of(problem, problem.block_indices)
    problem.given = (problem.given[0], table)
    compiled = torch.compile(problem.ours, backend="aot_eager", fullgraph=True)
    inputs = leaves(problem.inputs)
    got = torch.autograd.grad(problem.loss_of(compiled)(*inputs), inputs)
    agree(got, torch.autograd.grad(problem.loss_of(problem.dense)(*inputs), inputs))


def test_a_table_of_another_kind_is_refused():
    problem = Problem()
    problem.given = (problem.given[0], table_of(problem, problem.block_indices))
    for options in (
        {"block_size": 32},
        {"causal": False},
        {"include_own_block": False},
        {"block_counts": torch.zeros(problem.block_indices.shape[:2])},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            problem.ours(*problem.inputs, **options)


# ---- the sliding branch -----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "sides"),
    [(None, (BLOCK - 1, 0)), (3, (3, 0)), ((2, 1), (2, 1)), ((-1, -1), (-1, -1))],
)
def test_sliding_is_dense_attention_within_the_window(window, sides, causal):
    problem = Problem("plain" if causal else "open", CROSS)
    inputs = leaves(problem.inputs)
    results = problem.ours(*inputs, return_sliding=True, window=window)
    cu_q, cu_k = map(offsets, CROSS)
    dense = varlen_attn(*inputs[:3], cu_q, cu_k, causal=causal, window=sides, return_lse=True)
    want = (*problem.dense(*inputs), *dense)
    assert len(results) == 4
    agree([x.detach() for x in results], [x.detach() for x in want])
    outs = problem.ours(*inputs, return_sliding=True, window=window, return_lse=False)
    assert len(outs) == 2 and torch.equal(outs[0], results[0]) and torch.equal(outs[1], results[2])
    weights = [x.detach().cos() for x in map(finite, want)]
    agree(*(torch.autograd.grad(map(finite, x), inputs, weights) for x in (results, want)))
    direct = rawattn.sparse_forward(
        *(x.detach() for x in inputs[:3]),
        *problem.given,
        **problem.options,
        block_scale=inputs[3].detach(),
        return_sliding=True,
        window=window,
    )
    assert torch.equal(direct[1], results[2].detach())


# ---- operators and torch's subsystems ---------------------------------------------------------

OPTIONS = (BLOCK, True, True, 0.25, True, "reference")


def rest_of(problem, table=False):
    given = table_of(problem, problem.block_indices) if table else problem.block_indices
    tensors, numbers = torch_sparse_ops.selection_of(given, problem.block_counts, *OPTIONS[:3])
    return (problem.given[0], problem.options["cu_seqlens_k"], *tensors, *numbers, *OPTIONS)


@pytest.mark.parametrize(
    ("grad", "gated", "counted", "table"),
    [(True, True, True, False), (False, False, False, False), (True, True, False, True)],
    ids=["gate_and_counts", "indices", "table"],
)
def test_opcheck(grad, gated, counted, table):
    problem = Problem(lengths=SMALL, heads=(2, 1, 1), gated=gated, counted=counted, selected=2)
    rest = rest_of(problem, table)
    absent = () if gated else (None,)
    inputs, direction, cotangents = (
        [x.clone().requires_grad_(grad) for x in y]
        for y in (problem.inputs, problem.direction, (problem.dout, problem.dlse))
    )
    inputs, direction = (*inputs, *absent), (*direction, *absent)
    with torch.no_grad():
        results = torch_sparse_ops.sparse_forward(*inputs, *rest)
    given = (*cotangents, *inputs, *results)
    for op, args in (
        (torch_sparse_ops.sparse_forward, (*inputs, *rest)),
        (torch_sparse_ops.sparse_backward, (*given, *rest)),
        (torch_sparse_ops.sparse_jvp, (*inputs, *direction, *rest)),
    ):
        checks = torch.library.opcheck(op, args)
        assert len(checks) == 4 and set(checks.values()) == {"SUCCESS"}
    double = [x if x is None else x.detach() for x in (*direction, *given)]
    checks = torch.library.opcheck(torch_sparse_ops.sparse_double_backward, (*double, *rest))
    assert len(checks) == 4 and set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("gated", [True, False])
def test_operators_without_a_direction_give_zeros(gated):
    problem = Problem(lengths=SMALL, heads=(2, 1, 1), gated=gated, selected=2)
    inputs = [*problem.inputs] if gated else [*problem.inputs, None]
    rest = rest_of(problem)
    out, lse = torch_sparse_ops.sparse_forward(*inputs, *rest)
    none = (None,) * 4
    given = (problem.dout, None, *inputs, out, lse)
    results = torch_sparse_ops.sparse_double_backward(*none, *given, *rest)
    assert [x.shape for x in results[2:]] == [x.shape for x in (*inputs[:3], results[5])]
    assert not any(x.any() for x in results) and results[5].numel() == (
        inputs[3].numel() if gated else 0
    )
    _, tout, _, tlse = torch_sparse_ops.sparse_jvp(*inputs, *none, *rest)
    assert not tout.any() and not tlse.any()


def test_compile_without_breaks_or_recompiles_when_lengths_change():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def loss(q, k, v, gate, cu_q, cu_k, indices):
        options = {"cu_seqlens_k": cu_k, "block_size": BLOCK, "return_lse": True}
        out, lse, sliding, _ = sparse_attn(
            2 * q, k, v, cu_q, indices, block_scale=gate, return_sliding=True, **options
        )
        return out.square().sum() + finite(lse).sum() + sliding.sum()

    step = torch.compile(loss, backend=counter, fullgraph=True)
    for lengths in (SELF, CROSS, ((20, 4), (7, 64)), ((3, 2, 50), (2, 3, 17))):
        problem = Problem(lengths=lengths)
        inputs = leaves(problem.inputs)
        rest = (problem.given[0], problem.options["cu_seqlens_k"], problem.block_indices)
        for x in (*inputs, *rest):
            torch._dynamo.mark_dynamic(x, 0)
        agree(*(torch.autograd.grad(f(*inputs, *rest), inputs) for f in (step, loss)))
    assert counter.frame_count == 1


def test_transforms_inside_compiled_code():
    problem = Problem()
    gradient = func.grad(problem.loss_of(problem.ours), (0, 1, 2, 3))
    for function in (
        lambda *x: func.jvp(problem.ours, x, (*problem.direction,)),
        func.grad(lambda *x: inner(gradient(*x), problem.direction), (0, 1, 2, 3)),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        agree(compiled(*problem.inputs), function(*problem.inputs))


def test_fake_tensors_trace_what_real_ones_do():
    problem = Problem(counted=True)

    def describe(*inputs):
        out, lse = problem.ours(*inputs)
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        return [(tuple(x.shape), x.stride(), x.dtype) for x in (out, lse, *grads)]

    inputs = leaves(problem.inputs)
    expected = describe(*inputs)
    with FakeTensorMode() as mode:
        problem.given = tuple(map(mode.from_tensor, problem.given))
        for name in ("cu_seqlens_k", "block_counts"):
            problem.options[name] = mode.from_tensor(problem.options[name])
        assert describe(*map(mode.from_tensor, inputs)) == expected


def test_selective_checkpointing_by_the_operator_s_name(calls):
    problem = Problem()

    def policy(context, op, *args, **keywords):
        saved = op is torch.ops.rawattn.sparse_forward.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*inputs):
        return problem.loss_of(problem.ours)(*(x.sin() for x in inputs))

    inputs = leaves(problem.inputs)
    want = torch.autograd.grad(block(*inputs), inputs)
    calls["sparse_forward"].clear()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    total = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(total, inputs)
    assert len(calls["sparse_forward"]) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_casts_to_its_dtype():
    problem = Problem()
    *qkv, gate = (x.float() for x in problem.inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, sliding, _ = problem.ours(*qkv, gate, return_sliding=True)
        wide, _ = problem.ours(*problem.inputs)
    assert (out.dtype, sliding.dtype, lse.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert wide.dtype == torch.float64
    assert torch.equal(out, problem.ours(*(x.bfloat16() for x in qkv), gate)[0])


def test_options_reach_every_function(calls):
    problem = Problem("no_own", counted=True)
    options = {"backend": "reference", "softmax_scale": 0.5}
    ours = partial(problem.ours, deterministic=True, **options)
    problem.hvp_of(ours)
    func.jvp(ours, (*problem.inputs,), (*problem.direction,))
    options |= {"block_size": BLOCK, "include_own_block": False, "causal": True}
    for name in NAMES:
        for _, keywords in calls[name]:
            assert options.items() <= keywords.items()
            assert keywords["block_counts"] is not None
            assert keywords["cu_seqlens_k"] is problem.options["cu_seqlens_k"] or name != NAMES[0]
    for name in NAMES[1:3]:
        assert calls[name] and calls[name][0][1]["deterministic"] is True


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_follows_torch(calls, wanted):
    problem = Problem()
    torch.use_deterministic_algorithms(wanted)
    try:
        problem.loss_of(problem.ours)(*leaves(problem.inputs)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls["sparse_backward"][0][1]["deterministic"] is wanted


@pytest.mark.parametrize("grad", [True, False])
def test_errors_of_the_checks_come_through(grad):
    problem = Problem()
    inputs = [x.requires_grad_(grad) for x in problem.inputs]
    cu, indices = problem.given
    with pytest.raises(ValueError, match="block_size"):
        problem.ours(*inputs, block_size=24)
    with pytest.raises(TypeError, match="dtype"):
        problem.ours(inputs[0], inputs[1].float(), *inputs[2:])
    for wrong, error, text in (
        (indices.float(), TypeError, "block_indices"),
        (indices[1:], ValueError, "block_indices"),
        (indices[:, :1], ValueError, "selection has 1 heads"),
    ):
        with pytest.raises(error, match=text):
            sparse_attn(*inputs[:3], cu, wrong, block_size=BLOCK)


# ---- on a GPU ---------------------------------------------------------------------------------

ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_cuda_agrees_with_the_cpu(mask, dtype, deterministic, compiled):
    torch._dynamo.reset()
    problem = Problem(mask, CROSS, counted=True)
    options = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in problem.options.items()
    }
    inputs = [x.to(dtype) for x in problem.inputs[:3]] + [problem.inputs[3].float()]
    wide = leaves([x.double() for x in inputs])
    inputs = leaves([x.cuda() for x in inputs])
    given = [x.cuda() for x in problem.given]

    def ours(q, k, v, gate):
        return sparse_attn(
            *(q, k, v, *given),
            **{**options, "block_scale": gate, "deterministic": deterministic, "return_lse": True},
        )

    attend = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    results = []
    for function, args in ((attend, inputs), (problem.dense, wide)):
        out, lse = function(*args)
        weights = [x.to(out.device) for x in (problem.dout, problem.dlse)]
        total = (out.double() * weights[0]).sum() + (finite(lse).double() * weights[1]).sum()
        results.append((out, finite(lse), *torch.autograd.grad(total, args)))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        atol = 6 * ROUNDING[dtype] * float(want.abs().max())
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_second_derivatives(dtype):
    problem = Problem(lengths=CROSS)
    want = problem.hvp_of(problem.dense)
    *qkv, gate = (x.cuda() for x in problem.inputs)
    problem.inputs = [*(x.to(dtype) for x in qkv), gate.float()]
    direction = [x.cuda() for x in problem.direction]
    problem.direction = [*(x.to(dtype) for x in direction[:3]), direction[3].float()]
    problem.given = tuple(x.cuda() for x in problem.given)
    problem.options["cu_seqlens_k"] = problem.options["cu_seqlens_k"].cuda()
    problem.dout, problem.dlse = problem.dout.cuda(), problem.dlse.cuda()
    for got, expected in zip(problem.hvp_of(problem.ours), want, strict=True):
        atol = 20 * ROUNDING[dtype] * float(expected.abs().max())
        torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=atol)

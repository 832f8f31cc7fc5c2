"""rawattn.torch on the CPU: second derivatives, forward mode, and their mixtures.

The truth is torch's own differentiation of dense attention in float64. Long, since torch has many
ways to a second derivative, and each could lose a part of it silently.
"""

from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from rawattn.torch import varlen_ops as torch_ops  # noqa: E402
from tests.shared.torch_problems import (  # noqa: E402
    FAST,
    LENGTHS,
    MASKS,
    Problem,
    agree,
    count_calls,
    finite,
    inner,
    leaves,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SUBSETS = [part for part in product([True, False], repeat=3) if any(part)]
ONE_OR_THREE = [part for part in product([True, False], repeat=6) if sum(part) in (1, 3)]
SMALL = {"heads": 2, "heads_kv": 1, "dim": 8, "dim_v": 8}


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


PROBLEMS = pytest.mark.parametrize(
    ("mask", "lengths_k"),
    [*product(MASKS, LENGTHS)],
    ids=lambda x: x if isinstance(x, str) else ("self" if x == LENGTHS[0] else "cross"),
)


# ---- gradients of gradients -------------------------------------------------------------------


@PROBLEMS
def test_second_derivatives_are_those_of_dense_attention(mask, lengths_k):
    """Gradients of dq, dk and dv with respect to q, k, v and the cotangents dout and dlse."""
    problem = Problem(mask, lengths_k)

    def second(attend):
        inputs = leaves(problem.qkv)
        cotangents = leaves((problem.dout, problem.dlse))
        out, lse = attend(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
        return torch.autograd.grad(grads, (*inputs, *cotangents), problem.direction)

    agree(*problem.both(second))


@pytest.mark.parametrize("given", SUBSETS, ids=str)
def test_only_the_directions_that_there_are_are_passed(calls, given):
    problem = Problem()

    def second(attend):
        inputs, cotangents = leaves(problem.qkv), leaves((problem.dout, problem.dlse))
        out, lse = attend(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
        chosen = [g for g, n in zip(grads, given, strict=True) if n]
        direction = [d for d, n in zip(problem.direction, given, strict=True) if n]
        wanted = (*inputs, *cotangents)
        return torch.autograd.grad(chosen, wanted, direction, materialize_grads=True)

    for got, want in zip(*problem.both(second), strict=True):
        torch.testing.assert_close(got, want)
    ((arguments, _),) = calls["double_backward"]
    assert [x is not None for x in arguments[:3]] == list(given)
    assert len(calls["backward"]) == 1, "the first one: nothing flows back into out and lse"


NEEDED = [needed for needed in product([True, False], repeat=5) if any(needed[:3])]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: "".join("ny"[n] for n in needed))
def test_any_of_the_inputs_and_cotangents_may_want_a_second_gradient(needed):
    """Any mixture of q, k, v, dout and dlse."""
    problem = Problem()
    values = (*problem.qkv, problem.dout, problem.dlse)

    def second(attend):
        inputs = [x.clone().requires_grad_(n) for x, n in zip(values, needed, strict=True)]
        out, lse = attend(*inputs[:3])
        wanted = [x for x, n in zip(inputs[:3], needed[:3], strict=True) if n]
        (of_out, of_lse) = (out * inputs[3]).sum(), (finite(lse) * inputs[4]).sum()
        grads = torch.autograd.grad(of_out + of_lse, wanted, create_graph=True)
        total = sum(g.sin().sum() for g in grads)
        sources = [x for x, n in zip(inputs, needed, strict=True) if n]
        if not total.requires_grad:  # dv depends on neither v nor dlse
            return [torch.zeros_like(x) for x in sources]
        return torch.autograd.grad(total, sources, materialize_grads=True)

    for got, want in zip(*problem.both(second), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("used", [(0, 1, 2), (3, 4), (0,), (1,), (2,), (3,), (4,), range(5)])
def test_second_derivatives_may_be_differentiated_in_their_direction(used):
    """They are linear in it; torch.autograd.functional.hvp relies on that."""
    problem = Problem()
    weights = [x.sin() for x in (*problem.qkv, problem.dout, problem.dlse)]

    def third(attend):
        inputs, cotangents = leaves(problem.qkv), leaves((problem.dout, problem.dlse))
        direction = leaves(problem.direction)
        out, lse = attend(*inputs)
        grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
        wanted = [(*inputs, *cotangents)[i] for i in used]
        second = torch.autograd.grad(grads, wanted, direction, create_graph=True)
        chosen = [weights[i] for i in used]
        return torch.autograd.grad(second, direction, chosen, materialize_grads=True)

    for got, want in zip(*problem.both(third), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_a_loss_of_one_result_alone(used):
    problem = Problem()

    def second(attend):
        inputs = leaves(problem.qkv)
        out, lse = attend(*inputs)
        loss = out.sin().sum() if used == "out" else finite(lse).sin().sum()
        grads = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(
            inner(grads, problem.direction), inputs, materialize_grads=True
        )
        return (*grads, *second)

    for got, want in zip(*problem.both(second), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask", MASKS)
def test_gradgradcheck_and_forward_mode_by_finite_differences(mask):
    """Small and crooked: shared heads, empty sequences, rows without keys; out and lse."""
    problem = Problem(mask, (1, 2, 3, 0), (2, 0, 2, 1), **SMALL)

    def function(*qkv):
        out, lse = problem.ours(*qkv)
        return out, finite(lse)

    inputs = leaves(problem.qkv)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, **FAST)
    assert torch.autograd.gradgradcheck(
        function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, **FAST
    )


def test_rows_without_keys_and_of_no_sequence_have_zero_second_derivatives():
    problem = Problem("causal", (2, 3), (4, 3))  # the first two queries see no key; one is spare
    inputs, cotangents = leaves(problem.qkv), leaves((problem.dout, problem.dlse))
    out, lse = problem.ours(*inputs)
    grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents, create_graph=True)
    gq, gk, gv, ddout, ddlse = torch.autograd.grad(grads, (*inputs, *cotangents), problem.direction)
    dead = [0, 1, -1]
    assert not gq[dead].any() and not ddout[dead].any() and not ddlse[:, dead].any()
    assert not gk[-1].any() and not gv[-1].any()
    assert all(g.isfinite().all() and g.any() for g in (gq, gk, gv, ddout, ddlse))
    (out, lse), (tout, tlse) = func.jvp(problem.ours, (*problem.qkv,), (*problem.direction,))
    assert (lse[:, dead] == -torch.inf).all()
    assert not any(x.any() for x in (out[dead], tout[dead], tlse[:, dead]))
    assert tout.isfinite().all() and tlse.isfinite().all()


# ---- forward mode -----------------------------------------------------------------------------


@PROBLEMS
def test_jvp_is_that_of_dense_attention(mask, lengths_k):
    problem = Problem(mask, lengths_k)
    agree(*problem.both(lambda f: func.jvp(f, (*problem.qkv,), (*problem.direction,))))


@pytest.mark.parametrize("given", SUBSETS, ids=str)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_dual_tensors(calls, given, grad_mode):
    """Of some inputs, which may want a gradient; one pass for the values and the tangents."""
    problem = Problem()

    def tangents(attend):
        inputs = leaves(problem.qkv)
        with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
            duals = [
                forward_ad.make_dual(x, t) if n else x
                for x, t, n in zip(inputs, problem.direction, given, strict=True)
            ]
            return [tuple(forward_ad.unpack_dual(x)) for x in attend(*duals)]

    got = tangents(problem.ours)
    ((arguments, _),) = calls["jvp"]
    assert [x is not None for x in arguments[3:6]] == list(given) and not calls["forward"]
    want = tangents(problem.dense)
    assert bool(want[0][1].any())
    for one, other in zip(got, want, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)
            assert a.requires_grad is grad_mode


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.func.linearize's own graph
def test_linearize_and_jvp_under_no_grad():
    problem = Problem()
    want = func.jvp(problem.dense, (*problem.qkv,), (*problem.direction,))
    with torch.no_grad():
        agree(func.jvp(problem.ours, (*problem.qkv,), (*problem.direction,)), want)
    out, tangent_of = func.linearize(problem.ours, *problem.qkv)
    agree((out, tangent_of(*problem.direction)), want)


def test_tangents_of_any_stride():
    problem = Problem()
    tq, tk, _ = problem.direction
    _, _, v = problem.qkv
    tangents = (
        tq[:1].expand(tq.shape),
        tk.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch._efficientzerotensor(v.shape, dtype=v.dtype),  # what torch makes of no dependence
    )
    agree(*problem.both(lambda f: func.jvp(f, (*problem.qkv,), tangents)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_inputs(dtype):
    problem = Problem()
    qkv, direction = ([x.to(dtype) for x in y] for y in (problem.qkv, problem.direction))
    (out, lse), (tout, tlse) = func.jvp(problem.ours, (*qkv,), (*direction,))
    assert {out.dtype, tout.dtype} == {dtype} and {lse.dtype, tlse.dtype} == {torch.float32}
    inputs, cotangents = leaves(qkv), leaves((tout, tlse))
    results = problem.ours(*inputs)
    grads = torch.autograd.grad(results, inputs, cotangents, create_graph=True)
    second = torch.autograd.grad(grads, (*inputs, *cotangents), direction)
    assert [g.dtype for g in second] == [*[dtype] * 4, torch.float32]


# ---- mixtures ---------------------------------------------------------------------------------


def loss_of_tangents(problem, attend):
    """A loss of values and tangents: six inputs, q, k, v and their tangents."""

    def loss(*inputs):
        (out, lse), (tout, tlse) = func.jvp(attend, (*inputs[:3],), (*inputs[3:],))
        of_values = (out * problem.dout).sin().sum() + (finite(lse) * problem.dlse).sin().sum()
        return of_values + (tout * problem.dout).cos().sum() + (tlse * problem.dlse).sin().sum()

    return loss


@PROBLEMS
def test_gradients_of_a_jvp(mask, lengths_k):
    problem = Problem(mask, lengths_k)
    six = (*problem.qkv, *problem.direction)

    def eager(attend):
        inputs = leaves(six)
        return torch.autograd.grad(loss_of_tangents(problem, attend)(*inputs), inputs)

    def functional(attend):
        return func.grad(loss_of_tangents(problem, attend), tuple(range(6)))(*six)

    want = eager(problem.dense)
    agree(eager(problem.ours), want)
    agree(functional(problem.ours), want)


@pytest.mark.parametrize(
    "needed", [n for n in product([True, False], repeat=6) if sum(n) in (1, 3)]
)
@pytest.mark.parametrize("used", ["out", "tout", "lse", "tlse"])
def test_gradients_of_one_result_of_a_jvp(needed, used):
    """Of some inputs, through one of the four results; None where it does not depend on them."""
    problem = Problem(**SMALL)
    place = ("out", "lse", "tout", "tlse").index(used)

    def grads(attend):
        values = (*problem.qkv, *problem.direction)
        inputs = [x.clone().requires_grad_(n) for x, n in zip(values, needed, strict=True)]
        pair = func.jvp(attend, (*inputs[:3],), (*inputs[3:],))
        result = [x for y in pair for x in y][place]
        wanted = [x for x in inputs if x.requires_grad]
        if not result.requires_grad:
            return [torch.zeros_like(x) for x in wanted]
        return torch.autograd.grad(finite(result).sin().sum(), wanted, materialize_grads=True)

    for got, want in zip(*problem.both(grads), strict=True):
        torch.testing.assert_close(got, want)


def test_second_gradients_in_the_direction_of_a_jvp_alone():
    """q, k and v want none, and neither do out and lse, which do not depend on the direction."""
    problem = Problem()

    def second(attend):
        direction = leaves(problem.direction)
        (out, lse), (tout, tlse) = func.jvp(attend, (*problem.qkv,), (*direction,))
        assert not out.requires_grad and not lse.requires_grad
        total = (tout * problem.dout).sin().sum() + (tlse * problem.dlse).cos().sum()
        grads = torch.autograd.grad(total, direction, create_graph=True)
        return torch.autograd.grad(inner(grads, problem.qkv), direction)

    agree(*problem.both(second))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_gradients_of_dual_tensors(inside):
    """backward() within the dual level, and after it."""
    problem = Problem()

    def grads(attend):
        inputs = leaves((*problem.qkv, *problem.direction))
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, inputs[:3], inputs[3:])
            (out, tout), (lse, tlse) = map(forward_ad.unpack_dual, attend(*duals))
            total = (out * problem.dout).sin().sum() + (tout * problem.dout).cos().sum()
            total = total + (finite(lse) * tlse).sin().sum()
            if inside:
                grads = torch.autograd.grad(total, inputs)
                return [forward_ad.unpack_dual(x).primal for x in grads]
        return torch.autograd.grad(total, inputs)

    agree(*problem.both(grads))


@pytest.mark.parametrize("create_graph", [True, False])
def test_dual_tensors_through_backward(create_graph):
    """The tangent of a gradient, within one dual level."""
    problem = Problem()

    def grads(attend):
        inputs = leaves(problem.qkv)
        with forward_ad.dual_level():
            duals = [*map(forward_ad.make_dual, inputs, problem.direction)]
            grads = torch.autograd.grad(
                problem.loss_of(attend)(*duals), duals, create_graph=create_graph
            )
            return [tuple(forward_ad.unpack_dual(g)) for g in grads]

    agree(*problem.both(grads))


def test_dual_cotangents():
    """The gradient is linear in dout and dlse."""
    problem = Problem()

    def grads(attend):
        inputs = leaves(problem.qkv)
        out, lse = attend(*inputs)
        with forward_ad.dual_level():
            cotangents = (
                forward_ad.make_dual(problem.dout, 2 * problem.dout.cos()),
                forward_ad.make_dual(problem.dlse, 3 * problem.dlse.cos()),
            )
            grads = torch.autograd.grad((out, finite(lse)), inputs, cotangents)
            return [tuple(forward_ad.unpack_dual(g)) for g in grads]

    agree(*problem.both(grads))


@pytest.mark.parametrize("mask", MASKS)
def test_hessian_vector_products_by_every_route(mask):
    problem = Problem(mask)
    qkv, direction, every = (*problem.qkv,), (*problem.direction,), (0, 1, 2)
    loss = problem.loss_of(problem.ours)
    gradient = func.grad(loss, every)
    step = 1e-6
    ahead = gradient(*(x + step * t for x, t in zip(qkv, direction, strict=True)))
    behind = gradient(*(x - step * t for x, t in zip(qkv, direction, strict=True)))
    routes = {
        "two backwards": problem.hvp_of(problem.ours),
        "forward over reverse": func.jvp(gradient, qkv, direction)[1],
        "reverse over forward": func.grad(lambda *x: func.jvp(loss, x, direction)[1], every)(*qkv),
        "reverse over reverse": func.grad(lambda *x: inner(gradient(*x), direction), every)(*qkv),
        "torch.autograd": torch.autograd.functional.hvp(loss, qkv, direction)[1],
    }
    want = problem.hvp_of(problem.dense)
    for got in routes.values():
        agree(got, want)
    differences = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    agree(differences, want, rtol=1e-5, atol=1e-7)


def test_the_hessian_is_symmetric():
    problem = Problem()
    a, b = problem.direction, [x.sin() for x in reversed_rows(problem.direction)]
    of_a = problem.hvp_of(problem.ours)
    problem.direction = b
    of_b = problem.hvp_of(problem.ours)
    torch.testing.assert_close(inner(of_a, b), inner(of_b, a))
    assert inner(of_a, b).abs() > 1e-2


def reversed_rows(tensors):
    return [x.flip(0) for x in tensors]


def test_torch_func_and_autograd_functional():
    problem = Problem("causal", (3, 2, 1), (2, 0, 1), **SMALL)
    q, k, v = problem.qkv
    cotangents = (problem.dout, problem.dlse)

    def of_q(attend):
        return lambda q: problem.loss_of(attend)(q, k, v)

    def after_the_transform(attend):  # vjp's function is called after its level is gone
        inputs = leaves(problem.qkv)
        grads = func.vjp(lambda *x: attend(*x)[0], *inputs)[1](problem.dout)
        return torch.autograd.grad(inner(grads, problem.direction), inputs)

    for function in (
        lambda f: func.vjp(lambda *x: (f(*x)[0], finite(f(*x)[1])), q, k, v)[1](cotangents),
        lambda f: func.grad(problem.loss_of(f), (0, 1, 2))(q, k, v),
        lambda f: func.jacrev(of_q(f), chunk_size=1)(q),
        lambda f: func.jacrev(func.jacrev(of_q(f), chunk_size=1), chunk_size=1)(q),
        lambda f: torch.autograd.functional.hessian(of_q(f), q),
        lambda f: torch.autograd.functional.jvp(lambda q: f(q, k, v)[0], q, q)[1],
        lambda f: func.functionalize(func.grad(of_q(f)))(q),
        after_the_transform,
    ):
        agree(*problem.both(function))


class Model(torch.nn.Module):
    """One layer of attention over rows x at a time t, of which q, k and v depend."""

    def __init__(self, attend, width=8):
        super().__init__()
        torch.manual_seed(4)
        self.attend = attend
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=torch.float64)
        self.time = torch.nn.Linear(1, width, dtype=torch.float64)
        self.last = torch.nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x, t):
        h = x + self.time(t).sin()
        q, k, v = self.qkv(h).view(len(x), 3, 2, 4).unbind(1)
        wide = [torch.cat((y, y.cos()), -1) for y in (q, k, v)]  # head_dim 8
        out, lse = self.attend(*wide)
        return self.last(out.view(len(x), 2, 8)[..., :4].flatten(1).tanh()) + lse.mean(0)[:, None]


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "whole"])
@pytest.mark.parametrize("under", ["nothing", "checkpoint", "compile"])
def test_a_loss_that_contains_a_jvp_trains_parameters(calls, stop, under):
    """As in MeanFlow: the target has the tangent of the model along (velocity, 1)."""
    problem = Problem("full", LENGTHS[0], spare=0)
    rows = len(problem.qkv[0])
    x, velocity = torch.linspace(-1, 1, 16 * rows, dtype=torch.float64).view(2, rows, 8).unbind()
    t = torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    grads = []
    for attend in (problem.ours, problem.dense):
        model = Model(attend)

        def loss(x, model=model):
            u, dudt = func.jvp(model, (x, t), (velocity, torch.ones_like(t)))
            target = velocity - t * dudt
            return (u - (target.detach() if stop else target)).square().sum()

        if attend == problem.ours and under == "checkpoint":
            total = checkpoint(loss, x, use_reentrant=False)
        elif attend == problem.ours and under == "compile":
            torch._dynamo.reset()
            total = torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
        else:
            total = loss(x)
        total.backward()
        grads.append([p.grad for p in model.parameters()])
    agree(*grads)
    assert len(calls["double_backward"]) == (0 if stop else 1)
    assert not calls["forward"]  # the values come with the tangents


# ---- graphs, memory, operators ----------------------------------------------------------------


def test_nothing_but_inputs_and_results_is_saved():
    problem = Problem()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    inputs = leaves(problem.qkv)
    cotangents, direction = leaves((problem.dout, problem.dlse)), leaves(problem.direction)
    options = (*problem.ours.keywords.values(),)[:2]
    rest = (*options, None, True, -1, -1, None, None, False, None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = [*torch_ops.varlen_forward(*inputs, None, *rest)]
        out, lse = results
        dout, dlse = cotangents
        given = (dout, dlse, *inputs, None, out, lse)
        results += torch_ops.varlen_backward(*given, *rest)
        results += torch_ops.varlen_double_backward(*direction, None, *given, *rest)
        results += torch_ops.varlen_jvp(*inputs, None, *direction, None, *rest)
    known = {x.data_ptr() for x in (*inputs, *cotangents, *direction, *options, *results)}
    assert len(saved) == 7 + 9 + 12 + 10 and {x.data_ptr() for x in saved} <= known


def test_training_calls_nothing_of_second_order(calls):
    problem = Problem()
    inputs = leaves(problem.qkv)
    problem.loss_of(problem.ours)(*inputs).backward()
    problem.ours(*problem.qkv)
    assert [len(calls[name]) for name in calls] == [2, 1, 0, 0]


def test_a_hessian_vector_product_calls_each_pass_once(calls):
    problem = Problem()
    problem.hvp_of(problem.ours)
    # The loss bends too: its cotangents go through one more backward than the attention.
    assert {name: len(seen) for name, seen in calls.items()} == {
        "forward": 1,
        "backward": 2,
        "double_backward": 1,
        "jvp": 0,
    }


def test_create_graph_changes_no_gradient():
    problem = Problem()
    loss, inputs = problem.loss_of(problem.ours), leaves(problem.qkv)
    plain = torch.autograd.grad(loss(*inputs), inputs)
    graph = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))


def test_second_derivative_of_a_checkpoint():
    problem = Problem()

    def second(attend):
        inputs, loss = leaves(problem.qkv), problem.loss_of(attend)
        total = checkpoint(loss, *inputs, use_reentrant=False) if attend == problem.ours else None
        total = loss(*inputs) if total is None else total
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        return torch.autograd.grad(inner(grads, problem.direction), inputs)

    agree(*problem.both(second))


def test_autocast():
    problem = Problem()
    single = [[x.float() for x in y] for y in (problem.qkv, problem.direction)]
    with torch.autocast("cpu", torch.bfloat16):
        (out, _), (tout, _) = func.jvp(problem.ours, *map(tuple, single))
        inputs = leaves(single[0])
        grads = torch.autograd.grad(problem.ours(*inputs)[0].sum(), inputs, create_graph=True)
    second = torch.autograd.grad(inner(grads, single[1]), inputs)
    assert {out.dtype, tout.dtype} == {torch.bfloat16}
    assert {g.dtype for g in second} == {torch.float32}


OPTIONS = (None, True, -1, -1, 0.25, None, True, "reference")  # from seqused_k on


# What stands beside the directions matters to none of them: so it is varied for two alone.
BESIDE = pytest.mark.parametrize(
    ("given", "beside"),
    [
        *((given, True) for given in (*SUBSETS, (False, False, False))),
        *((given, False) for given in ((True, True, True), (True, False, False))),
    ],
    ids=str,
)


@BESIDE
def test_opcheck_of_the_double_backward(given, beside):
    problem = Problem(**SMALL)
    q, k, v = problem.qkv
    rest = (problem.ours.keywords["cu_q"], problem.ours.keywords["cu_k"], *OPTIONS)
    out, lse = torch_ops.varlen_forward(q, k, v, None, *rest)
    direction = [x if n else None for x, n in zip(problem.direction, given, strict=True)]
    dlse = problem.dlse if beside else None
    args = (*direction, None, problem.dout, dlse, q, k, v, None, out, lse, *rest)
    results = torch.library.opcheck(torch_ops.varlen_double_backward, args)
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@BESIDE
def test_opcheck_of_the_jvp(given, beside):
    problem = Problem(**SMALL)
    rest = (problem.ours.keywords["cu_q"], problem.ours.keywords["cu_k"], *OPTIONS)
    qkv, direction = (
        [x.clone().requires_grad_(beside) for x in y] for y in (problem.qkv, problem.direction)
    )
    direction = [x if n else None for x, n in zip(direction, given, strict=True)]
    results = torch.library.opcheck(torch_ops.varlen_jvp, (*qkv, None, *direction, None, *rest))
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


def test_opcheck_of_the_backward_with_gradients():
    problem = Problem(**SMALL)
    rest = (problem.ours.keywords["cu_q"], problem.ours.keywords["cu_k"], *OPTIONS)
    results = torch_ops.varlen_forward(*problem.qkv, None, *rest)
    inputs = leaves((problem.dout, problem.dlse, *problem.qkv))
    checks = torch.library.opcheck(torch_ops.varlen_backward, (*inputs, None, *results, *rest))
    assert len(checks) == 4 and set(checks.values()) == {"SUCCESS"}


def test_results_share_no_memory_with_inputs():
    problem = Problem("full", (1,), (1,), spare=0)  # one key: tout equals tv, and must not be tv
    out, lse = problem.ours(*problem.qkv)
    rest = (*[*problem.ours.keywords.values()][:2], None, False, -1, -1, None, None, False, None)
    results = [
        *torch_ops.varlen_jvp(*problem.qkv, None, *problem.direction, None, *rest),
        *torch_ops.varlen_double_backward(
            *problem.direction, None, problem.dout, None, *problem.qkv, None, out, lse, *rest
        ),
    ]
    storages = [
        x.untyped_storage().data_ptr() for x in (*problem.qkv, *problem.direction, *results)
    ]
    assert len(set(storages)) == len(storages)


def test_options_reach_every_pass(calls):
    problem = Problem("full")
    options = {"causal": True, "window": (5, 0), "softmax_scale": 0.5, "backend": "reference"}
    problem.ours = partial(problem.ours, deterministic=True, **options)
    problem.hvp_of(problem.ours)
    func.jvp(problem.ours, (*problem.qkv,), (*problem.direction,))
    for name in ("double_backward", "jvp"):
        ((_, keywords),) = calls[name]
        assert options.items() <= keywords.items()
        assert keywords["deterministic"] is True

"""rawattn.torch on the CPU: derivatives in compiled code, and those that are refused."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from rawattn.torch import varlen_ops as torch_ops  # noqa: E402
from tests.shared.torch_problems import (  # noqa: E402
    Problem,
    agree,
    inner,
    leaves,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = (None, True, -1, -1, 0.25, None, True, "reference")  # from seqused_k on


# ---- torch.compile ----------------------------------------------------------------------------


@pytest.fixture
def compiled(request):
    torch._dynamo.reset()
    return partial(torch.compile, backend=request.param, fullgraph=True)


ANY_BACKEND = pytest.mark.parametrize("compiled", ["eager", "aot_eager"], indirect=True)


@ANY_BACKEND
def test_transforms_inside_compiled_code(compiled):
    problem = Problem()
    every = (0, 1, 2)

    def jvp(attend):
        return lambda *x: func.jvp(attend, x, (*problem.direction,))

    def second(attend):
        gradient = func.grad(problem.loss_of(attend), every)
        return func.grad(lambda *x: inner(gradient(*x), problem.direction), every)

    def forward_over_reverse(attend):
        gradient = func.grad(problem.loss_of(attend), every)
        return lambda *x: func.jvp(gradient, x, (*problem.direction,))

    for make in (jvp, second, forward_over_reverse):
        want = make(problem.dense)(*problem.qkv)
        agree(compiled(make(problem.ours))(*problem.qkv), want)


@ANY_BACKEND
def test_dual_level_around_compiled_code(compiled):
    problem = Problem()
    with forward_ad.dual_level():
        duals = [*map(forward_ad.make_dual, problem.qkv, problem.direction)]
        got = [forward_ad.unpack_dual(x) for x in compiled(problem.ours)(*duals)]
        want = [forward_ad.unpack_dual(x) for x in problem.dense(*duals)]
        agree(got, want)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("compiled", "refused"), [("eager", False), ("aot_eager", True)], indirect=["compiled"]
)
def test_create_graph_through_compiled_code_is_right_or_refused(compiled, refused, fullgraph):
    """With aot_autograd between, torch itself refuses."""
    problem = Problem()
    second = partial(problem.hvp_of, compiled(problem.ours, fullgraph=fullgraph))
    if not refused:
        agree(second(), problem.hvp_of(problem.dense))
        return
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        second()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch traces what computes the operators
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.sweep)])
@ANY_BACKEND
def test_jvp_around_compiled_code_is_right_or_refused(compiled, fullgraph):
    """torch does not promise this; what matters is that the tangents are never lost."""
    problem = Problem()
    inputs = (*problem.qkv,), (*problem.direction,)
    try:
        got = func.jvp(compiled(problem.ours, fullgraph=fullgraph), *inputs)
    except RuntimeError:
        return
    agree(got, func.jvp(problem.dense, *inputs))


# ---- what does not exist is refused, never zero -----------------------------------------------

PROBLEM = Problem()
Q, K, V = PROBLEM.qkv


def loss(q=Q, k=K, v=V):
    return PROBLEM.loss_of(PROBLEM.ours)(q, k, v)


def jvp_of(function, x=Q):
    return func.jvp(function, (x,), (x.cos(),))[1]


def bent(function):
    return lambda x: function(x).sin().sum()


def third_backwards():
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(q), q, create_graph=True)
    (grad,) = torch.autograd.grad(bent(lambda g: g)(grad), q, create_graph=True)
    torch.autograd.grad(bent(lambda g: g)(grad), q)


def third_by_backward():
    """The direction wants a gradient, which exists, and so do the inputs, whose does not."""
    q, direction = Q.clone().requires_grad_(), Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(q), q, create_graph=True)
    torch.autograd.grad(grad, q, direction, create_graph=True)[0].sum().backward()


def third_in_a_cotangent():
    q, dout = leaves((Q, PROBLEM.dout))
    (grad,) = torch.autograd.grad(PROBLEM.ours(q, K, V)[0], q, dout, create_graph=True)
    (second,) = torch.autograd.grad(grad, q, Q.cos(), create_graph=True)
    torch.autograd.grad(second, dout, Q)


def third_in_a_dual_level():
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, Q)
        (grad,) = torch.autograd.grad(loss(dual), dual, create_graph=True)
        torch.autograd.grad(bent(lambda g: g)(grad), dual)


def batch(x):
    return torch.stack((x, x.cos()))


def foreign(differentiate):
    """varlen_backward with an out that is not of its q, k and v."""
    rest = (PROBLEM.ours.keywords["cu_q"], PROBLEM.ours.keywords["cu_k"], *OPTIONS)
    out, lse = torch_ops.varlen_forward(Q, K, V, None, *rest)
    backward = torch_ops.varlen_backward
    return differentiate(
        lambda o: backward(PROBLEM.dout, None, Q, K, V, None, o, lse, *rest)[0], out
    )


gradient = func.grad(loss)
REFUSED = {
    "the third derivative": {
        "backwards": third_backwards,
        "by_backward": third_by_backward,
        "in_a_cotangent": third_in_a_cotangent,
        "in_a_dual_level": third_in_a_dual_level,
        "grad_grad_grad": lambda: func.grad(bent(func.grad(bent(gradient))))(Q),
        "jvp_grad_grad": lambda: jvp_of(func.grad(bent(gradient))),
        "grad_jvp_grad": lambda: func.grad(bent(lambda q: jvp_of(gradient, q)))(Q),
        "grad_grad_jvp": lambda: func.grad(bent(func.grad(lambda q: jvp_of(loss, q))))(Q),
        "gradgradcheck": lambda: torch.autograd.gradgradcheck(
            bent(lambda q: torch.autograd.functional.vjp(loss, q, create_graph=True)[1]),
            Q.clone().requires_grad_(),
            fast_mode=True,
        ),
    },
    "forward mode over forward mode": {
        "jvp_of_jvp": lambda: jvp_of(lambda q: jvp_of(loss, q)),
        "jvp_of_jvp_in_others": lambda: jvp_of(lambda k: jvp_of(lambda q: loss(q, k)), K),
        "jvp_of_the_tangent": lambda: jvp_of(lambda t: func.jvp(loss, (Q,), (t,))[1]),
        "jvp_grad_jvp": lambda: jvp_of(func.grad(lambda q: jvp_of(loss, q))),
        "jvp_of_operator": lambda: jvp_of(
            lambda q: torch_ops.varlen_jvp(
                *(q, K, V, None, Q, None, None, None),
                *[*PROBLEM.ours.keywords.values()][:2],
                *OPTIONS,
            )
        ),
    },
    "vmap does not exist": {
        "vmap": lambda: func.vmap(loss)(batch(Q)),
        "vmap_in_k": lambda: func.vmap(lambda k: loss(k=k))(batch(K)),
        "grad_of_vmap": lambda: func.grad(lambda q: func.vmap(loss)(batch(q)).sum())(Q),
        "vmap_of_grad": lambda: func.vmap(gradient)(batch(Q)),
        "vmap_of_jvp": lambda: func.vmap(lambda t: func.jvp(loss, (Q,), (t,))[1])(batch(Q)),
        "jacrev": lambda: func.jacrev(gradient)(Q),
        "jacfwd": lambda: func.jacfwd(loss)(Q),
        "hessian": lambda: func.hessian(loss)(Q),
    },
    "varlen_backward is differentiated in out or lse": {
        "backwards": lambda: foreign(lambda f, o: func.grad(bent(f))(o)),
        "forwards": lambda: foreign(lambda f, o: jvp_of(f, o)),
    },
}


@pytest.mark.parametrize(
    ("text", "attempt"),
    [
        pytest.param(text, attempt, id=f"{text.replace(' ', '_')}-{name}")
        for text, attempts in REFUSED.items()
        for name, attempt in attempts.items()
    ],
)
def test_is_refused(text, attempt):
    with pytest.raises(RuntimeError, match=f"rawattn: {text}"):
        attempt()


def chain(error):
    """The error and those behind it: handling ours, the compiler at times makes one of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def dual_level_inside(q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, q.cos()))).tangent


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("forward_ad.dual_level inside compiled code", dual_level_inside),
        ("forward mode over forward mode", lambda q: jvp_of(lambda q: jvp_of(loss, q), q)),
        ("the third derivative", func.grad(bent(func.grad(bent(gradient))))),
        ("vmap does not exist", lambda q: func.vmap(loss)(batch(q))),
    ],
    ids=["dual_level", "jvp_of_jvp", "third", "vmap"],
)
@ANY_BACKEND
def test_is_refused_inside_compiled_code(compiled, text, function, fullgraph):
    with pytest.raises(RuntimeError) as refusal:
        compiled(function, fullgraph=fullgraph)(Q)
    assert any(f"rawattn: {text}" in str(error) for error in chain(refusal.value))

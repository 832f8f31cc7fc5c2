"""Text logs: tensors are read as they stand, and what is said of them can be proved. Long by two
logs that people really had, in figures, and by bugs and right results that are printed anew."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.logs.explain import explain_log
from rawattn.check.diagnose.logs.printed import read_log
from tests.diagnose.plain import FLOAT64, Array, Head, heads_of
from tests.diagnose.problems import packed

# ---- figures of two logs ----

# a causal attention of 4 tokens, one head; a hand-written backward pass against a kernel
MASKS = """\
dQ_manual:
tensor([[[[-0.0137,  0.1686,  0.1254,  0.1340],
          [ 0.3367, -0.9961,  0.1930, -0.3312],
          [ 0.0345,  0.6728, -0.5606, -0.0312],
          [-0.0745, -0.0756,  0.0784,  0.0027]]]], device='cuda:0',
grad_fn=<MulBackward0>)

dQ_cuda:
tensor([[[[ 0.0000,  0.0000,  0.0000,  0.0000],
          [ 0.0233, -0.0736,  0.2137,  0.0987],
          [ 0.0286,  0.6309, -0.5214, -0.0293],
          [-0.0745, -0.0756,  0.0784,  0.0027]]]])

AssertionError: not close! dS_manual:
tensor([[[[-1.8708e-08, -1.3340e+00,  1.3969e-01,  1.5172e-01],
          [ 1.9902e-01, -1.9902e-01, -1.7371e+00, -2.3938e-01],
          [-4.7315e-02,  4.5658e-02,  1.6575e-03, -5.4871e-01],
          [ 1.1068e-01,  5.8861e-02,  2.8708e-02, -1.9824e-01]]]],
device='cuda:0', grad_fn=<MulBackward0>)
dS_manual.shape: torch.Size([1, 1, 4, 4])

dS_cuda:
tensor([[[[ 0.0000,  0.0000,  0.0000,  0.0000],
          [ 0.4662, -0.4662,  0.0000,  0.0000],
          [-0.0587,  0.0566,  0.0021,  0.0000],
          [ 0.1107,  0.0589,  0.0287, -0.1982]]]], device='cuda:0')
dS_cuda.shape: torch.Size([1, 1, 4, 4])
"""

# gradients of eight packed sequences against a padded batch; the first sequence of each
PADDING = """\
torch.Size([8960, 16, 64])
torch.Size([8, 16, 1856, 64])
varlen_q.grad: tensor([[ 0.0113,  0.0113, -0.0098,  ...,  0.0053,  0.0071, -0.0062],
        [ 0.0067,  0.0004,  0.0110,  ...,  0.0082,  0.0149, -0.0026]], dtype=torch.bfloat16)
varlen_grad_seq: tensor([[ 0.2393, -0.0811, -0.1641,  ...,  0.2871, -0.1602, -0.5938],
        [ 0.2373, -0.0608, -0.1699,  ...,  0.2871, -0.1387, -0.6133],
        [ 0.2334, -0.0874, -0.1709,  ...,  0.3145, -0.1475, -0.6211],
        ...,
        [ 0.2324, -0.0757, -0.1631,  ...,  0.2812, -0.1475, -0.6094],
        [ 0.2236, -0.0835, -0.1572,  ...,  0.2949, -0.1582, -0.5938],
        [ 0.2412, -0.0962, -0.1602,  ...,  0.3125, -0.1582, -0.6133]],
       device='cuda:0', dtype=torch.bfloat16)
sdpa_grad_seq: tensor([[ 0.0603, -0.0205, -0.0413,  ...,  0.0718, -0.0400, -0.1494],
        [ 0.0598, -0.0156, -0.0430,  ...,  0.0723, -0.0347, -0.1543],
        [ 0.0586, -0.0219, -0.0430,  ...,  0.0786, -0.0366, -0.1562],
        ...,
        [ 0.0586, -0.0193, -0.0413,  ...,  0.0713, -0.0369, -0.1533],
        [ 0.0564, -0.0211, -0.0393,  ...,  0.0742, -0.0396, -0.1494],
        [ 0.0610, -0.0239, -0.0403,  ...,  0.0786, -0.0393, -0.1543]],
       device='cuda:0', dtype=torch.bfloat16)
"""


def only(diagnosis: Diagnosis) -> Finding:
    assert len(diagnosis.findings) == 1, diagnosis.findings
    finding = diagnosis.findings[0]
    assert finding.bug in CLASSES
    return finding


def test_masks() -> None:
    diagnosis = explain_log(MASKS)
    finding = only(diagnosis)
    said = " ".join(finding.evidence)
    assert (finding.side, finding.bug) == ("manual", "mask-missing-in-backward")
    assert finding.confidence == "proved"
    assert "-1.0426, -1.9765, -0.5487, 0.0000" in said
    assert "0.0000, 0.0000, 0.0000, 0.0001" in said and "dS_cuda is right" in said
    assert diagnosis.judged == ("cuda",)


def test_padding() -> None:
    diagnosis = explain_log(PADDING)
    finding = only(diagnosis)
    assert finding.bug == "unknown" and "padded-keys" in finding.alternatives
    assert "constant factor of 3.976" in finding.title
    assert "3.976 on the 36 entries" in finding.evidence[0] and "another length" in finding.look_at
    assert any("varlen_q.grad" in fact for fact in diagnosis.facts)


def test_errors_without_what_they_are_of_say_nothing() -> None:
    with pytest.raises(ValueError, match="0 tensors are printed, which say nothing"):
        explain_log("forward max abs err: 0.0000e+00\ngrad max abs err (q,k,v): [6e-07, 0.0]")


# ---- reading ----


def torch_like(values: Array, dtype: str = "", digits: int = 4) -> str:
    """A print in torch's form, without torch."""
    form: Any = {"separator": ", ", "prefix": "tensor(", "threshold": 1000}
    form["formatter"] = {"float_kind": f"{{: .{digits}f}}".format}
    text = np.array2string(values.astype(np.float64), **form)
    return f"tensor({text}, dtype=torch.{dtype})" if dtype else f"tensor({text})"


FORMS: dict[str, Callable[[Array], str]] = {
    "torch": torch_like,
    "bfloat16": lambda a: torch_like(a, "bfloat16"),
    "digits": lambda a: torch_like(a, digits=7),
    "repr": lambda a: repr(a.astype(np.float32)),
    "str": lambda a: "\n" + str(a.astype(np.float32)),
    "list": lambda a: str(a.tolist()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 2, 4, 4)])
def test_forms(form: str, shape: tuple[int, ...]) -> None:
    if form == "list" and len(shape) == 1:
        pytest.skip("a line of numbers in commas may be prose")
    values = np.random.default_rng(2).standard_normal(shape)
    text = f"some words.\ndq_reference: {FORMS[form](values)}\nand more words"
    (printed,) = read_log(text)
    assert printed.name == "dq_reference" and printed.whole
    values = values.squeeze()
    slack = 0.51 * printed.unit + 1e-6
    assert (np.abs(printed.values - values) <= slack).all()


@pytest.mark.parametrize(
    "text, values",
    [
        ("x: tensor(1.00000e-04 *\n       [[ 1.5000, -2.0000]])", [[1.5e-4, -2e-4]]),
        ("x: tensor([nan, -inf, 1.0000])", [math.nan, -math.inf, 1.0]),
        ("Parameter containing:\nx: tensor([1.5000], requires_grad=True)", [1.5]),
        ("x: tf.Tensor(\n[[1. 2.]], shape=(1, 2), dtype=float32)", [[1.0, 2.0]]),
        ("x = Array([[1.5, 2.5]], dtype=bfloat16)", [[1.5, 2.5]]),
        ("E       x: tensor([[1.0000],\nE               [2.0000]])", [[1.0], [2.0]]),
        ("[rank0]: x: tensor([[1.0000],\n[rank0]:         [2.0000]])", [[1.0], [2.0]]),
        ("\x1b[31mx: tensor([1.0000])\x1b[0m", [1.0]),
        ("{'x': tensor([1.0000])}", [1.0]),
    ],
)
def test_small_prints(text: str, values: object) -> None:
    (printed,) = read_log(text)
    assert printed.name.removeprefix("tf.") == "x"
    np.testing.assert_allclose(printed.values, values)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "0 tensors are printed"),
        ("a story without any figures", "0 tensors are printed"),
        ("dq: tensor([[1.0, 2.0],\n [3.0, 4", "line 1 cannot be read"),
        ("one\ndq: tensor([[1.0, 2.0],\n [3.0]])", "line 2 cannot be read"),
        ("dq: tensor([[1.0, n], [2.0, n]])", "0 tensors are printed"),
        ("dq: tensor([[1.0, 2.0], <lost> [3.0, 4.0]])", "0 tensors are printed"),
        ("dq: tensor([1.+2.j, 3.])", "numbers that are not real"),
        ("dq: tensor([1., ..., 2., ..., 3.])", "line 1 cannot be read"),
        ("dq: tensor([1, 2], dtype=torch.int32)\ndo: tensor([[True, False]])", "0 tensors"),
        ("[[1. 2.]\n [3. 4.", "line 1 cannot be read: it is cut off"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain_log(text)


# ---- bugs and right results, printed here ----


def attention(seed: int, rows: int = 6, keys: int = 6, causal: bool = True) -> Head:
    """One head in float64, with all its steps."""
    sizes: dict[str, Any] = {"lengths_k": (keys,), "heads": (1, 1), "dim": 4}
    return heads_of(packed((rows,), FLOAT64, seed=seed, causal=causal, **sizes))[0, 0]


def gradients(a: Head, dS: Array, P: Array) -> dict[str, Array]:
    return {"dQ": dS @ a.K / 2, "dK": dS.T @ a.Q / 2, "dV": P.T @ a.dO}


def log_of(
    form: str, reference: dict[str, Array], candidate: dict[str, Array], causal: bool = True
) -> str:
    lines = [f"causal={causal}"]
    for name in reference:
        lines.append(f"{name}_ref: {FORMS[form](reference[name])}")
        lines.append(f"{name}_kernel: {FORMS[form](candidate[name])}")
    return "\n".join(lines) + "\n"


def rounded(values: Array, dtype: str) -> Array:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return np.asarray(values.astype(kind).astype(np.float64))


@pytest.mark.parametrize("form", ["torch", "bfloat16", "digits", "str"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_results_are_silent(form: str, dtype: str) -> None:
    """Every quantity of a right implementation that rounds P, dS, and out before it makes D."""
    for seed in range(12):
        causal = seed % 3 > 0
        rows, keys = [(6, 6), (5, 9), (4, 4), (40, 40)][seed % 4]
        a = attention(seed, rows, keys, causal)
        P, out = rounded(a.P, dtype), rounded(rounded(a.P, dtype) @ a.V, dtype)
        dS = rounded(a.P * (a.dP - (a.dO * out).sum(1, keepdims=True)), dtype)
        right = {"dS": a.dS, "P": a.P, "out": a.P @ a.V} | gradients(a, a.dS, a.P)
        other = {"dS": dS, "P": P, "out": out} | gradients(a, dS, P)
        right["lse"] = other["lse"] = a.L[:, 0]
        other = {name: rounded(values, dtype) for name, values in other.items()}
        text = log_of(form, right, other, causal)
        diagnosis = explain_log(text)
        assert not diagnosis.findings, (seed, diagnosis.findings)
        assert {*diagnosis.judged} == ({"ref", "kernel"} if rows < 40 else set())


@pytest.mark.parametrize("form", ["torch", "digits", "repr", "str", "list"])
@pytest.mark.parametrize("masked_lse", [False, True])
@pytest.mark.parametrize("rows", [4, 7, 20])
def test_unmasked_p(form: str, masked_lse: bool, rows: int) -> None:
    for seed in range(3):
        a = attention(seed, rows, rows)
        P = np.exp(a.bare - a.L)
        P = P if masked_lse else P / P.sum(axis=1, keepdims=True)
        dS = P * (a.dP - a.D)
        right = {"dS": a.dS, "dQ": gradients(a, a.dS, a.P)["dQ"]}
        wrong = {"dS": dS, "dQ": gradients(a, dS, P)["dQ"]}
        for sides, side in (((right, wrong), "kernel"), ((wrong, right), "ref")):
            finding = only(explain_log(log_of(form, *sides)))
            assert (finding.bug, finding.side) == ("mask-missing-in-backward", side)
            assert finding.confidence == "proved"


@pytest.mark.parametrize("seed", range(5))
def test_wrong_delta(seed: int) -> None:
    a = attention(seed)
    finding = only(explain_log(log_of("digits", {"dS": a.dS}, {"dS": a.P * a.dP})))
    assert (finding.bug, finding.side) == ("delta-omitted", "kernel")
    assert finding.confidence == "medium" and "delta-of-another-out" in finding.alternatives
    assert only(explain_log(f"dS_kernel: {torch_like(a.P * a.dP)}")).bug == "unknown"
    other = only(explain_log(log_of("digits", {"dS": a.dS}, {"dS": a.dP - a.D})))
    assert other.bug in ("unknown", "mask-missing-in-backward") and other.confidence == "medium"


def test_a_plain_factor_is_no_padding() -> None:
    values = np.random.default_rng(6).standard_normal((448, 64))
    text = f"dv_ref: {torch_like(values)}\ndv_kernel: {torch_like(values / 4)}\n"
    causal = only(explain_log("causal=True\n" + text))
    assert causal.bug == "unknown" and "padded-keys" not in causal.alternatives


def test_known_factors() -> None:
    a = attention(2, 12, 12)
    lse, dQ = a.L[:, 0], gradients(a, a.dS, a.P)["dQ"]
    for name, right, factor, due in (
        ("lse", lse, 1 / math.log(2), ("lse-base-2", "kernel", "high")),
        ("dQ", dQ, 2, ("output-scale", "kernel", "medium")),
    ):
        finding = only(explain_log(log_of("torch", {name: right}, {name: right * factor})))
        assert (finding.bug, finding.side, finding.confidence) == due

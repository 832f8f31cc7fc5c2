"""The identities of one side hold for right attention of every precision, and fail for wrong.

Long, one identity after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.invariants import checks
from rawattn.check.diagnose.findings import Check
from rawattn.reference import dense, second, sparse

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float64), np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
OTHERS = ("lse", "delta", "ddlse", "tlse", "jvp lse", "dblock_scale", "gblock_scale")


def drawn(
    seed: int, dtype: Any = np.float64, *, sparsely: bool = False, **changes: Any
) -> Question:
    """A random problem: lengths, heads, mask, rows past the end, perhaps dead rows and dlse."""
    rng = np.random.default_rng(seed)
    batch, num_heads_kv = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    group = int(rng.integers(1, 4))
    head_dim, head_dim_v = (int(n) for n in rng.choice([8, 16, 24, 64], 2))
    lengths_q = rng.integers(1, 70, batch)
    lengths_k = lengths_q if rng.random() < 0.5 else rng.integers(1, 90, batch)
    if rng.random() < 0.3:
        lengths_q, lengths_k = lengths_q.copy(), lengths_k.copy()
        lengths_q[0], lengths_k[-1] = 0, 0
    past = int(rng.integers(0, 3))
    total_q, total_k = int(lengths_q.sum()) + past, int(lengths_k.sum()) + past

    def draw(rows: int, heads: int, width: int) -> np.ndarray:
        array = rng.standard_normal((rows, heads, width)).astype(dtype)
        array[rows - past :] = np.nan
        return array

    q, tq = (draw(total_q, num_heads_kv * group, head_dim) for _ in range(2))
    k, tk = (draw(total_k, num_heads_kv, head_dim) for _ in range(2))
    v, tv = (draw(total_k, num_heads_kv, head_dim_v) for _ in range(2))
    wide = np.float64 if dtype == np.float64 else np.float32
    offsets = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k))
    masks = ((-1, -1), (-1, 0), (-1, 0), (10, 0), (7, 5), (3, -1))
    window = masks[int(rng.integers(len(masks)))]
    given: dict[str, Any] = {
        "dout": draw(total_q, num_heads_kv * group, head_dim_v),
        "dlse": rng.standard_normal((num_heads_kv * group, total_q)).astype(wide),
        "tq": tq,
        "tk": tk,
        "tv": tv,
        "window": window,
        "causal": window == (-1, 0),
    }
    given["dlse"] = given["dlse"] if rng.random() < 0.5 else None
    if sparsely:
        heads = num_heads_kv * (group if rng.random() < 0.5 else 1)
        shape = (total_q, heads, 3)
        given |= {
            "block_indices": rng.integers(-1, 6, shape).astype(np.int32),
            "block_size": 16,
            "own": bool(rng.random() < 0.5),
            "causal": bool(rng.random() < 0.7),
            "window": (-1, -1),
            "sliding": (15, 0) if rng.random() < 0.5 else None,
        }
        if rng.random() < 0.5:
            given["block_scale"] = rng.uniform(0.5, 1.5, shape).astype(wide)
            given["tblock_scale"] = rng.standard_normal(shape).astype(wide)
    return Question(q, k, v, *offsets, **(given | changes))


def right(q: Question, rounding: Any = None) -> Answers:
    """The reference's answers in the dtype of the question, its intermediates rounded or not."""
    where: tuple[Any, ...] = (q.cu_seqlens_q, q.cu_seqlens_k)
    options: dict[str, Any] = {"softmax_scale": q.softmax_scale, "rounding": rounding}
    beyond: Any = second
    first: Any = dense
    gate: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if q.block_indices is None:
        options["window"] = q.mask_window
    else:
        first = beyond = sparse
        where = (*where, q.block_indices)
        options |= {"block_size": q.block_size, "include_own_block": q.own, "causal": q.causal}
        options |= {"block_counts": q.block_counts, "block_scale": q.block_scale}
        gate = ({"tblock_scale": q.tblock_scale}, {"ddblock_scale": q.tblock_scale})
    qkv, direction = (q.q, q.k, q.v), (q.tq, q.tk, q.tv)
    found = dict(zip(("out", "lse"), first.forward(*qkv, *where, **options), strict=True))
    if q.sliding is not None:
        near = first.forward if first is dense else dense.forward
        window, scale = (q.sliding[0], 0 if q.causal else q.sliding[1]), q.softmax_scale
        mode = {"window": window, "softmax_scale": scale, "rounding": rounding}
        found["sliding out"], found["sliding lse"] = near(*qkv, *where[:2], **mode)
    given = (found["out"].astype(q.dtype), found["lse"])
    if q.out is not None:
        given = (q.out, q.lse)
    if q.dout is not None:
        grads = first.backward(q.dout, *qkv, *given, *where, dlse=q.dlse, **options)
        found |= dict(zip(("dq", "dk", "dv", "dblock_scale"), grads, strict=False))
    if q.dout is not None and q.tq is not None:
        names = ("ddout", "ddlse", "gq", "gk", "gv", "gblock_scale")
        extra = {"dlse": q.dlse} | gate[1] | options
        results = beyond.double_backward(*direction, q.dout, *qkv, *given, *where, **extra)
        found |= dict(zip(names, results, strict=False))
        results = beyond.jvp(*qkv, *direction, *where, **gate[0], **options)
        found |= dict(zip(("jvp out", "tout", "jvp lse", "tlse"), results, strict=True))
    wide = np.float64 if q.dtype == np.float64 else np.float32
    return {
        name: array.astype(wide if name in OTHERS else q.dtype)
        for name, array in found.items()
        if array is not None
    }


def truncated(x: np.ndarray) -> np.ndarray:
    """What a tensor core makes of a float32 operand that nobody rounded: TF32, towards zero."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def narrowed(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(BFLOAT16).astype(np.float32)


def flash(q: Question, operand: Callable[[np.ndarray], np.ndarray]) -> Answers:
    """First order in float32 with operands of products rounded; lse is what exp is taken with."""
    found = {name: np.zeros(a.shape, np.float32) for name, a in (("dq", q.q), ("dk", q.k))}
    found |= {"dv": np.zeros(q.v.shape, np.float32), "out": np.zeros(q.dout.shape, np.float32)}
    lse = np.full((q.num_heads_q, len(q.q)), -np.inf, np.float32)
    s = np.float32(q.scale)
    for rows, keys in dense.sequences(q.cu_seqlens_q, q.cu_seqlens_k):
        mask = dense.allowed(rows.stop - rows.start, keys.stop - keys.start, q.mask_window)
        for head in range(q.num_heads_q):
            here = (keys, head // q.group)
            Q, K, V, dO = (
                operand(a.astype(np.float32))
                for a in (q.q[rows, head], q.k[here], q.v[here], q.dout[rows, head])
            )
            S = np.where(mask, s * (Q @ K.T), -np.inf)
            L = dense.logsumexp(np, S).astype(np.float32)
            P = np.exp(S - dense.dead_to_inf(np, L)[:, None]).astype(np.float32)
            out = (operand(P) @ V).astype(q.dtype)
            D = (dO * out.astype(np.float32)).sum(axis=1)
            D = D if q.dlse is None else D - q.dlse[head, rows]
            dS = operand(P * (dO @ V.T - D[:, None]))
            found["out"][rows, head], lse[head, rows] = out, L
            found["dq"][rows, head] = s * (dS @ K)
            found["dk"][here] += s * (dS.T @ Q)
            found["dv"][here] += operand(P).T @ dO
    return {name: array.astype(q.dtype) for name, array in found.items()} | {"lse": lse}


def failing(found: tuple[Check, ...]) -> set[str]:
    return {check.name for check in found if check.verdict == "FAIL"}


def named(found: tuple[Check, ...], text: str) -> Check:
    """The check whose text begins with ``text``."""
    return next(check for check in found if check.text.startswith(text))


# ---- right answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("sparsely", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identities_hold(dtype: np.dtype[Any], sparsely: bool) -> None:
    """With intermediates rounded as results are, and with float16 ones behind float32."""
    verdicts = set()
    for seed in range(12):
        question = drawn(seed, dtype, sparsely=sparsely)
        rounding = {np.float64: None, np.float32: np.float16}.get(dtype.type, dtype)
        for check in checks(question, right(question, rounding), "one"):
            verdicts.add((check.name, check.verdict))
            assert check.verdict != "FAIL", (seed, check)
            assert check.value <= 0.5 * check.allowed or check.verdict == "-", (seed, check)
    names = {"I1 lse", "I1 out", "I2", "I3", "I4", "I5", "I6", "I10"}
    assert {(name, "pass") for name in names} <= verdicts


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_identities_hold_with_rounded_operands(dtype: np.dtype[Any]) -> None:
    """TF32 by truncation; bfloat16 operands; results of the latter that were widened."""
    no_direction = {"tq": None, "tk": None, "tv": None}
    for seed in range(12):
        question = drawn(seed, dtype, **no_direction)
        answers = flash(question, truncated if dtype == np.float32 else narrowed)
        assert not failing(checks(question, answers, "one")), seed
        if dtype == BFLOAT16:
            wide = {name: a.astype(np.float32) for name, a in answers.items()}
            names = ("q", "k", "v", "dout")
            inputs = {n: getattr(question, n).astype(np.float32) for n in names}
            assert not failing(checks(replace(question, **inputs), wide, "one")), seed


@pytest.mark.parametrize("change", ["large scores", "keys with a mean", "small", "equal", "ones"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_identities_hold_on_odd_numbers(dtype: np.dtype[Any], change: str) -> None:
    def changed(array: np.ndarray, factor: float, plus: float) -> np.ndarray:
        return (array.astype(np.float64) * factor + plus).astype(array.dtype)

    for seed in range(3):
        q = drawn(seed, dtype)
        changes: dict[str, dict[str, Any]] = {
            "large scores": {"q": changed(q.q, 4, 0), "k": changed(q.k, 4, 0)},
            "keys with a mean": {"q": changed(q.q, 1, 1), "k": changed(q.k, 1, 3)},
            "small": {"dout": changed(q.dout, 1e-5, 0), "dlse": None},
            "equal": {name: changed(getattr(q, name), 0, 1) for name in "qkv"},
            "ones": {"v": changed(q.v, 1, 5), "dout": changed(q.dout, 0, 1)},
        }
        q = replace(q, **changes[change])
        assert not failing(checks(q, right(q, dtype), "one"))


def test_long_problems_are_sampled() -> None:
    """Noise from some of the rows is that of all; every row of lse is looked at none the less."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1700, 2, 16)).astype(np.float32) for _ in range(4))
    offsets = np.array([0, 1500, 1700], dtype=np.int32)
    question = Question(q, k, v, offsets, offsets, causal=True, dout=dout)
    answers = flash(question, truncated)
    found = checks(question, answers, "one")
    assert not failing(found)
    assert max(check.value / check.allowed for check in found if check.allowed) < 0.7
    answers["lse"][1, 1234] += 1.0
    check = named(checks(question, answers, "one"), "exp(scores")
    assert (check.verdict, check.where) == (
        "FAIL",
        "sequence 0, head 1: 1 of 3400 rows, first row 1234 of sequence 0, head 1",
    )


def test_no_sequences_and_empty_ones() -> None:
    for lengths in ([], [0], [0, 0]):
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        q, k = np.zeros((2, 2, 8)), np.zeros((2, 1, 8))
        question = Question(q, k, k, offsets, offsets, dout=q, tq=q, tk=k, tv=k)
        found = checks(question, right(question), "one", call=right)
        assert not failing(found)


def test_what_is_missing_is_said() -> None:
    question = drawn(1)
    answers = right(question)
    found = checks(question, {"dq": answers["dq"], "dk": answers["dk"][:-1]}, "one")
    assert named(found, "<v, dv>").where == "there is no dv; there is no out"
    shapes = f"{answers['dk'][:-1].shape}, not {answers['dk'].shape}"
    assert named(found, "<q, dq>").where == f"dk has shape {shapes}"
    assert {check.verdict for check in found} <= {"-", "pass", "vacuous"}


def test_zeros_are_vacuous() -> None:
    question = replace(drawn(2), dlse=None)
    zeros = {name: np.zeros_like(a) for name, a in right(question).items()}
    found = checks(question, zeros, "one")
    assert named(found, "<q, dq>").verdict == named(found, "sum of dk").verdict == "vacuous"
    assert named(found, "sum of dv").verdict == "FAIL"


def test_part_of_a_larger_attention() -> None:
    """With the lse of more keys than these, rows of P need not sum to 1."""
    question = drawn(3, dlse=None)
    out, lse = dense.forward(
        question.q, question.k, question.v, question.cu_seqlens_q, question.cu_seqlens_k
    )
    question = replace(question, out=out, lse=lse + 1.0, tq=None, tk=None, tv=None)
    answers = right(question)
    found = checks(question, {name: answers[name] for name in ("dq", "dk", "dv")}, "one")
    assert not failing(found)
    assert named(found, "sum of dv").verdict == "-"
    assert named(found, "<q, dq>").verdict == "pass"


def test_poisoned_inputs() -> None:
    """A sequence of NaN does not count; nor do NaN in keys that nobody sees."""
    question = fixed(np.float32, causal=True)
    k = question.k.copy()
    k[9:24] = np.nan
    healthy = replace(question, k=np.nan_to_num(k))
    found = checks(replace(question, k=k), right(healthy), "one")
    assert not failing(found)
    answers = right(question)
    answers["dv"][25] = np.nan
    check = named(checks(question, answers, "one"), "sum of dv")
    assert (check.verdict, check.where, check.value) == ("FAIL", "sequence 2, NaN", np.inf)


# ---- wrong answers ----------------------------------------------------------------------------


def fixed(dtype: Any = np.float64, **changes: Any) -> Question:
    """Sequences of 9, 15 and 20 tokens, 4 heads on 2."""
    rng = np.random.default_rng(0)
    shapes = {"q": 4, "k": 2, "v": 2, "dout": 4, "tq": 4, "tk": 2, "tv": 2}
    drawn = {n: rng.standard_normal((46, h, 16)).astype(dtype) for n, h in shapes.items()}
    offsets = np.array([0, 9, 24, 44], dtype=np.int32)
    return Question(**{"cu_seqlens_q": offsets, "cu_seqlens_k": offsets} | drawn | changes)


def first(q: Question) -> Question:
    return replace(q, tq=None, tk=None, tv=None)


def padded(q: Question) -> Answers:
    """Zero keys up to the longest sequence."""
    longest = max(q.lengths_k)
    wide = {
        n: np.zeros((q.batch * longest, *a.shape[1:]), a.dtype)
        for n, a in {"k": q.k, "v": q.v}.items()
    }
    place = np.concatenate([np.arange(n) + b * longest for b, n in enumerate(q.lengths_k)])
    for name, array in (("k", q.k), ("v", q.v)):
        wide[name][place] = array[: len(place)]
    offsets = np.arange(q.batch + 1, dtype=np.int32) * longest
    answers = right(replace(q, **wide, cu_seqlens_k=offsets))
    for name in ("dk", "dv"):
        answers[name] = np.concatenate([answers[name][place], np.zeros_like(answers[name][:2])])
    return answers


def unmasked_backward(q: Question) -> Answers:
    """P without the mask, D of the masked out."""
    lse = dense.forward(q.q, q.k, q.v, q.cu_seqlens_q, q.cu_seqlens_k)[1]
    found = right(replace(q, causal=False, out=right(q)["out"], lse=lse))
    return found | {name: right(q)[name] for name in ("out", "lse")}


def last_of_group(q: Question) -> Answers:
    dout = np.where(np.arange(4)[:, None] % 2, q.dout, 0).astype(q.dtype)
    return right(q) | {n: right(replace(q, dout=dout))[n] for n in ("dk", "dv")}


def one_changed(name: str, factor: float) -> Callable[[Question], Answers]:
    """Key/value head 0 of the last sequence."""

    def answers(q: Question) -> Answers:
        found = right(q)
        found[name][24:44, 0] *= np.asarray(factor, dtype=found[name].dtype)
        return found

    return answers


def swapped(q: Question) -> Answers:
    found = right(q)
    return found | {"dk": found["dv"], "dv": found["dk"]}


def scaled(name: str) -> Callable[[Question], Answers]:
    def answers(q: Question) -> Answers:
        found = right(q)
        return found | {name: (found[name] / q.scale).astype(q.dtype)}

    return answers


def in_base_2(q: Question) -> Answers:
    found = right(q)
    return found | {"lse": found["lse"] / np.log(2).astype(found["lse"].dtype)}


DLSE = np.random.default_rng(1).standard_normal((4, 46)).astype(np.float32)
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Question], Answers], dict[str, str]]] = {
    # what the question is like, who answers it, what fails where
    "padded keys": (
        {},
        padded,
        {"exp(scores": "sequences 0, 1", "sum of dv": "sequences 0, 1"},
    ),
    "no mask in the backward": (
        {"causal": True},
        unmasked_backward,
        {"sum of dk": "all", "<v, dv>": "all"},
    ),
    "no delta": (
        {},
        lambda q: (
            right(q)
            | {n: right(replace(q, out=q.dout * 0, lse=right(q)["lse"]))[n] for n in ("dq", "dk")}
        ),
        {"sum of dk": "all"},
    ),
    "no dlse": (
        {"dlse": DLSE},
        lambda q: right(replace(q, dlse=None)),
        {"sum of dk": "all"},
    ),
    "group not summed": ({}, last_of_group, {"sum of dv": "all", "<v, dv>": "all"}),
    "lse in base 2": ({}, in_base_2, {"exp(scores": "all"}),
    "dq without scale": ({}, scaled("dq"), {"<q, dq>": "all"}),
    "dk and dv exchanged": ({}, swapped, {"sum of dv": "all", "<q, dq>": "all"}),
    "scores times 2": (
        {},
        lambda q: right(replace(q, softmax_scale=2 * q.scale)),
        {"exp(scores": "all"},
    ),
    "dv of one place": (
        {},
        one_changed("dv", 1.5),
        {"sum of dv": "sequence 2, kv head 0", "<v, dv>": "sequence 2, kv head 0"},
    ),
    "dk of one place": ({}, one_changed("dk", 0.5), {"<q, dq>": "sequence 2, kv head 0"}),
    "causal dropped": (
        {"causal": True},
        lambda q: right(replace(q, causal=False)),
        {"exp(": "all"},
    ),
    "first rows": (
        {"causal": True},
        lambda q: right(replace(q, causal=False)),
        {"a query with one key: out is its v": "all", "a query with one key: dq": "all"},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_answers_fail(fault: str, dtype: np.dtype[Any]) -> None:
    changes, answer, wanted = FAULTS[fault]
    question = first(fixed(dtype, **changes))
    found = checks(question, answer(question), "one")
    for text, where in wanted.items():
        check = named(found, text)
        assert check.verdict == "FAIL", check
        if dtype == np.float64:
            assert check.where.split(":")[0] == where, check


SECOND_FAULTS: dict[str, Callable[[Question, Answers], tuple[Answers, str]]] = {
    "ddout without the tangent of P": lambda q, found: (
        {"ddout": right(replace(q, tq=q.tq * 0, tk=q.tk * 0))["ddout"]},
        "<direction, gradients> = <dout, ddout>",
    ),
    "P held constant": lambda q, found: (
        {"gv": (found["gv"] + found["dv"]).astype(q.dtype)},
        "sum of gv",
    ),
    "gk without the direct term": lambda q, found: (
        {"gk": (found["gk"] * 0.5).astype(q.dtype)},
        "<tq, dq> + <q, gq>",
    ),
    "gv of another scale": lambda q, found: (
        {"gv": (found["gv"] * 2).astype(q.dtype)},
        "<tv, dv> + <v, gv>",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("fault", SECOND_FAULTS)
def test_wrong_second_order_fails(fault: str, dtype: np.dtype[Any]) -> None:
    question = fixed(dtype, causal=True)
    found = right(question)
    changes, text = SECOND_FAULTS[fault](question, found)
    assert named(checks(question, found | changes, "one"), text).verdict == "FAIL"


# ---- between runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("sparsely", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identities_between_runs_hold(dtype: np.dtype[Any], sparsely: bool) -> None:
    for seed in range(3):
        question = drawn(seed, dtype, sparsely=sparsely)
        rounding = None if dtype == np.float64 else dtype

        def call(q: Question, rounding: Any = rounding) -> Answers:
            return right(q, rounding)

        found = checks(question, call(question), "one", call=call)
        assert not failing(found)
        assert {check.name for check in found[-4:]} == set(RUNS)
        told = {check.name for check in found[-4:] if check.verdict == "pass"}
        assert told == set(RUNS)


RUNS = ("I8", "I9", "I11", "I12")


def leaking(q: Question) -> Answers:
    """The first key of the next sequence is seen."""
    offsets = q.cu_seqlens_k.copy()
    offsets[1:-1] += 1
    return right(replace(q, cu_seqlens_k=offsets))


def racing() -> Callable[[Question], Answers]:
    rng = np.random.default_rng(0)

    def answers(q: Question) -> Answers:
        found = right(q)
        kept = rng.random(found["dq"].shape) > 0.01
        return found | {"dq": np.where(kept, found["dq"], 0).astype(q.dtype)}

    return answers


RUN_FAULTS: dict[str, tuple[Callable[[], Callable[[Question], Answers]], set[str]]] = {
    "leak": (lambda: leaking, {"I9"}),
    "race": (racing, {"I12"}),
    "its own scale": (lambda: lambda q: right(replace(q, softmax_scale=None)), {"I11"}),
    "the first sequence knows it": (lambda: first_doubled, {"I8"}),
}


def first_doubled(q: Question) -> Answers:
    found = right(q)
    found["out"][: q.lengths_q[0]] *= 2
    return found


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_wrong_runs_fail(fault: str, dtype: np.dtype[Any]) -> None:
    make, wanted = RUN_FAULTS[fault]
    question, call = fixed(dtype), make()
    found = checks(question, call(question), "one", call=call)
    assert wanted <= failing(found[-4:]), found[-4:]


def test_where_runs_fail() -> None:
    """A leak into the first two sequences."""
    question = fixed()
    check = next(c for c in checks(question, {}, "one", call=leaking)[-4:] if c.name == "I9")
    assert check.where.startswith("out, lse, dq, ddout")
    assert "jvp lse, tlse: sequences 0, 1; dk" in check.where


def test_a_function_that_cannot_do_it() -> None:
    """What it raises is the reason; what is asked of it first must work."""

    def refuses(q: Question) -> Answers:
        raise ValueError("no")

    def only_default_scale(q: Question) -> Answers:
        return refuses(q) if q.softmax_scale is not None else right(q)

    question = fixed()
    found = checks(question, right(question), "one", call=refuses)[-4:]
    assert {check.where for check in found} == {"the function raised ValueError: no"}
    found = checks(question, right(question), "one", call=only_default_scale)[-4:]
    assert [c.name for c in found if c.verdict == "-"] == ["I11"]

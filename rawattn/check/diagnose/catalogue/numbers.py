"""Bugs of what is computed: scales, bases, lse, sums, and the row term of the backward pass.

Long by the catalogue.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    FORWARD,
    LOG2_E,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    Store,
    changed,
    times,
)
from rawattn.check.diagnose.engine.question import OF_SLOTS, Answers, Question

# ---- numbers ----------------------------------------------------------------------------------


def _times(factor: float, everywhere: bool) -> dict[str, Step]:
    def Y(c: Context) -> Floats:
        scores: Floats = c.r(factor * c.r(times(c.Q, c.K.T)))
        if everywhere:
            c.s = factor
        return scores

    return {"Y": Y}


def _factors(question: Question) -> dict[str, float]:
    s, d = question.scale, question.q.shape[2]
    named = {
        "1": 1.0,
        "1 / d": 1 / d,
        "1 / sqrt(d)": d**-0.5,
        "1 / sqrt(head_dim_v)": question.v.shape[2] ** -0.5,
        "sqrt(d)": d**0.5,
        "s * s": s * s,
        "s * log2(e)": s * LOG2_E,
        "s * ln 2": s / LOG2_E,
        "log2(e)": LOG2_E,
        "2 s": 2 * s,
        "s / 2": s / 2,
        "1 / sqrt(num_heads_q * d)": (d * question.num_heads_q) ** -0.5,
    }
    return {name: x for name, x in named.items() if not math.isclose(x, s, rel_tol=1e-3)}


def of_scores(question: Question) -> Iterator[Bug]:
    for text, factor in _factors(question).items():
        yield Bug("score-scale", text, FIRST, steps=_times(factor, everywhere=True))
        yield Bug("score-scale", f"{text}, scores alone", BACKWARD, steps=_times(factor, False))
    for text, factor in (("log2", LOG2_E), ("ln 2 times", 1 / LOG2_E)):
        yield Bug("lse-base-2", text, FORWARD, store=_scaled_lse(factor))
        in_base_2 = {"bP": _exp_of(factor)}
        yield Bug("lse-base-2", f"{text}, backward", BACKWARD, steps=in_base_2)
    yield Bug("lse-without-max", "", FORWARD, steps={"L": lambda c: c.softmax[0] - _top(c)})
    yield Bug("lse-without-max", "the maximum alone", FORWARD, steps={"L": _top})
    unscaled = {"L": lambda c: c.softmax[0] - _top(c) + _top(c) / c.s}
    look_at = "the maximum in lse: it is that of q . k, not yet multiplied by softmax_scale"
    yield Bug("lse-without-max", "unscaled maximum", FORWARD, None, unscaled, None, look_at)
    yield Bug("not-normalised", "", FORWARD, steps={"O": _not_normalised})
    yield Bug("not-normalised", "by lse", FORWARD, steps={"O": lambda c: np.exp(c.S) @ c.V})
    for dtype in ("float32", "float16"):
        yield Bug("no-max-subtraction", dtype, FORWARD, steps=_plain_exp(dtype))
        ratio = {"bP": _ratio_of_exps(dtype)}
        yield Bug("no-max-subtraction", f"{dtype}, exp(S) / exp(lse)", BACKWARD, steps=ratio)
    for columns in {question.q.shape[2] // step * step for step in (16, 32, 64)}:
        if 0 < columns < question.q.shape[2]:
            yield Bug("head-dim-tail", f"scores of {columns}", FIRST, steps=_fewer(columns))
            yield Bug("head-dim-tail", f"{columns} stored", FIRST, store=_columns(columns))
    for columns in {question.v.shape[2] // step * step for step in (16, 32, 64)}:
        if 0 < columns < question.v.shape[2]:
            yield Bug("head-dim-tail", f"{columns} of v", FIRST, store=_columns(columns))
            yield Bug("head-dim-tail", f"dP of {columns}", BACKWARD, steps=_fewer_v(columns))


def _top(c: Context) -> Floats:
    top: Floats = c.S.max(axis=-1, initial=-np.inf)
    return np.where(np.isneginf(top), 0.0, top)


def _scaled_lse(factor: float) -> Store:
    return lambda question, answers: (
        answers
        | {name: answers[name] * factor for name in ("lse", "sliding lse") if name in answers}
    )


def _exp_of(factor: float) -> Step:
    """P with an lse in another base than that it was stored in."""

    def P(c: Context) -> Floats:
        L = np.where(np.isneginf(c.L), np.inf, c.L * factor)
        return np.asarray(c.r(np.exp(c.S - L[..., None])))

    return P


def _not_normalised(c: Context) -> Floats:
    return np.asarray(np.exp(c.S - _top(c)[..., None]) @ c.V)


def _plain_exp(dtype: str) -> dict[str, Step]:
    def softmax(c: Context) -> tuple[Floats, Floats]:
        with np.errstate(all="ignore"):
            weights = np.exp(c.S.astype(dtype)).astype(dtype)
            sums = weights.sum(axis=-1)
            L = np.log(sums.astype(np.float64))
            P = (weights / np.where(sums == 0, 1, sums)[..., None]).astype(np.float64)
        return L, P

    return {"softmax": softmax}


def _ratio_of_exps(dtype: str) -> Step:
    def P(c: Context) -> Floats:
        with np.errstate(all="ignore"):
            over, under = (np.exp(x.astype(dtype)) for x in (c.S, c.L))
            found = (over / under[..., None]).astype(np.float64)
        return np.where(np.isneginf(c.L)[..., None], 0.0, found)

    return P


def _fewer(columns: int) -> dict[str, Step]:
    return {"Y": lambda c: c.r(c.s * c.r(times(c.Q[..., :columns], c.K[:, :columns].T)))}


def _fewer_v(columns: int) -> dict[str, Step]:
    return {"dP": lambda c: c.r(times(c.dO[..., :columns], c.V[:, :columns].T))}


def _columns(columns: int) -> Store:
    """Columns from there on stay 0, in what is wide enough."""

    def store(question: Question, answers: Answers) -> Answers:
        found = dict(answers)
        for name, x in answers.items():
            if x.ndim == 3 and name not in OF_SLOTS and x.shape[2] > columns:
                found[name] = x.copy()
                found[name][..., columns:] = 0
        return found

    return store


def of_backward(question: Question) -> Iterator[Bug]:
    scaled: dict[str, dict[str, Step]] = {
        "without": {"dQ": lambda c: c.r(times(c.dY, c.K)), "dK": _dK(0)},
        "twice": {"dQ": lambda c: c.r(c.s * c.s * c.r(times(c.dY, c.K))), "dK": _dK(2)},
        "by log2(e)": {"dQ": lambda c: LOG2_E * STEPS["dQ"](c), "dK": _log2_e(STEPS["dK"])},
        "by ln 2": {"dQ": lambda c: STEPS["dQ"](c) / LOG2_E, "dK": _ln_2(STEPS["dK"])},
    }
    base = "the factor between exp2 and exp: q (or k) times softmax_scale log2(e) goes into the "
    base += "scores, and the gradient has to be made of q times softmax_scale alone"
    for text, of_both in scaled.items():
        for tensors, steps in by_tensor(of_both):
            told = base if text.startswith("by ") else ""
            form = f"{tensors}, {text}"
            yield Bug("output-scale", form, BACKWARD, steps=steps, look_at=told)
    yield Bug("delta-omitted", "", BACKWARD, steps={"D": lambda c: np.zeros(c.dO.shape[:2]) - c.dL})
    if question.dlse is not None:
        yield Bug("delta-omitted", "dlse too", BACKWARD, steps={"D": lambda c: 0.0 * c.L})
        without: Step = lambda c: (c.dO * c.O).sum(axis=-1)  # noqa: E731
        yield Bug("lse-gradient-dropped", "", BACKWARD, steps={"D": without})
        plus: Step = lambda c: (c.dO * c.O).sum(axis=-1) + c.dL  # noqa: E731
        yield Bug("lse-gradient-sign", "", BACKWARD, steps={"D": plus})
    for text, out in _other_outs(question).items():
        yield Bug("delta-of-another-out", text, BACKWARD, steps={"D": out})
    masked: Step = lambda c: c.r(np.where(c.W > 0, c.dP - c.D[..., None], 0.0))  # noqa: E731
    yield Bug("softmax-backward-without-p", "", BACKWARD, steps={"dS": masked})
    shapes = {"dq": question.q.shape, "dk": question.k.shape, "dv": question.v.shape}
    for one, other in (("dk", "dv"), ("dq", "dk"), ("dq", "dv")):
        if shapes[one] == shapes[other]:
            text = f"{one} and {other}"
            yield Bug("gradients-swapped", text, BACKWARD, store=_swapped(one, other))


def by_tensor(steps: dict[str, Step]) -> Iterator[tuple[str, dict[str, Step]]]:
    """Steps for dQ, dK and dV: all, each alone, and those of keys together."""
    yield "everywhere", steps
    for names in (("dQ",), ("dK",), ("dV",), ("dK", "dV")):
        if set(names) < set(steps):
            yield " and ".join(names), {name: steps[name] for name in names}


def _dK(power: int) -> Step:
    return lambda c: c.s**power * c.r(c.dY.swapaxes(1, 2) @ c.Q)


def _log2_e(step: Step) -> Step:
    return lambda c: LOG2_E * step(c)


def _ln_2(step: Step) -> Step:
    return lambda c: step(c) / LOG2_E


def _other_outs(question: Question) -> dict[str, Step]:
    def other(change: Callable[[Context, Floats], Floats]) -> Step:
        def D(c: Context) -> Floats:
            out = change(c, c.given[0])
            O = out[c.view.rows[None, :], c.view.heads[:, None]]  # noqa: E741
            return np.asarray((c.dO * O).sum(axis=-1) - c.dL)

        return D

    def unmasked(c: Context) -> Floats:
        keys, head = c.view.keys, c.view.head_kv  # those too that nobody sees
        K, V = (np.asarray(x[keys, head], dtype=np.float64) for x in (question.k, question.v))
        scores = changed(c, S=c.s * times(c.Q, K.T))
        found = times(STEPS["softmax"](scores)[1], V)
        return np.asarray((c.dO * found).sum(axis=-1) - c.dL)

    def nothing(out: Floats) -> Floats:
        return np.zeros_like(out[:1])

    found = {
        "of the next row": other(lambda c, out: np.concatenate((out[1:], nothing(out)))),
        "of the row before": other(lambda c, out: np.concatenate((nothing(out), out[:-1]))),
    }
    if question.num_heads_q > 1:
        found |= {
            "of the next head": other(lambda c, out: np.roll(out, -1, axis=1)),
            "of the head before": other(lambda c, out: np.roll(out, 1, axis=1)),
            "of the first head": other(lambda c, out: np.repeat(out[:, :1], out.shape[1], 1)),
            "of the heads reversed": other(lambda c, out: out[:, ::-1]),
            "of head h // group": other(_of_kv_head),
        }
    if question.mask_window != (-1, -1):
        found["of unmasked attention"] = unmasked
    return found


def _of_kv_head(c: Context, out: Floats) -> Floats:
    return np.asarray(out[:, np.arange(out.shape[1]) // c.question.group])


def _swapped(one: str, other: str) -> Store:
    return lambda question, answers: answers | {one: answers[other], other: answers[one]}

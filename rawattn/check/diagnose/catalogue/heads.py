"""Bugs of the axis of heads: gradients summed over other groups, softmaxes along other axes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue import reading
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    NO_BUG,
    PROGRAMS,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
    run_steps,
)
from rawattn.check.diagnose.engine.question import Question


def by_remainder(question: Question) -> Floats:
    """Heads h with h % num_heads_kv == a for key/value head a."""
    heads = np.arange(question.num_heads_q)
    found = heads[None, :] % question.num_heads_kv == np.arange(question.num_heads_kv)[:, None]
    return np.asarray(found.astype(np.float64))


def reduced(weights: Floats, text: str, names: Sequence[str] = ("dk", "dv")) -> Bug:
    """dk and dv of key/value head a as the sum of weights[a, h] times what head h gives."""

    def of(name: str) -> Step:
        def step(c: Context) -> Floats:
            parts = []
            for head in np.nonzero(weights[c.view.head_kv])[0]:
                one = of_head(c, int(head))
                parts.append(weights[c.view.head_kv, head] * np.asarray(STEPS[name](one))[0])
            shape = (len(c.view.keys), c.Q.shape[2] if name == "dK" else c.dO.shape[2])
            return np.stack(parts) if parts else np.zeros((1, *shape))

        return step

    steps = {step: of(step) for step in (f"d{name[1:].upper()}" for name in names)}
    return Bug("gqa-reduction-map", f"{' and '.join(names)}: {text}", BACKWARD, steps=steps)


def of_head(c: Context, head: int) -> Context:
    """A view's context with one query head, and the key/value head that it belongs to."""
    question, weight = c.question, c.view.weight
    view = replace(
        c.view,
        heads=np.array([head]),
        head_kv=head // question.group,
        weight=weight[:1],
    )
    one = changed(c, view=view, W=view.weight)
    for name, x in reading.arrays_of(c).items():
        if name in reading.OPERANDS:
            setattr(one, reading.OPERANDS[name], reading.of_view(one, name, x))
    run_steps(one, PROGRAMS["backward"][: PROGRAMS["backward"].index("dQ")], NO_BUG)
    return one


# ---- other axes -------------------------------------------------------------------------------


def over_queries(where: str) -> dict[str, Step]:
    """A softmax, or its derivative, whose sums run over queries in place of keys."""

    def softmax(c: Context) -> tuple[Floats, Floats]:
        top = np.nan_to_num(c.S.max(axis=1, keepdims=True), neginf=0.0)
        weights = np.exp(c.S - top)
        sums = weights.sum(axis=1, keepdims=True)
        P = weights / np.where(sums == 0, 1.0, sums)
        return STEPS["softmax"](c)[0], np.asarray(c.r(P))

    def dS(c: Context) -> Floats:
        D = (c.P * c.dP).sum(axis=1, keepdims=True)
        return np.asarray(c.r(c.P * (c.dP - D)))

    return {"softmax": softmax} if where == "forward" else {"dS": dS}


def heads_as_tokens(question: Question) -> Iterator[Bug]:
    """Attention of the heads of a token to each other, in place of the tokens."""
    if question.lengths_q != question.lengths_k:
        return
    forms = ["", "causal"] if question.mask_window != (-1, -1) else [""]
    for form in forms:
        for repeated in (False, True) if question.group > 1 else (False,):
            text = ", ".join(("over the heads of a token", *[form] * bool(form)))
            text += ", key/value heads repeated" * repeated
            steps = _across_heads(form == "causal", repeated)
            yield Bug("input-layout", text, FIRST, steps=steps)


def _across_heads(causal: bool, repeated: bool) -> dict[str, Step]:
    def of(c: Context) -> dict[str, Floats]:
        question, r = c.question, c.r
        rows = c.view.rows
        arrays = {
            n: np.asarray(x, dtype=np.float64)
            for n, x in reading.arrays_of(c).items()
            if n != "lse"
        }
        q, k, v = (arrays[name][rows] for name in ("q", "k", "v"))
        if repeated:
            k, v = (np.repeat(x, question.group, axis=1) for x in (k, v))
        S = r(question.scale * r(np.einsum("thd,tgd->thg", q, k)))
        if causal:
            S = np.where(np.tri(*S.shape[1:]) > 0, S, -np.inf)
        top = S.max(axis=-1, keepdims=True)
        sums = np.exp(S - top).sum(axis=-1, keepdims=True)
        P = r(np.exp(S - top) / sums)
        found = {"O": r(c.o(P) @ v), "L": (np.log(sums) + top)[..., 0]}
        if "dout" not in arrays:
            return found
        dout = arrays["dout"][rows]
        dP = r(dout @ v.swapaxes(1, 2))
        dS = r(P * (dP - (P * dP).sum(axis=-1, keepdims=True)))
        dK = question.scale * (c.o(dS).swapaxes(1, 2) @ q)
        dV = c.o(P).swapaxes(1, 2) @ dout
        if repeated:
            dK, dV = (
                x.reshape(len(x), -1, question.group, x.shape[2]).sum(axis=2) for x in (dK, dV)
            )
        return found | {"dQ": question.scale * (c.o(dS) @ k), "dK": dK, "dV": dV}

    def step(name: str) -> Step:
        def found(c: Context) -> Floats:
            x = of(c)[name]
            if name in ("dK", "dV"):
                heads = np.zeros((len(c.view.heads), len(c.view.keys), x.shape[2]))
                heads[0] = x[:, c.view.head_kv]
                return heads
            return np.asarray(x[:, c.view.heads].swapaxes(0, 1))

        return found

    return {name: step(name) for name in ("L", "O", "dQ", "dK", "dV")}

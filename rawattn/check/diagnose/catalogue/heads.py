"""Bugs of the axis of heads: other maps of groups, softmaxes along other axes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.engine.attention import BACKWARD, FORWARD, Bug, See, View
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed


def bugs(question: Question) -> Iterator[Bug]:
    """Those of dense attention alone."""
    if 1 < question.num_heads_kv and 1 < question.group:
        yield _reduced(question)
    yield Bug("softmax-axis", "forward", FORWARD, steps={"softmax": _over_queries})
    yield Bug("softmax-axis", "backward", BACKWARD, steps={"dS": _dS_over_queries})
    if question.num_heads_q > 1:
        yield from _heads_as_tokens(question)


def by_map(head_kv: Sequence[int] | np.ndarray) -> See:
    """Query head h with key/value head head_kv[h]."""

    def one(view: View, i: int) -> View:
        own, heads = slice(i, i + 1), view.heads[i : i + 1]
        weight = view.weight[own] if len(view.weight) > 1 else view.weight
        slot, selections = (None if x is None else x[own] for x in (view.slot, view.selections))
        found = replace(view, heads=heads, head_kv=int(head_kv[heads[0]]))
        return replace(found, weight=weight, slot=slot, selections=selections)

    return lambda question, views: [one(view, i) for view in views for i in range(len(view.heads))]


def _reduced(question: Question) -> Bug:
    """dk and dv of key/value head a as sums over the heads h with h % num_heads_kv == a."""
    of = np.arange(question.num_heads_q) % question.num_heads_kv
    text, steps = "h % num_heads_kv", {"Y": _with_right_keys}
    return Bug("gqa-reduction-map", text, BACKWARD, by_map(of), steps)


def _with_right_keys(c: Context) -> Floats:
    own = replace(c.view, head_kv=int(c.view.heads[0]) // c.question.group)
    there = changed(c, view=own)
    c.K, c.V = (of_view(there, name, getattr(c.question, name)) for name in ("k", "v"))
    return np.asarray(STEPS["Y"](c))


# ---- other axes -------------------------------------------------------------------------------


def _over_queries(c: Context) -> tuple[Floats, Floats]:
    """A softmax whose sums run over queries in place of keys."""
    top = np.nan_to_num(c.S.max(axis=1, keepdims=True), neginf=0.0)
    weights = np.exp(c.S - top)
    sums = weights.sum(axis=1, keepdims=True)
    P = weights / np.where(sums == 0, 1.0, sums)
    return STEPS["softmax"](c)[0], np.asarray(c.r(P))


def _dS_over_queries(c: Context) -> Floats:
    D = (c.P * c.dP).sum(axis=1, keepdims=True)
    return np.asarray(c.r(c.P * (c.dP - D)))


def _heads_as_tokens(question: Question) -> Iterator[Bug]:
    """Attention of the heads of a token to each other, in place of the tokens."""
    if question.lengths_q != question.lengths_k:
        return
    for causal in (False, True) if question.mask_window != (-1, -1) else (False,):
        for repeated in (False, True) if question.group > 1 else (False,):
            text = "over the heads of a token" + ", causal" * causal
            text += ", key/value heads repeated" * repeated
            steps = {name: partial(_across_heads, name, causal, repeated) for name in ("L", "O")}
            yield Bug("input-layout", text, FORWARD, steps=steps)


def _across_heads(name: str, causal: bool, repeated: bool, c: Context) -> Floats:
    """L, or O, of the tokens of a view."""
    question, rows = c.question, c.view.rows
    q, k, v = (np.asarray(getattr(question, n)[rows]).astype(np.float64) for n in "qkv")
    if repeated:
        k, v = (np.repeat(x, question.group, axis=1) for x in (k, v))
    S = c.r(question.scale * c.r(q @ k.swapaxes(1, 2)))
    S = np.where(np.tri(*S.shape[1:]) > 0, S, -np.inf) if causal else S
    L = np.logaddexp.reduce(S, axis=-1, keepdims=True)
    if name == "L":
        return np.asarray(L[:, c.view.heads, 0].T)
    return np.asarray(c.r(c.o(c.r(np.exp(S - L))) @ v)[:, c.view.heads].swapaxes(0, 1))

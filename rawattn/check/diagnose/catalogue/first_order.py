"""Bugs of the forward pass and its gradients: softcap, sinks, scales, lse, sums, heads, columns."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np

from rawattn.check.diagnose.catalogue import maps, stages
from rawattn.check.diagnose.catalogue.masks import dead, masks, neighbours, spoilt
from rawattn.check.diagnose.catalogue.second_order import JVP, SECOND, multiple, with_values
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, FORWARD, Bug, Step, View
from rawattn.check.diagnose.engine.question import OF_SLOTS, Answers, Question
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, changed, row_max

SUMS: dict[str, Callable[[Floats], Floats]] = {  # the gradients of a group's heads in one
    "the last": lambda x: x[-1],
    "the first": lambda x: x[0],
    "the mean": lambda x: x.mean(axis=0),
}
LSES: tuple[tuple[str, str, Callable[[Floats, Floats], Floats]], ...] = (  # of lse, largest score
    ("lse-base-2", "log2", lambda L, top: L * LOG2_E),
    ("lse-base-2", "ln 2 times", lambda L, top: L / LOG2_E),
    ("lse-without-max", "", lambda L, top: L - top),
)
SLOPE = "softcap-slope-omitted"
CURVES: dict[str, Callable[..., tuple[Floats, ...]]] = {  # of S, its slope, the bend, and the cap
    "1 - tanh": lambda S, _, bend, cap: (S, 1 - S / cap, bend),
    "1 - S^2, of the capped score,": lambda S, _, bend, cap: (S, 1 - S**2, bend),
    "1 - tanh^2, of the capped score,": lambda S, _, b, cap: (S, 1 - np.tanh(S / cap) ** 2, b),
}


def bugs(question: Question) -> Iterator[Bug]:
    yield from _of_options(question)
    yield from masks(question)
    yield from neighbours(question)
    yield from bugs_anywhere(question)
    yield from stages.tiles(question)
    # gradients of one tile alone, which fewer pairs would explain too, in more words
    of_sums = stages.sums(question, "backward", ("dq", "dk", "dv"))
    yield from (bug for bug in of_sums if bug.name == stages.OVER)
    if dead(question).any():
        yield Bug("dead-rows", "NaN", FIRST, store=partial(spoilt, dead))
        L: Step = lambda c: np.where(np.isneginf(c.L), np.log(c.S.shape[2]), c.L)  # noqa: E731
        # scores of -1e30, say, for all keys of a row: equal, and so is their softmax
        S: Step = lambda c: np.where((c.W > 0).any(axis=2, keepdims=True), STEPS["S"](c), 0.0)  # noqa: E731
        yield Bug("dead-rows", "mean of v", FIRST, steps={"S": S, "bP": with_values("bP", L=L)})


def _of_options(question: Question) -> Iterator[Bug]:
    if question.softcap is not None:
        yield Bug("softcap-dropped", steps={"cap": lambda c: (c.Y, 1.0, 0.0)})
        straight = {"cap": lambda c: (STEPS["cap"](c)[0], 1.0, 0.0)}
        yield Bug(SLOPE, "1 in its place", BACKWARD + SECOND + JVP, steps=straight)
        twice = {"tdY": with_values("tdY", tY=lambda c: c.E)}
        yield Bug(SLOPE, "the bend times E, the slope twice", SECOND, steps=twice)
        for words, of in CURVES.items():
            other = {"cap": lambda c, of=of: of(*STEPS["cap"](c), c.question.softcap)}
            yield Bug(SLOPE, f"{words} in its place", SECOND + JVP, steps=other)
    if question.sinks is None:
        return
    none = with_values("softmax", sink=lambda c: None)
    L, P, P0 = (lambda c: none(c)[0]), (lambda c: none(c)[1]), {"P0": lambda c: 0.0}
    yield Bug("sinks-dropped", "", ("forward", "jvp"), steps={"softmax": none} | P0)
    yield Bug("sinks-dropped", "in lse alone", FORWARD, steps={"L": L})
    yield Bug("sinks-dropped", "in out alone", FORWARD, steps={"P": P})
    unsunk = {"L": lambda c: np.where(c.S.shape[2] == 0, -np.inf, STEPS["L"](c))}
    yield Bug("sinks-dropped", "in lse of sequences without keys", FORWARD, steps=unsunk)
    yield Bug("sinks-dropped", "own softmax", ("backward", "second"), steps={"bP": P} | P0)
    sinks, h = np.asarray(question.sinks, dtype=np.float64), np.arange(question.num_heads_q)
    raised = with_values("softmax", sink=lambda c: c.sink + c.S.max(axis=-1, initial=-np.inf))
    text = "exp(sink), not relative to the maximum"
    yield Bug("sinks-misplaced", text, FORWARD, steps={"softmax": raised})
    found = {"exp(softmax_scale sink)": (question.scale, h), "exp(ln 2 sink)": (1 / LOG2_E, h)}
    of_heads = maps.other_heads(h, len(h), question.group)
    found |= {f"that of {words}": (1.0, heads) for words, heads in of_heads.items()}
    for words, (times, heads) in found.items():
        if (times * sinks[heads] != sinks).any():
            sink = partial(_of_heads, times, heads)  # of any problem's sinks
            steps = {name: with_values(name, sink=sink) for name in ("softmax", "P0")}
            yield Bug("sinks-misplaced", words, ("forward", "jvp"), steps=steps)


def _of_heads(times: float, heads: np.ndarray, c: Context) -> Floats:
    return np.asarray(times * np.asarray(c.question.sinks, float)[heads[c.view.heads], None])


def bugs_anywhere(question: Question) -> Iterator[Bug]:
    """Those that have nothing to do with masks and tiles of keys."""
    yield from _of_scores(question)
    masked = {"dS": lambda c: c.r(np.where(c.W > 0, c.dP - c.D[..., None], 0.0))}
    yield Bug("softmax-backward-without-p", "", BACKWARD, steps=masked)
    if question.dlse is not None:
        alone = {"dS": lambda c: STEPS["dS"](c) + (c.W > 0) * (1 - c.P) * c.dL[..., None]}
        yield Bug("softmax-backward-without-p", "its term dlse alone", BACKWARD, steps=alone)
    shapes = {"dq": question.q.shape, "dk": question.k.shape, "dv": question.v.shape}
    for one, other in combinations(shapes, 2):
        if shapes[one] == shapes[other]:
            swap = lambda _, x, a=one, b=other: x | {a: x[b], b: x[a]}  # noqa: E731
            yield Bug("gradients-swapped", f"{one} and {other}", BACKWARD, store=swap)
    if question.group > 1:
        if question.num_heads_kv > 1:
            yield Bug("gqa-head-map", "h % num_heads_kv", FIRST, _by_remainder)
        for text, total in SUMS.items():
            steps = {"sum_heads": lambda c, total=total: total}
            yield Bug("gqa-group-not-summed", text, (*BACKWARD, "second"), steps=steps)


def _by_remainder(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Query head h with key/value head h % num_heads_kv."""

    def one(view: View, i: int) -> View:
        given = {x: getattr(view, x) for x in ("heads", "weight", "slot", "selections")}
        own = {n: x[i : i + 1] for n, x in given.items() if x is not None and len(x) > 1}
        return replace(view, **own, head_kv=int(view.heads[i]) % question.num_heads_kv)

    return [one(view, i) for view in views for i in range(len(view.heads))]


def _of_scores(question: Question) -> Iterator[Bug]:
    s, d, d_v = question.scale, question.q.shape[2], question.v.shape[2]
    found = {"1": 1.0, "1 / d": 1 / d, "1 / sqrt(d)": d**-0.5, "1 / sqrt(head_dim_v)": d_v**-0.5}
    found |= {"sqrt(d)": d**0.5, "s * s": s * s, "s * log2(e)": s * LOG2_E, "s * ln 2": s / LOG2_E}
    found |= {"s / sqrt(d), the default on top of a given one": s * d**-0.5}
    for text, scale in found.items():
        if not math.isclose(scale, question.scale, rel_tol=1e-3):
            alone = {"Y": partial(_scaled, x=scale, everywhere=False)}
            yield Bug("score-scale", text, FIRST, steps={"Y": partial(_scaled, x=scale)})
            yield Bug("score-scale", f"{text}, scores alone", BACKWARD, steps=alone)
    for bug, text, lse in LSES:
        told = {"L": lambda c, lse=lse: lse(c.softmax[0], row_max(c))}
        read = {"L": lambda c, lse=lse: lse(c.L, row_max(c))}
        yield Bug(bug, text, FORWARD, steps=told)
        yield Bug(bug, f"{text}, backward", BACKWARD, steps={"bP": with_values("bP", **read)})
    without = {"bP": lambda c: c.r(np.exp(c.S))}
    yield Bug("statistics-misplaced", "an lse of 0, as if not written", BACKWARD, steps=without)
    power = {"bP": with_values("bP", **{name: multiple(name, 1 / LOG2_E) for name in "SL"})}
    yield Bug("score-scale", "P is exp2(S - lse)", BACKWARD, steps=power)
    undivided = {"O": lambda c: np.exp(c.S - row_max(c)[..., None]) @ c.V}
    yield Bug("not-normalised", "", FORWARD, steps=undivided)
    yield Bug("no-max-subtraction", "in float32", FORWARD, steps={"softmax": _plain_exp})
    products = {"Q K^T": "Y Q K", "dO V^T": "dP dO V", "Q K^T and dO V^T": "Y Q K, dP dO V"}
    products["dO ddv^T"] = "tdP dO tV"
    width = min(question.q.shape[2], question.v.shape[2])
    sizes = {x.shape[2] // deep * deep for x in (question.q, question.v) for deep in (16, 32, 64)}
    for columns, (words, some) in product({width, *sizes} - {0}, products.items()):
        reads = [one.split() for one in some.split(", ")]
        cut = {x: lambda c, x=x, n=columns: getattr(c, x)[..., :n] for _, *of in reads for x in of}
        steps = {step: with_values(step, **{x: cut[x] for x in of}) for step, *of in reads}
        stages = SECOND if "dd" in words else FIRST if "Q" in words else BACKWARD
        yield Bug("head-dim-tail", f"{words} of the first {columns}", stages, steps=steps)
    for columns in sizes - {0}:
        yield Bug("head-dim-tail", f"{columns} stored", FIRST, store=partial(_first, columns))


def _scaled(c: Context, x: float, everywhere: bool = True) -> Floats:
    """Scores with another scale, which dQ and dK have too where it is ``everywhere``."""
    c.s = x if everywhere else c.s
    return np.asarray(STEPS["Y"](changed(c, s=x)))


def _plain_exp(c: Context) -> tuple[Floats, Floats]:
    with np.errstate(all="ignore"):
        weights = np.exp(c.S.astype(np.float32))
        sums = weights.sum(axis=-1)
        P = weights / np.where(sums == 0, 1, sums)[..., None]
        return np.log(sums.astype(np.float64)), P.astype(np.float64)


def _first(columns: int, question: Question, answers: Answers) -> Answers:
    """Those columns, and nothing for the others."""
    of = {name: x for name, x in answers.items() if x.ndim == 3 and name not in OF_SLOTS}
    return answers | {n: np.where(np.arange(x.shape[2]) < columns, x, 0.0) for n, x in of.items()}

"""The catalogue of bugs in the forward pass and its gradients, in the forms that kernels have them.

Long by the catalogue. Bugs that no planted computation can reproduce, because nobody knows the
numbers that came in, are found by their structure, in ``match``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine import (
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    Store,
    View,
    sequences,
    times,
    views_of,
)
from rawattn.check.diagnose.question import BY_ROW, OF_KEYS, OF_SLOTS, Answers, Question

TILES = (8, 16, 32, 64, 128)
FIRST = ("forward", "backward")
BACKWARD = ("backward",)
FORWARD = ("forward",)


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    tiles = [tile for tile in TILES if tile < 2 * longest]
    yield from _masks(question)
    yield from _neighbours(question, tiles)
    yield from bugs_anywhere(question)
    for tile in tiles:
        yield from _tiles(question, tile)
    yield from _dead_rows(question)


def bugs_anywhere(question: Question) -> Iterator[Bug]:
    """Those that have nothing to do with masks and tiles of keys."""
    yield from _numbers(question)
    yield from _backward_numbers(question)
    yield from _heads(question)
    yield from _layouts(question)


# ---- masks ------------------------------------------------------------------------------------


def distances(question: Question, view: View, top_left: bool = False) -> np.ndarray:
    """How far a key lies behind the query's own position, (n, m); keys before are negative."""
    b = view.sequence
    first_q, first_k = question.cu_seqlens_q[b], question.cu_seqlens_k[b]
    shift = 0 if top_left else question.lengths_k[b] - question.lengths_q[b]
    keys = np.where(view.keys < 0, first_k + np.arange(len(view.keys)), view.keys)
    return np.asarray((keys - first_k)[None, :] - (view.rows - first_q)[:, None] - shift)


def within(distance: np.ndarray, left: float, right: float) -> np.ndarray:
    seen: np.ndarray = ((distance >= -left) & (distance <= right))[None]
    return seen.astype(np.float64)


def bounds(question: Question) -> tuple[float, float]:
    """The window with infinity for an open side."""
    left, right = question.mask_window
    return (math.inf if left < 0 else left), (math.inf if right < 0 else right)


def windowed(left: float, right: float, top_left: bool = False) -> See:
    """Another window than the question's."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [
            replace(v, weight=within(distances(question, v, top_left), left, right)) for v in views
        ]

    return see


def _masks(question: Question) -> Iterator[Bug]:
    left, right = bounds(question)
    if question.causal:
        yield Bug("causal-dropped", "", FIRST, windowed(left, math.inf))
        yield Bug("causal-off-by-one", "j <= i + 1", FIRST, windowed(left, 1))
        yield Bug("causal-off-by-one", "j < i", FIRST, windowed(left, -1))
        if question.lengths_q != question.lengths_k:
            yield Bug("causal-alignment", "top-left", FIRST, windowed(left, 0, top_left=True))
    elif question.window != (-1, -1) and question.lengths_q != question.lengths_k:
        yield Bug("causal-alignment", "window", FIRST, windowed(left, right, top_left=True))
    for change in (1, -1):
        if left < math.inf:
            yield Bug(
                "window-off-by-one", f"left {change:+}", FIRST, windowed(left + change, right)
            )
        if right < math.inf and not question.causal:
            yield Bug(
                "window-off-by-one", f"right {change:+}", FIRST, windowed(left, right + change)
            )
        if max(left, right) < math.inf and not question.causal:
            both = windowed(left + change, right + change)
            yield Bug("window-off-by-one", f"both sides {change:+}", FIRST, both)
    if left < math.inf:
        yield Bug("window-dropped", "left", FIRST, windowed(math.inf, right))
    if right < math.inf and not question.causal:
        yield Bug("window-dropped", "right", FIRST, windowed(left, math.inf))
        if left < math.inf:
            yield Bug("window-dropped", "both sides", FIRST, windowed(math.inf, math.inf))
    if min(left, right) < math.inf:
        open_ = windowed(math.inf, math.inf)
        for name, see in (("all", open_), ("right side", windowed(left, math.inf))):
            yield Bug("mask-missing-in-backward", f"{name}, exp(S - lse)", BACKWARD, see)
            renormalised = {"bP": lambda c: STEPS["softmax"](c)[1]}
            yield Bug("mask-missing-in-backward", f"{name}, softmax", BACKWARD, see, renormalised)


# ---- padding and neighbours -------------------------------------------------------------------


def longer(question: Question, view: View, before: int, after: int, zeros: bool) -> View:
    """A view with more keys on both sides: rows of zeros, or what lies there in memory."""
    b = view.sequence
    start, stop = int(question.cu_seqlens_k[b]), int(question.cu_seqlens_k[b + 1])
    if not zeros:
        before, after = min(before, start), min(after, len(question.k) - stop)
    keys = np.arange(start - before, stop + after)
    inside = (keys >= start) & (keys < stop)
    distance = (keys - start)[None, :] - (view.rows - question.cu_seqlens_q[b])[:, None]
    distance = distance - (question.lengths_k[b] - question.lengths_q[b])
    weight = within(distance, *bounds(question))
    return replace(view, keys=np.where(inside | (not zeros), keys, -1), weight=weight)


def _more_keys(after: Callable[[Question, int], int], before: int = 0, zeros: bool = False) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [
            longer(question, v, before, after(question, question.lengths_k[v.sequence]), zeros)
            for v in views
        ]

    return see


def _to_longest(question: Question, length: int) -> int:
    return max(question.lengths_k) - length


def _to_tile(tile: int) -> Callable[[Question, int], int]:
    return lambda question, length: -length % tile


def _exactly(count: int) -> Callable[[Question, int], int]:
    return lambda question, length: count


def _neighbours(question: Question, tiles: list[int]) -> Iterator[Bug]:
    if len(set(question.lengths_k)) > 1:
        yield Bug("padded-keys", "longest", FIRST, _more_keys(_to_longest, zeros=True))
    for tile in TILES:
        yield Bug("padded-keys", f"tile of {tile}", FIRST, _more_keys(_to_tile(tile), zeros=True))
    if question.batch > 1 or len(question.k) > question.cu_seqlens_k[-1]:
        yield Bug("neighbour-leak", "one key after the end", FIRST, _more_keys(_exactly(1)))
        yield Bug("neighbour-leak", "one key before", FIRST, _more_keys(_exactly(0), before=1))
        yield Bug("neighbour-leak", "one key on each side", FIRST, _more_keys(_exactly(1), 1))
        for tile in tiles:
            yield Bug("neighbour-leak", f"tile of {tile}", FIRST, _more_keys(_to_tile(tile)))
    yield from _offsets(question)


def _offsets(question: Question) -> Iterator[Bug]:
    for b in range(question.batch):
        for by in (1, -1):
            for text, empty in (("", False), (", one row empty", True)):
                store = _shifted(b, by, empty)
                yield Bug("offsets-shifted", f"from {b} by {by:+}{text}", FIRST, store=store)
    for b in range(1, question.batch + 1):
        for by in (1, -1):
            for sides in ("qk", "q", "k"):
                text = f"cu_seqlens_{sides}[{b}:] {by:+}"
                yield Bug("offsets-shifted", text, FIRST, _other_offsets(b, by, sides))
                if b < question.batch:
                    text = f"cu_seqlens_{sides}[{b}] {by:+}"
                    yield Bug("offsets-shifted", text, FIRST, _other_offsets(b, by, sides, True))
    if question.batch > 1:
        yield Bug("offsets-shifted", "the first entry left out", FIRST, _without_first)


def _without_first(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    return [v for v in views if v.sequence > 0]


def _shifted(b: int, by: int, empty: bool) -> Store:
    """Rows from sequence ``b`` on are stored one further, or one before; one is then ``empty``."""

    def store(question: Question, answers: Answers) -> Answers:
        moved = {}
        for name, x in answers.items():
            of_keys, axis = name in OF_KEYS, int(name in BY_ROW)
            first = int((question.cu_seqlens_k if of_keys else question.cu_seqlens_q)[b])
            last = int((question.cu_seqlens_k if of_keys else question.cu_seqlens_q)[-1])
            y = np.moveaxis(x.copy(), axis, 0)
            source = np.moveaxis(x, axis, 0)
            here = slice(first + max(by, 0), min(last, len(y)) + min(by, 0))
            y[here] = source[here.start - by : here.stop - by]
            if empty and last > first:
                y[first if by > 0 else last - 1] = -np.inf if name == "lse" else 0.0
            moved[name] = np.moveaxis(y, 0, axis)
        return moved

    return store


def _other_offsets(b: int, by: int, sides: str, alone: bool = False) -> See:
    """cu_seqlens from entry ``b`` on (or that one alone) read ``by`` too large."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        def moved(offsets: Any, rows: int) -> np.ndarray:
            found = np.array(offsets, dtype=np.int64)
            found[b : b + 1 if alone else None] += by
            return np.maximum.accumulate(np.clip(found, 0, rows))

        changes: dict[str, Any] = {}
        if "q" in sides:
            changes["cu_seqlens_q"] = moved(question.cu_seqlens_q, len(question.q))
        if "k" in sides:
            changes["cu_seqlens_k"] = moved(question.cu_seqlens_k, len(question.k))
        return views_of(replace(question, **changes))

    return see


# ---- numbers ----------------------------------------------------------------------------------

LOG2_E = 1 / math.log(2)


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


def _numbers(question: Question) -> Iterator[Bug]:
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
    yield Bug("lse-without-max", "unscaled maximum", FORWARD, steps=unscaled)
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


def _backward_numbers(question: Question) -> Iterator[Bug]:
    scaled: dict[str, dict[str, Step]] = {
        "without": {"dQ": lambda c: c.r(times(c.dY, c.K)), "dK": _dK(0)},
        "twice": {"dQ": lambda c: c.r(c.s * c.s * c.r(times(c.dY, c.K))), "dK": _dK(2)},
        "by log2(e)": {"dQ": lambda c: LOG2_E * STEPS["dQ"](c), "dK": _log2_e(STEPS["dK"])},
        "by ln 2": {"dQ": lambda c: STEPS["dQ"](c) / LOG2_E, "dK": _ln_2(STEPS["dK"])},
    }
    for text, of_both in scaled.items():
        for tensors, steps in _subsets(of_both):
            yield Bug("output-scale", f"{tensors}, {text}", BACKWARD, steps=steps)
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


def _subsets(steps: dict[str, Step]) -> Iterator[tuple[str, dict[str, Step]]]:
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
        scores = _with(c, S=c.s * times(c.Q, K.T))
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


def _with(c: Context, **changes: Any) -> Context:
    return type(c)(**(vars(c) | changes))


def _swapped(one: str, other: str) -> Store:
    return lambda question, answers: answers | {one: answers[other], other: answers[one]}


# ---- heads and layouts ------------------------------------------------------------------------


def _heads(question: Question) -> Iterator[Bug]:
    if question.group == 1:
        return
    if question.num_heads_kv > 1:
        yield Bug("gqa-head-map", "h % num_heads_kv", FIRST, _by_remainder)
    sums: dict[str, Callable[[Floats], Floats]] = {
        "the last": lambda x: x[-1],
        "the first": lambda x: x[0],
        "the mean": lambda x: x.mean(axis=0),
    }
    for text, of in sums.items():
        yield Bug("gqa-group-not-summed", text, BACKWARD, steps={"sum_heads": _constant(of)})


def _constant(value: Any) -> Step:
    return lambda c: value


def _by_remainder(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    found = []
    for view in views:
        for i, head in enumerate(view.heads):
            one = slice(i, i + 1)
            found.append(
                replace(
                    view,
                    heads=view.heads[one],
                    head_kv=int(head) % question.num_heads_kv,
                    weight=view.weight[one] if len(view.weight) > 1 else view.weight,
                    slot=None if view.slot is None else view.slot[one],
                    selections=None if view.selections is None else view.selections[one],
                )
            )
    return found


def _layouts(question: Question) -> Iterator[Bug]:
    for axes in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        text = "".join("thd"[axis] for axis in axes)
        yield Bug("transposed", f"{text} as thd", FIRST, store=_as_layout(axes))
    yield Bug("transposed", "columns reversed", FIRST, store=_reversed)
    if question.num_heads_q > 1:
        yield Bug("transposed", "heads reversed", FIRST, store=_heads_reversed)


def _as_layout(axes: tuple[int, int, int]) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        return {
            name: x.transpose(axes).reshape(x.shape)
            if x.ndim == 3
            else (x.T.reshape(x.shape) if axes[0] == 1 else x)
            for name, x in answers.items()
        }

    return store


def _reversed(question: Question, answers: Answers) -> Answers:
    return {name: x[..., ::-1] if x.ndim == 3 else x for name, x in answers.items()}


def _heads_reversed(question: Question, answers: Answers) -> Answers:
    return {name: x[:, ::-1] if x.ndim == 3 else x[::-1] for name, x in answers.items()}


# ---- tiles ------------------------------------------------------------------------------------


def _tiles(question: Question, tile: int) -> Iterator[Bug]:
    at = f"tile of {tile}"
    yield Bug("tail-tile-dropped", f"query rows, {at}", FIRST, _without(_tail_rows(tile)))
    yield Bug("tail-tile-dropped", f"keys, {at}", FIRST, _without(_tail_keys(tile)))
    yield Bug("tail-tile-dropped", f"rows and keys, {at}", FIRST, _without(_tails(tile)))
    yield Bug("tail-tile-dropped", f"rows stored, {at}", FIRST, store=_zero_tail(tile))
    skips = {"first": 0, "second": 1, "last": -1}
    for text, which in skips.items():
        yield Bug("tile-skipped", f"{text} of keys, {at}", FIRST, _without(_key_tile(tile, which)))
        twice = _reweighted(_key_tile(tile, which), 2.0)
        yield Bug("tile-counted-twice", f"{text} of keys, {at}", FIRST, twice)
    yield Bug("tile-skipped", f"first of queries, {at}", BACKWARD, _without(_query_tile(tile, 0)))
    yield Bug("tile-skipped", f"diagonal, {at}", FIRST, _without(_diagonal(tile)))
    yield Bug("tile-counted-twice", f"diagonal, {at}", FIRST, _reweighted(_diagonal(tile), 2.0))
    for text, last in (("last", True), ("first", False)):
        for tensors, steps in _subsets(_one_tile(tile, last)):
            yield Bug("tile-overwrites", f"{tensors}, {text}, {at}", BACKWARD, steps=steps)
    for text, flags in (
        ("out", (False, True)),
        ("row_sum", (True, False)),
        ("out and row_sum", (False, False)),
    ):
        yield Bug("no-rescale", f"{text}, {at}", FORWARD, steps=_online(tile, *flags))
        from_last = _online(tile, *flags, from_last=True)
        yield Bug("no-rescale", f"{text}, {at}, from the last", FORWARD, steps=from_last)
    for text, order in _orders(tile).items():
        for rest, partly in (("", False), (", partial ones too", True)):
            store = _rows_moved(tile, order, partly)
            yield Bug("tile-period", f"{text}, {at}{rest}", FIRST, store=store)
    left, _ = bounds(question)
    if left < math.inf:
        yield Bug("masked-tile-nan", f"first, {at}", FIRST, store=_nan_rows(tile))
        for rows in TILES:
            store = _nan_rows(tile, rows)
            yield Bug("masked-tile-nan", f"first visible, {rows} by {tile}", FIRST, store=store)


Part = Callable[[Question, View], np.ndarray]  # bool, (n, m)


def _reweighted(part: Part, factor: float) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [
            replace(v, weight=v.weight * np.where(part(question, v), factor, 1.0)) for v in views
        ]

    return see


def _without(part: Part) -> See:
    return _reweighted(part, 0.0)


def _tail_rows(tile: int) -> Part:
    def part(question: Question, view: View) -> np.ndarray:
        n, m = len(view.rows), len(view.keys)
        return np.broadcast_to((np.arange(n) >= n // tile * tile)[:, None], (n, m))

    return part


def _tail_keys(tile: int) -> Part:
    def part(question: Question, view: View) -> np.ndarray:
        n, m = len(view.rows), len(view.keys)
        return np.broadcast_to(np.arange(m) >= m // tile * tile, (n, m))

    return part


def _tails(tile: int) -> Part:
    rows, keys = _tail_rows(tile), _tail_keys(tile)
    return lambda question, view: rows(question, view) | keys(question, view)


def _key_tile(tile: int, which: int) -> Part:
    def part(question: Question, view: View) -> np.ndarray:
        n, m = len(view.rows), len(view.keys)
        number = which % -(-m // tile) if which < 0 else which
        return np.broadcast_to(np.arange(m) // tile == number, (n, m))

    return part


def _query_tile(tile: int, which: int) -> Part:
    def part(question: Question, view: View) -> np.ndarray:
        n, m = len(view.rows), len(view.keys)
        return np.broadcast_to((np.arange(n) // tile == which)[:, None], (n, m))

    return part


def _diagonal(tile: int) -> Part:
    def part(question: Question, view: View) -> np.ndarray:
        n, m = len(view.rows), len(view.keys)
        return np.equal(((np.arange(n) + m - n) // tile)[:, None], np.arange(m) // tile)

    return part


def _zero_tail(tile: int) -> Store:
    """The last rows of each sequence, as many as do not fill a tile, are never stored."""

    def store(question: Question, answers: Answers) -> Answers:
        found = {}
        for name, x in answers.items():
            y = np.moveaxis(x.copy(), int(name in BY_ROW), 0)
            for _, rows, keys in sequences(question):
                places = keys if name in OF_KEYS else rows
                y[places[len(places) // tile * tile :]] = 0
            found[name] = np.moveaxis(y, 0, int(name in BY_ROW))
        return found

    return store


def _one_tile(tile: int, last: bool) -> dict[str, Step]:
    """dQ of one tile of keys, dK and dV of one tile of queries: the last (first) that is seen."""

    def kept(c: Context, axis: int) -> Floats:
        """1 where a pair lies in the last tile along ``axis`` that its own tile sees."""
        seen = (c.W > 0).any(axis=0)
        seen = seen if axis == 1 else seen.T
        n, m = seen.shape
        tiles = np.arange(m) // tile
        weight = np.zeros((n, m))
        for start in range(0, n, tile):
            here = slice(start, start + tile)
            there = np.unique(tiles[seen[here].any(axis=0)])
            if len(there):
                weight[here] = tiles == there[-1 if last else 0]
        return weight if axis == 1 else weight.T

    return {
        "dQ": lambda c: c.s * ((c.dY * kept(c, 1)) @ c.K),
        "dK": lambda c: c.s * ((c.dY * kept(c, 0)).swapaxes(1, 2) @ c.Q),
        "dV": lambda c: (c.P * kept(c, 0)).swapaxes(1, 2) @ c.dO,
    }


def _online(
    tile: int, rescale_out: bool, rescale_sum: bool, from_last: bool = False
) -> dict[str, Step]:
    def softmax(c: Context) -> tuple[Floats, Floats]:
        m = c.S.shape[2]
        top = np.full(c.S.shape[:2], -np.inf)
        total = np.zeros(c.S.shape[:2])
        c.accumulated = np.zeros(c.Q.shape[:2] + c.V.shape[1:])
        starts = range(0, m, tile)
        for start in reversed(starts) if from_last else starts:
            here = slice(start, start + tile)
            new = np.maximum(top, c.S[..., here].max(axis=-1))
            safe = np.where(np.isneginf(new), 0.0, new)
            factor = np.exp(np.where(np.isneginf(top), safe, top) - safe)
            weights = np.exp(c.S[..., here] - safe[..., None])
            total = total * (factor if rescale_sum else 1.0) + weights.sum(axis=-1)
            old = c.accumulated * (factor[..., None] if rescale_out else 1.0)
            c.accumulated = old + weights @ c.V[here]
            top = new
        c.accumulated /= np.where(total == 0, 1.0, total)[..., None]
        with np.errstate(divide="ignore"):
            return np.log(total) + np.where(np.isneginf(top), 0.0, top), c.S

    return {"softmax": softmax, "O": lambda c: c.accumulated}


def _orders(tile: int) -> dict[str, np.ndarray]:
    """Ways in which the rows of a tile get mixed up."""
    row = np.arange(tile)
    return {
        "rows exchanged in pairs": row ^ 1,
        "halves exchanged": (row + tile // 2) % tile,
        "rows reversed": row[::-1],
        "rows 8 apart exchanged": row ^ 8 if tile > 8 else row[::-1],
    }


def _rows_moved(tile: int, order: np.ndarray, partly: bool) -> Store:
    """Rows of every whole tile in another order; ``partly``: of partial ones too, 0 from behind."""

    def store(question: Question, answers: Answers) -> Answers:
        found = {}
        for name, x in answers.items():
            source = np.moveaxis(x, int(name in BY_ROW), 0)
            y = source.copy()
            for _, rows, keys in sequences(question):
                places = keys if name in OF_KEYS else rows
                for start in range(0, len(places), tile):
                    here = places[start : start + tile]
                    if len(here) == tile:
                        y[here] = source[here[order]]
                    elif partly:
                        there = order[: len(here)]
                        inside = there < len(here)
                        y[here] = 0
                        y[here[inside]] = source[here[there[inside]]]
            found[name] = np.moveaxis(y, 0, int(name in BY_ROW))
        return found

    return store


# ---- rows without keys ------------------------------------------------------------------------


def _dead(question: Question) -> np.ndarray:
    """(total_q, num_heads_q): rows of sequences that see no key."""
    found: np.ndarray = np.zeros(question.q.shape[:2], dtype=bool)
    for b, rows in enumerate(_rows(question)):
        if not question.lengths_k[b]:
            found[rows] = True
    return np.asarray(found | _row_mask(question, lambda seen: np.asarray(~seen.any(axis=2))))


def _row_mask(question: Question, of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What ``of`` makes (heads, n) of who sees whom (heads, n, m), as (total_q, num_heads_q)."""
    found = np.zeros(question.q.shape[:2], dtype=bool)
    for view in views_of(question):
        rows = of(view.weight > 0)
        shape = len(view.heads), len(view.rows)
        found[view.rows[:, None], view.heads] = np.broadcast_to(rows, shape).T
    return found


def _rows(question: Question) -> Iterator[np.ndarray]:
    for b in range(question.batch):
        yield np.arange(question.cu_seqlens_q[b], question.cu_seqlens_q[b + 1])


def _meets_first_tile(seen: np.ndarray, tile: int, rows: int) -> np.ndarray:
    """Rows that see something of the first tile of keys; with ``rows``, which is the number of
    queries of a tile, of the first one that any of these sees."""
    found = np.zeros(seen.shape[:2], dtype=bool)
    for start in range(0, seen.shape[1], rows or seen.shape[1]):
        here = slice(start, start + (rows or seen.shape[1]))
        for head, of_head in enumerate(seen[:, here]):
            first = int(of_head.any(axis=0).argmax()) // tile * tile if rows else 0
            found[head, here] = of_head[:, first : first + tile].any(axis=1)
    return found


def _nan_rows(tile: int, rows: int = 0) -> Store:
    """NaN in rows that see keys, but none in the tile where the running maximum starts."""

    def store(question: Question, answers: Answers) -> Answers:
        def late(seen: np.ndarray) -> np.ndarray:
            return np.asarray(seen.any(axis=2) & ~_meets_first_tile(seen, tile, rows))

        return _spoilt(question, answers, _row_mask(question, late))

    return store


def _spoilt(question: Question, answers: Answers, rows: np.ndarray) -> Answers:
    """NaN in these rows, and in the gradients of the keys that they would add to."""
    found = {}
    for name, x in answers.items():
        y = x.copy()
        if name in BY_ROW:
            y[rows.T] = np.nan
        elif name in OF_KEYS:
            for _, places, keys in sequences(question):
                for head in np.nonzero(rows[places].any(axis=0))[0]:
                    y[keys, head // question.group] = np.nan
        elif name not in OF_SLOTS:
            y[rows] = np.nan
        found[name] = y
    return found


def _dead_rows(question: Question) -> Iterator[Bug]:
    if not _dead(question).any():
        return
    yield Bug("dead-rows", "NaN", FIRST, store=_nan_dead)
    yield Bug("dead-rows", "mean of v", FIRST, steps={"S": _zero_dead, "bP": _uniform_dead})
    yield Bug("dead-rows", "mean of v, dv alone", BACKWARD, steps=_dv_of_dead())


def _nan_dead(question: Question, answers: Answers) -> Answers:
    return _spoilt(question, answers, _dead(question))


def _zero_dead(c: Context) -> Floats:
    """Scores of -1e30, say, for all keys of a row: equal, and so is their softmax."""
    found = STEPS["S"](c)
    return np.where((c.W > 0).any(axis=2, keepdims=True), found, 0.0)


def _uniform_dead(c: Context) -> Floats:
    L = np.where(np.isneginf(c.L), np.log(c.S.shape[2]), c.L)
    return np.asarray(c.r(np.exp(c.S - L[..., None])))


def _dv_of_dead() -> dict[str, Step]:
    def dV(c: Context) -> Floats:
        S = _zero_dead(c)
        P = _uniform_dead(_with(c, S=S))
        return np.asarray(P.swapaxes(1, 2) @ c.dO)

    return {"dV": dV}

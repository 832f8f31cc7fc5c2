"""Which bug of what is read? Hundreds are tried on one view, and the constants and maps of heads
that take the place of many are fitted; what comes near is planted as a bug.

Long by what is fitted: each kind of map or constant has an equation of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue import inputs, layouts, operands
from rawattn.check.diagnose.catalogue.heads import by_remainder, reduced
from rawattn.check.diagnose.catalogue.masks import masks
from rawattn.check.diagnose.engine.attention import (
    FIRST,
    OF_A_SCORE,
    OF_A_VIEW,
    PROGRAMS,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    run_steps,
    solve,
    together,
    views_of,
)
from rawattn.check.diagnose.engine.effort import over, spend, spent
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, STAGES, Answers, Question
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.inferred import pages

EFFORT = 3000.0  # units, for the candidates of one stage, at most
FIRST_ONES = 400  # of the candidates that come before products' operands
LOOKED_AT, YIELDED = 20, 6  # candidates for each tensor: in all views, and in the end
CLEAR = 0.7  # of what is wrong in the worst view: of the view that is looked at, at least
HELPS, FAR = 0.5, 0.25  # of the right one's residual, and of what was found: at most what is left
OF = {  # the step, and whether heads are summed
    "out": "O",
    "lse": "L",
    "delta": "D",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "tout": "tO",
    "tlse": "tL",
    "ddout": "tO",
    "ddlse": "tL",
    "gq": "gQ",
    "gk": "gK",
    "gv": "gV",
}
Given = tuple[Floats, Floats] | None


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    if question.sparse:
        return
    for given in _givens(question, answers, stage):
        work = _Work(question, answers, stage, given)
        if not work.wrong:
            return
        if stage == "backward" and "out" in answers:
            forward = _Work(question, answers, "forward", None)
            yield from (bug for bug in _of_forward(forward) if stage in bug.stages)
        yield from work.constants()
        if stage == "forward":
            yield from pages.bugs(question, work.found)
        yield from _of_forward(work) if stage == "forward" else work.rearranged()
        if stage == "backward" and question.group > 1:
            yield from work.reductions()
        until = spent() + EFFORT
        read, multiplied = (
            list(of.candidates(question, stage, work.wrong, work.right))
            for of in (inputs, operands)
        )
        yield from work.near([*read[:FIRST_ONES], *multiplied, *read[FIRST_ONES:]], until)


def _of_forward(work: "_Work") -> Iterator[Bug]:
    """What a wrong out tells of the forward pass, and of the backward pass that belongs to it."""
    yield from work.rearranged()
    if work.question.num_heads_kv > 1:
        yield from work.head_maps()


def _givens(question: Question, answers: Answers, stage: str) -> Iterator[Given]:
    """The out and lse that a backward pass may have had."""
    if stage in ("forward", "jvp"):
        yield None
    elif question.passed is not None:
        yield question.passed
    elif "out" in answers and "lse" in answers:
        yield answers["out"], answers["lse"]
        right = solve(question, "forward")
        if any(_residual(n, answers[n], right[n]) > 1e-2 for n in ("out", "lse")):
            yield right["out"], right["lse"]
    else:
        right = solve(question, "forward")
        yield right["out"], right["lse"]


def _residual(
    name: str, found: np.ndarray, wanted: Floats, rows: np.ndarray | None = None
) -> float:
    """Root mean square of what ``wanted`` leaves, over that of what was found."""
    a, b = (by_rows(name, x) for x in (found, wanted))
    if rows is not None:
        a, b = a[rows], b[rows]
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    size = float(np.square(a).sum())
    left = float(np.square(a - b).sum())
    return math.sqrt(left / size) if size else (0.0 if not left else math.inf)


class _Work:
    def __init__(self, question: Question, answers: Answers, stage: str, given: Given) -> None:
        self.question, self.stage, self.given = question, stage, given
        self.truth = solve(question, stage, given=given)
        self.found = {
            name: np.asarray(answers[name])
            for name in STAGES[stage]
            if name in answers
            and name in self.truth
            and answers[name].shape == self.truth[name].shape
        }
        self.inside = {
            name: question.sequence_of("k" if name in OF_KEYS else "q") >= 0 for name in self.found
        }
        self.wrong = {n for n in self.found if self.left(n, self.truth[n]) > _noise(self.found[n])}
        self.right = set(self.found) - self.wrong
        self.solved: dict[int, Answers] = {}

    def left(self, name: str, wanted: Floats) -> float:
        return _residual(name, self.found[name], wanted, self.inside[name])

    # ---- constants ----

    def constants(self) -> Iterator[Bug]:
        """A tensor that is the right one times a number, or times one for each head or sequence."""
        for name in sorted(self.wrong):
            a, b = (by_rows(name, x) for x in (self.found[name], self.truth[name]))
            finite = (np.isfinite(a) & np.isfinite(b)).all(axis=2) & self.inside[name][:, None]
            sequence = self.question.sequence_of("k" if name in OF_KEYS else "q")
            parts = {
                "": np.zeros(a.shape[:2], dtype=np.int64),
                "each head": np.broadcast_to(np.arange(a.shape[1]), a.shape[:2]),
                "each sequence": np.broadcast_to(sequence[:, None], a.shape[:2]),
            }
            for text, part in parts.items():
                if text and len(np.unique(part[finite])) < 2:
                    continue
                factors, left = _fitted(a, b, part, finite)
                if left < 0.02 and np.abs(factors - 1).max() > max(1e-3, 2 * left):
                    yield self._times(name, factors, part, left, text)
                    break

    def _times(self, name: str, factors: Floats, part: np.ndarray, left: float, text: str) -> Bug:
        named = self._numbers()
        said = []
        for i, factor in enumerate(factors):
            near = min(named, key=lambda number: abs(factor / named[number] - 1))
            if abs(factor / named[near] - 1) < max(1e-5, left):
                factors[i] = named[near]
                said.append(near)
            else:
                said.append(f"{factor:.5g}")
        by_row = factors[np.where(part < 0, 0, part)]

        def store(question: Question, answers: Answers) -> Answers:
            x = answers[name]
            return answers | {name: x * (by_row.T if name in BY_ROW else by_row[..., None])}

        form = f"{name} times {', '.join(said)}" + (f" by {text.split()[-1]}" if text else "")
        return Bug("constant-factor", form, (self.stage,), store=store)

    def _numbers(self) -> dict[str, float]:
        q = self.question
        s = q.scale
        found = {"2": 2.0, "3": 3.0, "1/2": 0.5, "-1": -1.0, "log2(e)": 1 / math.log(2)}
        found |= {"ln 2": math.log(2), "s": s, "1/s": 1 / s, "s * s": s * s, "1": 1.0, "0": 1e-300}
        sizes = {
            "group": q.group,
            "num_heads_q": q.num_heads_q,
            "num_heads_kv": q.num_heads_kv,
            "batch": q.batch,
            "head_dim": q.q.shape[2],
            "the longest length": max(q.lengths_q, default=1),
            "the number of tokens": len(q.q),
        }
        for name, size in sizes.items():
            found |= {name: float(size), f"1 / {name}": 1 / size}
        return found

    # ---- places of results ----

    def rearranged(self) -> Iterator[Bug]:
        """A result whose rows, or numbers, are in other places."""
        for name in sorted(self.wrong):
            here, known = {name: self.truth[name]}, False
            if (order := self._heads_moved(name)) is not None:
                yield order
                continue
            if _spread(self.found[name]) > 10 * _spread(self.truth[name]):
                continue
            for bug, then in layouts.rearranged(self.question, name):
                assert bug.store is not None
                if self.left(name, bug.store(self.question, here)[name]) < FAR:
                    known = True
                    yield bug
                    if then is not None:
                        yield then
            if (not known or name in BY_ROW) and (moved := self._moved(name)) is not None:
                yield moved

    def _heads_moved(self, name: str) -> Bug | None:
        """Every head as the head of the right result that it equals: in another order."""
        a, b = (by_rows(name, x)[self.inside[name]] for x in (self.found[name], self.truth[name]))
        finite = np.asarray((np.isfinite(a) & np.isfinite(b)).all(axis=(1, 2)))
        a, b = a[finite], b[finite]
        tokens, heads, width = a.shape
        if heads < 2 or tokens * width < 4 or 2 * len(a) < len(finite):
            return None
        allowed = max(8 * _noise(self.found[name]), 1e-3)
        x, y = (part.swapaxes(0, 1).reshape(heads, -1) for part in (a, b))
        error = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * (x @ y.T)
        own = np.square(b - b.mean(axis=1, keepdims=True)).sum(axis=(0, 2))
        order = error.argmin(axis=1)
        fits = error[np.arange(heads), order] <= allowed**2 * np.maximum(own.mean(), own[order])
        if not fits.all() or (order == np.arange(heads)).all():
            return None
        question = self.question
        group = heads // question.num_heads_kv
        forms = {
            "h is stored as h % group * num_heads_kv + h // group": np.argsort(
                [h % group * question.num_heads_kv + h // group for h in range(heads)]
            ),
            "h is stored as h // num_heads_kv + h % num_heads_kv * group": np.argsort(
                [
                    h // question.num_heads_kv + h % question.num_heads_kv * group
                    for h in range(heads)
                ]
            ),
            "reversed": np.arange(heads)[::-1],
        }
        known = [text for text, of in forms.items() if np.array_equal(of, order)]
        listed = ", ".join(map(str, order[:16])) + (", ..." if heads > 16 else "")
        text = f"{name}: heads in another order: {listed}" + "".join(f" ({x})" for x in known[:1])

        def store(question: Question, answers: Answers) -> Answers:
            x = answers[name]
            return answers | {name: x[order] if name in BY_ROW else x[:, order]}

        look_at = f"the number of the head by which {name} is stored: head_kv * group + i for the "
        look_at += "i-th query head of a key/value head"
        return Bug("transposed", text, (self.stage,), store=store, look_at=look_at)

    def _moved(self, name: str) -> Bug | None:
        """Each row as the row of the right result that it equals: another one, not the same."""
        if name in BY_ROW:
            return self._tokens_moved(name)
        a, b = (by_rows(name, x) for x in (self.found[name], self.truth[name]))
        tokens, heads, width = a.shape
        if (
            tokens * heads > 6000
            or width < 8
            or not np.isfinite(a).all()
            or not np.isfinite(b).all()
        ):
            return None
        x, y = a.reshape(-1, width), b.reshape(-1, width)
        distance = np.square(y).sum(axis=1)[None, :] - 2 * (x @ y.T)
        nearest = distance.argmin(axis=1)
        error = np.square(x - y[nearest]).sum(axis=1)
        size = np.square(x).sum(axis=1)
        fits = error <= (8 * _noise(self.found[name])) ** 2 * np.maximum(size, size.mean())
        zero = size == 0
        same = nearest == np.arange(len(x))
        if not (fits | zero).all() or (same | zero).mean() > 0.99:
            return None
        index = np.where(zero, -1, nearest)
        moved_heads = (index % heads != np.arange(len(x)) % heads) & ~zero
        text = f"{name}: {int((~same).sum())} rows are those of other places"
        bug = "transposed" if moved_heads.any() else "offsets-shifted"

        def store(question: Question, answers: Answers) -> Answers:
            source = answers[name].reshape(-1, width)
            there = np.where((index < 0)[:, None], 0.0, source[np.maximum(index, 0)])
            return answers | {name: there.reshape(answers[name].shape)}

        return Bug(bug, text, (self.stage,), store=store)

    def _tokens_moved(self, name: str) -> Bug | None:
        """Each token's statistics, of all heads, as those of the token that they equal."""
        x, y = (by_rows(name, of)[..., 0] for of in (self.found[name], self.truth[name]))
        tokens, heads = x.shape
        finite = np.isfinite(x) & np.isfinite(y)
        if heads < 4 or tokens > 6000 or not finite.all():
            return None
        distance = np.square(y).sum(axis=1)[None, :] - 2 * (x @ y.T)
        nearest = distance.argmin(axis=1)
        error = np.abs(x - y[nearest]).max(axis=1)
        fits = error <= 8 * _noise(self.found[name]) * np.abs(y).max(initial=0)
        nearest = np.where(self.inside[name], nearest, np.arange(tokens))
        moved = nearest != np.arange(tokens)
        several = len(np.unique(nearest[moved])) > max(moved.sum() // 2, 1)
        if not fits[self.inside[name]].all() or not several:
            return None
        text = f"{name}: tokens in another order, {int(moved.sum())} of {tokens}"

        def store(question: Question, answers: Answers) -> Answers:
            return answers | {name: answers[name][:, nearest]}

        return Bug("offsets-shifted", text, (self.stage,), store=store)

    # ---- maps of heads ----

    def head_maps(self) -> Iterator[Bug]:
        """The key/value head of every query head, under the right mask or a wrong one."""
        if "out" not in self.wrong:
            return
        question = self.question
        name = "out"
        b = _largest(question)
        for mask in (None, *masks(question)):
            if mask is not None and "forward" not in mask.stages:
                continue
            chosen, worst = [], 0.0
            for head in range(question.num_heads_q):
                errors = [
                    self._one_head(name, b, head, head_kv, mask)
                    for head_kv in range(question.num_heads_kv)
                ]
                chosen.append(int(np.argmin(errors)))
                worst = max(worst, min(errors))
                if worst > FAR:
                    break
            if worst > FAR or chosen == [h // question.group for h in range(len(chosen))]:
                continue
            known = {"h % num_heads_kv": [h % question.num_heads_kv for h in range(len(chosen))]}
            text = next((t for t, of in known.items() if of == chosen), f"heads {chosen}")
            bug = Bug("gqa-head-map", text, FIRST, by_map(chosen))
            both = bug if mask is None else together(bug, mask)
            if both is not None:
                yield both

    def _one_head(self, name: str, b: int, head: int, head_kv: int, mask: Bug | None) -> float:
        question = self.question

        def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            one = [v for v in views if v.sequence == b and v.head_kv == 0]
            one = [replace(v, heads=np.array([head]), head_kv=head_kv) for v in one]
            return mask.see(question, tuple(one)) if mask is not None and mask.see else one

        caught: list[Context] = []
        steps = {} if mask is None else dict(mask.steps)
        solve(question, self.stage, Bug("", "", (self.stage,), see, steps | _catching(caught, "O")))
        if not caught:
            return math.inf
        rows = caught[0].view.rows
        return _residual("out", self.found[name][rows, head][None], caught[0].O)

    def reductions(self) -> Iterator[Bug]:
        """Which query heads dk and dv of a key/value head are summed over: small whole weights."""
        question = self.question
        names = [name for name in ("dk", "dv") if name in self.wrong]
        if not names or "dq" in self.wrong:
            return
        b = _largest(question)
        caught: list[Context] = []

        def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            return [view for view in views if view.sequence == b]

        bug = Bug("", "", (self.stage,), see, _catching(caught, "dV"))
        solve(question, self.stage, bug, given=self.given)
        if not caught:
            return
        keys = caught[0].view.keys
        maps: dict[str, Floats] = {}
        for name in names:
            of_heads = np.concatenate([getattr(c, OF[name]) for c in caught])
            A = of_heads.reshape(question.num_heads_q, -1).T
            B = self.found[name][keys].astype(np.float64).swapaxes(0, 1)
            B = B.reshape(question.num_heads_kv, -1).T
            if not np.isfinite(B).all():
                return
            weights = np.linalg.lstsq(A, B, rcond=None)[0].T
            whole = np.round(weights * question.group) / question.group
            left = np.sqrt(np.square(B - A @ whole.T).sum() / np.square(B).sum())
            if left < 0.05:
                maps[name] = whole
        own = np.repeat(np.eye(question.num_heads_kv), question.group, axis=1)
        for found in maps.values():
            outside = found * (own == 0)
            if not outside.any():
                continue
            same = [n for n in maps if np.array_equal(maps[n], found)]
            sums = "; ".join(str(np.nonzero(row)[0].tolist()) for row in found)
            if np.array_equal(found, by_remainder(question)):
                sums = "h % num_heads_kv"
            yield reduced(found, sums, same)
            if len(same) > 1:
                break

    # ---- many candidates ----

    def near(self, candidates: Sequence[Bug], until: float) -> Iterator[Bug]:
        """Those that explain most of a wrong tensor in the view that is the most wrong."""
        place = self._worst_view()
        if place is None:
            return
        view, base = place
        start = {name: self._left_in_view(name, base) for name in self.wrong}
        ranked: dict[str, list[tuple[float, int]]] = {name: [] for name in self.wrong}
        programme = PROGRAMS[self.stage]
        for number, bug in enumerate(candidates):
            if self.stage not in bug.stages:
                continue
            spend(OF_A_VIEW + OF_A_SCORE * view.weight[0].size * len(view.heads))
            if over(until):
                break
            found = self._tried(bug, view, base, programme)
            for name in self.wrong if found else ():
                left = self._left_in_view(name, found)
                if left < FAR and left < HELPS * start[name]:
                    ranked[name].append((left, number))
        chosen: list[int] = []
        for name, of in ranked.items():
            first = [number for _, number in sorted(of)[:LOOKED_AT]]
            if len(first) > YIELDED:
                first.sort(key=lambda number: self._left_of_all(candidates[number], name))
            chosen += first[:YIELDED]
        for number in dict.fromkeys(chosen):
            yield candidates[number]

    def _left_of_all(self, bug: Bug, name: str) -> float:
        if id(bug) not in self.solved:
            with np.errstate(all="ignore"):
                self.solved[id(bug)] = solve(self.question, self.stage, bug, given=self.given)
        return self.left(name, self.solved[id(bug)][name])

    def _tried(
        self, bug: Bug, view: View, base: Context, programme: Sequence[str]
    ) -> Context | None:
        """The view's context with a bug in it; None where the view is not there any more."""
        with np.errstate(all="ignore"):
            if bug.store is not None:
                answers = solve(self.question, self.stage, bug, given=self.given)
                return SimpleNamespace(view=view, answers=answers)
            if bug.see is None:
                names = programme
                replaced = [i for i, name in enumerate(names) if name in bug.steps]
                if not replaced:
                    return None
                again = SimpleNamespace(**vars(base))
                run_steps(again, names[replaced[0] :], bug)
                return again
            caught: list[Context] = []
            last = [n for n in programme if n != "sum_heads" and n not in ("dG", "gG")][-1]
            inner = bug.steps.get(last, STEPS[last])

            def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
                seen = bug.see(question, (view,)) if bug.see else (view,)
                return [
                    v for v in seen if v.sequence == view.sequence and v.head_kv == view.head_kv
                ]

            def catch(c: Context) -> Floats:
                caught.append(c)
                return np.asarray(inner(c))

            planted = Bug("", "", (self.stage,), see, {**bug.steps, last: catch})
            answers = solve(self.question, self.stage, planted, given=self.given)
            if not caught:
                return None
            return SimpleNamespace(view=view, answers=answers)

    def _worst_view(self) -> tuple[View, Context] | None:
        """The view whose results are the most wrong, and its context with all steps."""
        views = [v for v in views_of(self.question) if len(v.rows) > 1]
        if not views:
            return None

        def wrongness(view: View) -> float:
            at = SimpleNamespace(view=view, answers=self.truth)
            return sum(min(self._left_in_view(name, at), 2.0) for name in self.wrong)

        amounts = [wrongness(view) for view in views]
        enough = [v for v, x in zip(views, amounts, strict=True) if x >= CLEAR * max(amounts)]
        view = min(enough, key=lambda view: view.weight.size)
        caught: list[Context] = []
        last = [n for n in PROGRAMS[self.stage] if n in STEPS][-1]

        def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            return [view]

        bug = Bug("", "", (self.stage,), see, _catching(caught, last))
        solve(self.question, self.stage, bug, given=self.given)
        return view, caught[0]

    def _left_in_view(self, name: str, c: Context) -> float:
        view = c.view
        if name in OF_KEYS:
            found = self.found[name][view.keys, view.head_kv]
            if hasattr(c, "answers"):
                wanted = c.answers[name][view.keys, view.head_kv]
            else:
                wanted = c.sum_heads(getattr(c, OF[name]))
            return _residual("dq", found[None], wanted[None])
        if name not in OF:
            return math.inf
        heads, rows = view.heads[:, None], view.rows[None, :]
        of_row = name in BY_ROW
        found = self.found[name][heads, rows] if of_row else self.found[name][rows, heads]
        if hasattr(c, "answers"):
            x = c.answers[name]
            wanted = x[heads, rows] if of_row else x[rows, heads]
        else:
            wanted = np.asarray(getattr(c, OF[name]))
        shape = (len(view.heads), len(view.rows), -1)
        return _residual("dq", found.reshape(shape), wanted.reshape(shape))


def _catching(caught: list[Context], name: str) -> dict[str, Step]:
    """A step that keeps the context with its result."""

    def step(c: Context) -> Any:
        found = STEPS[name](c)
        setattr(c, name, found)
        caught.append(c)
        return found

    return {name: step}


def by_map(chosen: Sequence[int]) -> See:
    """Query head h with key/value head chosen[h]."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            for i, head in enumerate(view.heads):
                weight = view.weight[i : i + 1] if len(view.weight) > 1 else view.weight
                heads = view.heads[i : i + 1]
                found.append(replace(view, heads=heads, head_kv=chosen[head], weight=weight))
        return found

    return see


def _largest(question: Question) -> int:
    return int(np.argmax(np.multiply(question.lengths_q, question.lengths_k)))


def _noise(x: np.ndarray) -> float:
    """More than rounding leaves of an array, less than a bug."""
    eps = float(ml_dtypes.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
    return max(4 * eps, 1e-5) if x.dtype.itemsize > 2 else 4 * eps


def _spread(x: np.ndarray) -> float:
    wide = np.asarray(x).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    return float(np.square(finite).mean()) if finite.size else 0.0


def _fitted(
    found: Floats, wanted: Floats, part: np.ndarray, rows: np.ndarray
) -> tuple[Floats, float]:
    """The best factor of every part, and what is left of all."""
    count = int(part.max(initial=0)) + 1
    where = np.where(rows, part, count)
    products = np.where(rows, (found * wanted).sum(axis=2, where=rows[..., None]), 0.0)
    squares = np.where(rows, (wanted**2).sum(axis=2, where=rows[..., None]), 0.0)
    above, below = (
        np.bincount(where.ravel(), x.ravel(), minlength=count + 1)[:count]
        for x in (products, squares)
    )
    factors = np.where(below > 0, above / np.where(below > 0, below, 1.0), 1.0)
    difference = np.where(
        rows[..., None], found - factors[np.where(rows, part, 0)][..., None] * wanted, 0.0
    )
    size = float(np.square(found[rows]).sum())
    return factors, math.sqrt(float(np.square(difference).sum()) / size) if size else math.inf

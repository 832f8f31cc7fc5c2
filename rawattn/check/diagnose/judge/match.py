"""Which bug, planted in the float64 computation, gives somebody's numbers down to rounding? At one
precision after the other, the finest first, so that a small bug is not taken for coarse rounding:
the right computation, then every bug, on all tensors or some. Long, since these are of one fit."""

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue import first_order, second_order
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import FORWARD, NO_BUG, Bug, Floats, Given, solve
from rawattn.check.diagnose.engine.effort import cuts, over, spend
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question, by_rows
from rawattn.check.diagnose.evidence import precision as noise
from rawattn.check.diagnose.evidence.precision import Fit, Precision, fit, ladder, relative_residual
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.evidence.support import NO_RULE
from rawattn.check.diagnose.inferred import inputs, row_numbers, terms, unwritten
from rawattn.check.diagnose.inferred.sample import Sample, in_rows, is_wrong
from rawattn.check.diagnose.read.name import BEYOND, UNREAD, Readings

NEAREST = 12  # predictions whose noise is computed, for each tensor
OF_A_DISTANCE, OF_A_FIT = 0.1, 0.6
TELLING = 0.01  # share of rows with numbers in them, of a tensor that a bug can be known by
OF_ZEROS = 2  # classes that may explain zeros, for one of them to be named
SHARE = 2.0**-6  # of the size of a row: what another one is off by
ROWS = 4  # wrong ones, at least, for a bug to be one of these alone
ELSEWHERE = "; all else is right"
OF_LANES = re.compile(r"the (row|key)s with \w \S+ \d+ = \d+")
# words of forms that tell no cause
OF_NO_CAUSE = "and of no others", "or are not written", "the first tile alone", "is another number"
INEXACT = (NO_RULE, ELSEWHERE, *OF_NO_CAUSE, "holds other numbers")
BETTER = 0.95  # of the residual, at most, that a bug leaves where it is the reason
FAR = 0.3  # residual of what no rounding explains
# Tensors of one loop, which a bug of that loop changes together.
KERNELS = (
    *({"out", "lse"}, {"sliding out", "sliding lse"}, {"dq"}, {"dk", "dv"}),
    *({"jvp out", "jvp lse"}, {"tout", "tlse"}, {"ddout", "ddlse"}, {"gq"}, {"gk", "gv"}),
)
GENERIC = ("wrong-keys", "sparse-inverted-lists", "unknown")  # what others say more exactly
LOOSE = (*GENERIC, "denominator", "pairs-dropped")  # of what is read, likewise
INFERRED = (inputs.of_parts, inputs.numbers, row_numbers.of_loops, inputs.bugs, unwritten.bugs)
QUICK = 3  # of these, which cost next to nothing
RIGHT = (NO_BUG, replace(NO_BUG, steps={"tO": second_order.by_given_out}))  # tO by the given out
Search = Callable[[Sample], Iterable[Bug]]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a stage with ``bug`` gives; a backward one is given this out and lse."""

    bug: Bug
    given: Given
    answers: Answers


def catalogue(question: Question, stage: str) -> tuple[Bug, ...]:
    """All bugs that a stage may have, in the order of preference where they look alike."""
    found = [*first_order.bugs(question)]
    if question.sparse:
        found = [*selection.bugs(question), *first_order.bugs_anywhere(question)]
    if stage in BEYOND:
        without = "mask-missing-in-backward" * (stage == "jvp")
        of_masks = (x for x in found if x.see and x.stages != FORWARD and x.name != without)
        anywhere = {*of_masks, *(x for x in found if stage in x.stages or x.name == "score-scale")}
        wide = [bug.at(*bug.stages, stage) for bug in found if bug in anywhere]
        alike = stage == "jvp" and second_order.lacking(question)  # to a direction that is ignored
        listed = (*second_order.BUGS, *second_order.instead(question))
        found = [bug for bug in listed if not (alike and "tP" in bug.steps)] + wide
    return tuple(bug for bug in found if stage in bug.stages)


class SearchFailed(RuntimeWarning):
    """A search raised: a mistake of ours, which hides nothing of what the others find."""


def _searched(search: Callable[..., Iterable[Any]], *given: Any) -> list[Any]:
    found = list[Any]()
    try:
        found += search(*given)
    except NotImplementedError:  # of what was read on other lengths alone
        pass
    except (IndexError, ValueError) as error:
        text = f"a search of rawattn-check failed, so that a bug may be missed: {error!r}"
        warnings.warn(text, SearchFailed, stacklevel=2)
    return found


def _in_rows(rows: dict[str, Floats], right: Answers, _: Question, answers: Answers) -> Answers:
    """``answers`` in these rows (tokens, heads), ``right`` ones in others."""
    return in_rows(rows, answers, {n: right.get(n, x) for n, x in answers.items()})


class Explained(NamedTuple):
    """A prediction that fits all of ``tensors``; ``fits`` of each."""

    prediction: Prediction
    tensors: tuple[str, ...]
    fits: dict[str, Fit]

    @property
    def name(self) -> str:
        return self.prediction.bug.name

    @property
    def inexact(self) -> bool:
        """Whether it says what there is, and no cause."""
        return any(words in self.prediction.bug.variant for words in INEXACT)

    @property
    def rms(self) -> float:
        return max(self.fits[name].rms for name in self.tensors)


class Stage:
    """What a side says to one stage, what is right, and the fits, computed when asked for. asked:
    question, answers and stage. found: its arrays. rights: predictions without a bug, of other
    sources. rows: those that can be judged. From ``until`` on only the usual bugs are tried. of:
    what was read, or shown by others: nothing else is tried where that, named, explains all."""

    def __init__(
        self, question: Question, answers: Answers, stage: str, until: float, of: Readings = UNREAD
    ) -> None:
        self.question, self.answers, self.stage = self.asked = question, answers, stage
        self.given = None if stage in ("forward", "jvp") else question.given_to_backward(answers)
        self.until, self.shown = until, of.shown
        here = [said for said in of.of if said.stage == stage]  # with a bug it would be the same
        self.allows: Callable[[Bug], bool] = lambda bug: all(said.allows(bug) for said in here)
        self.listed = cache(lambda: [*filter(self.allows, catalogue(question, stage))])
        self.hints = [bug for bug in of.hints if stage in bug.stages]
        self.read = [bug for said in of.of for bug in said.bugs if stage in bug.stages]
        # of what was read: masks are told by listed bugs in fewer words
        named = [bug for bug in self.read if bug.name not in LOOSE]
        self.told = [bug for bug in named if bug.see is None or bug.name.startswith("sparse-")]
        self.found = {name: np.asarray(answers[name]) for name in STAGES[stage] if name in answers}
        right_ones = self.planted(RIGHT if stage == "second" else RIGHT[:1])
        self.rights = [*right_ones, *self.with_other_inputs([NO_BUG])]
        self.tensors = tuple(n for n in self.found if n in self.rights[0].answers)
        right = self.rights[-1].answers  # of the right out and lse: NaN comes from inputs alone
        self.rows = {n: noise.defined(question, n, right[n]) & self._held(n) for n in self.tensors}
        self.finest = ladder(question.dtype)[0]
        self.sizes = cache(partial(noise.sizes, question, stage, self.given))
        self.telling = {name for name in self.tensors if self._tells(name)}
        self.relative, self.fit = cache(self._relative), cache(self._fit)
        self.noisy: dict[tuple[Prediction, str], Answers] = {}  # by precision

    def verdict(self) -> "StageVerdict | None":
        before = cuts()
        if not self.tensors:
            return None
        return _verdict(self, ladder(self.question.dtype))._replace(cut=cuts() > before)

    def planted(self, bugs: Iterable[Bug]) -> list[Prediction]:
        """What the stage gives with each bug that can be planted, given what it was given."""
        return [one for bug in bugs for one in self._planted(bug, self.given)]

    def _planted(self, bug: Bug, given: Given, stage: str = "") -> list[Prediction]:
        found = _searched(lambda: [solve(self.question, stage or self.stage, bug, given=given)])
        return [Prediction(bug, given, answers) for answers in found]

    def with_other_inputs(self, bugs: Iterable[Bug]) -> Iterator[Prediction]:
        """Predictions of backward passes that made an out or an lse of their own."""
        if self.stage in ("forward", "jvp"):
            return
        wrong = self.given is not None and is_wrong(self.question, self.given)
        for bug in bugs:  # of scores: it changes P and out, so that it matters whose it gets
            of_scores = bug.see is not None or not {"Y", "cap"}.isdisjoint(bug.steps)
            if (bug is NO_BUG and self.given is not None) or (wrong and not of_scores):
                yield from self._planted(bug, None)
            if of_scores and "forward" in bug.stages:  # that had the same bug
                for forward in self._planted(bug, None, "forward"):
                    yield from self._planted(bug, (forward.answers["out"], forward.answers["lse"]))

    def tiers(self, precision: Precision) -> Iterator[Sequence[Prediction]]:
        """What to try one after the other, each where those before explain too little."""
        if precision.name == self.finest.name:
            first = self.planted(bug for bug in self.listed() if bug.name in self.shown)
            yield from filter(None, (first, self.planted(self.told)))
        tried = self.usual
        yield tried
        for more in filter(None, (family() for family in self.families)):
            tried = [*tried, *more]
            yield tried
        if not over(self.until):
            yield self.of_some

    @cached_property
    def sample(self) -> Sample:
        return Sample(*self.asked, self.given)

    @cached_property
    def usual(self) -> list[Prediction]:
        """Predictions with each bug that is listed, that other stages have, or of one term."""
        more = terms.single(self.sample)
        more += _searched(row_numbers.bugs, self.sample) if not more else ()
        more += _searched(inputs.of_heads, self.sample) if self.stage == "backward" else ()
        with warnings.catch_warnings(action="ignore", category=SearchFailed):
            hinted = self.planted(self.hints)  # of problems that may have other heads
        return [*self.planted(self.worth), *hinted, *self.planted(more)]

    @cached_property
    def worth(self) -> list[Bug]:
        """Listed bugs that leave less than the right computation where the most is wrong."""
        return [bug for bug in self.listed() if _searched(filter, self.sample.allows, [bug])]

    def _of_terms(self) -> list[Prediction]:
        """Beyond the first order: what is in one of two passes, or the tangents, alone."""
        asked = self.stage in BEYOND and (self.shown or not over(self.until))
        return self.planted(_searched(terms.bugs, self.sample) if asked else ())

    @cached_property
    def families(self) -> list[Callable[[], list[Prediction]]]:
        """What else is tried, the cheapest first: terms; what was read, that no rule says; what
        answers tell; listed bugs with the out and lse of another forward pass."""
        read = [bug for bug in self.read if bug not in self.hints]
        inferred = [cache(partial(self._inferred, read, INFERRED[:QUICK]))]
        inferred += [cache(partial(self._inferred, [], [of])) for of in INFERRED[QUICK:]]
        until = partial(itertools.takewhile, lambda _: not over(self.until))
        others = cache(lambda: [*until(self.with_other_inputs(self.listed()))])
        return [cache(self._of_terms), *inferred, others]

    def _inferred(self, bugs: list[Bug], searches: Iterable[Search]) -> list[Prediction]:
        """Predictions of ``bugs``, and of those that searches of the answers give."""
        for of in searches if not over(self.until) else ():
            bugs = [*bugs, *_searched(of, self.sample)]
        bugs = [bug for bug in bugs if self.stage in bug.stages and self.allows(bug)]
        return [*self.planted(bugs), *self.with_other_inputs(bugs)]

    @cached_property
    def of_some(self) -> list[Prediction]:
        """What a bug gives in some of the wrong tensors, or lanes, right ones elsewhere."""
        bad = {name: rows for name in self.tensors if (rows := self.bad(name)).sum() >= ROWS}
        if not bad:
            return []
        found, others = [], [bug for bug in self.listed() if bug not in self.worth]
        every = [self.usual, *(family() for family in self.families), self.planted(others)]
        for guess in itertools.chain(*every):
            by = {n: self.pair(n, guess) for n in bad if guess.bug.store is None}
            told = {n: bad[n] for n, x in by.items() if not noise.rows_off(*x, bad[n], SHARE).any()}
            both = {n: (self.pair(n, guess)[1], self.pair(n)[1]) for n in self.tensors if told}
            changed = {n: noise.rows_off(*x, self.rows[n], SHARE) for n, x in both.items()}
            name = next(iter(told), "")
            if told and (changed[name] & ~told[name]).any():
                places = ", ".join(where(self.question, name, told[name], changed[name]))
                if not OF_LANES.fullmatch(places):
                    continue  # other rows, and by chance
            elif any(changed[n].any() for n in changed.keys() - told.keys()):
                places = f"{' and '.join(told)} alone"
            else:
                continue  # it is all of the bug
            text = f"{guess.bug.variant} in {places}{ELSEWHERE}".strip()
            store = partial(_in_rows, told, self.rights[0].answers)
            found.append(replace(guess.bug, variant=text, store=store))
        return self.planted(found)

    def _held(self, name: str) -> np.ndarray:
        """All rows but those that are inf since the right values are more than their dtype holds,
        as the lse that a backward pass had is far below the right one."""
        found, right = self.pair(name)
        most = float(ml_dtypes.finfo(self.found[name].dtype).max)  # type: ignore[no-untyped-call]
        held = np.isfinite(found) | (np.abs(right) <= most)
        return np.asarray(held.all(axis=2) | (name not in ("dq", "dk", "dv")))

    def pair(self, name: str, guess: Prediction | None = None) -> tuple[Floats, Floats]:
        """What was found and what is right, or predicted, by rows."""
        guess = guess or self.rights[0]
        return by_rows(name, self.found[name]), by_rows(name, guess.answers[name])

    def bad(self, name: str, share: float = 0.0) -> np.ndarray:
        """Rows (tokens, heads) off by more than rounding, or a share, with whatever out and lse."""
        share = share or (2.0**-6 if self.found[name].dtype.itemsize == 2 else 1e-3)
        bad: np.ndarray = self.rows[name]
        for one in self.rights:
            bad = bad & noise.rows_off(*self.pair(name, one), self.rows[name], share)
        if bad.any():  # those that cancel are judged by what went in
            least = self.sizes().get(name, 0.0)
            bad = bad & noise.rows_off(*self.pair(name), self.rows[name], share, least)
        return bad

    def _tells(self, name: str) -> bool:
        """Whether there are numbers in a tensor: zeros and NaN fit whatever makes zeros and NaN."""
        found = by_rows(name, self.found[name])[self.rows[name]]
        with np.errstate(invalid="ignore"):
            told = (np.isfinite(found) & (found != 0)).any(axis=1)
        return bool(told.size and told.mean() > TELLING)

    def leaves(self, guess: Prediction, name: str) -> bool:
        """Whether a bug that does not explain a tensor does nothing to it, or what is there as far
        as it is finite; kernels of backward stages may have it each for itself."""
        if self.stage not in ("forward", "jvp"):
            return True
        a, b = self.pair(name, guess)
        rows = np.isfinite(a).all(axis=2) & np.isfinite(b).all(axis=2) & self.rows[name]
        near = bool(rows.any()) and relative_residual(a, b, rows) < FAR
        return near or np.allclose(b, self.pair(name)[1], equal_nan=True)

    def telling_ones(self, explained: Sequence[Explained]) -> list[Explained]:
        """Those that numbers speak for; of zeros alone only what hardly anything else explains."""
        told = [one for one in explained if self.telling & set(one.fits)]
        zeros = [one for one in explained if one not in told]
        return told + (zeros if len({one.name for one in zeros}) <= OF_ZEROS else [])

    def _fit(self, guess: Prediction, name: str, precision: Precision) -> Fit:
        key = (guess, precision.name)
        if key not in self.noisy:
            given, how = guess.given, precision.rounding
            self.noisy[key] = solve(self.question, self.stage, guess.bug, given=given, rounding=how)
        spend(OF_A_FIT)
        of = self.question, name, self.found[name], guess.answers[name], self.noisy[key][name]
        found = fit(*of, precision.factor, self.rows[name], self.sizes().get(name, 0.0))
        fine = precision.name == self.finest.name  # else rows that cancel scatter more
        return found if fine else found._replace(worst=found.worst / 2)

    def _relative(self, name: str, guess: Prediction) -> float:
        spend(OF_A_DISTANCE)
        a, b = self.pair(name, guess)
        return relative_residual(a, b, self.rows[name]) if a.shape == b.shape else math.inf

    def right_at(self, precision: Precision) -> dict[str, Fit]:
        """The best fit of the right computation, by tensor."""
        fits = {n: [self.fit(right, n, precision) for right in self.rights] for n in self.tensors}
        return {n: min(of, key=lambda f: (not f.good, f.rms)) for n, of in fits.items()}


class StageVerdict(NamedTuple):
    """``right``: the tensors that are. ``explained``: the bugs that fit at ``precision``, for all
    wrong tensors together or for some. ``null``: how the right computation fits.
    ``unexplained``: wrong tensors that nothing fits. ``cut``: something was not tried."""

    work: "Stage"
    precision: str
    right: tuple[str, ...]
    explained: tuple[Explained, ...]
    unexplained: tuple[str, ...]
    null: dict[str, Fit]
    cut: bool = False

    @property
    def sound(self) -> bool:
        return len(self.right) == len(self.work.tensors)

    @property
    def parts(self) -> dict[tuple[str, ...], dict[str, Explained]]:
        """Of tensors that are explained together the best fit of each class."""
        found: dict[tuple[str, ...], dict[str, Explained]] = {}
        for one in self.explained:
            found.setdefault(one.tensors, {}).setdefault(one.name, one)
        return found

    def forms(self, name: str, tensors: tuple[str, ...]) -> dict[str, Bug]:
        """Of a class all that fit these tensors, the best fit first."""
        fitting = (one for one in self.explained if (one.name, one.tensors) == (name, tensors))
        return {one.prediction.bug.variant: one.prediction.bug for one in fitting}

    @property
    def left(self) -> tuple[int, int]:
        """How much is not explained, and by how many bugs the rest; one in all parts is enough."""
        parts = [{*part} for part in self.parts.values()]
        return len(self.unexplained), 1 if parts and set.intersection(*parts) else len(parts)


def good(fits: dict[str, Fit]) -> tuple[str, ...]:
    return tuple(name for name in fits if fits[name].good)


def _verdict(work: Stage, steps: Sequence[Precision]) -> StageVerdict:
    first: dict[str, Fit] = {}
    best: StageVerdict | None = None
    for precision in steps:
        null = work.right_at(precision)
        first = first or null
        if len(right := good(null)) == len(work.tensors):
            return StageVerdict(work, precision.name, right, (), (), null)
        for guesses in work.tiers(precision):
            verdict = _explain(work, guesses, precision, null)
            loose = best is not None and _generic(work, best.explained)
            same = best is not None and loose and verdict and verdict.left == best.left
            if verdict and (best is None or same or verdict.left < best.left):
                best = verdict
            if best and best.left == (0, 1) and not _generic(work, best.explained):
                return best
        if best is not None and not best.unexplained:
            return best
    wrong = tuple(name for name in work.tensors if name not in right)
    return best or StageVerdict(work, steps[0].name, right, (), wrong, first)


def _generic(work: Stage, explained: Sequence[Explained]) -> bool:
    """Whether only what was read off tells what is wrong, of block-sparse attention rules too."""
    names = (*LOOSE, "rows-not-written") if work.question.sparse else ("unknown",)
    return all(one.name in names or one.inexact for one in explained)


def _explain(
    work: Stage, guesses: Sequence[Prediction], precision: Precision, null: dict[str, Fit]
) -> StageVerdict | None:
    """The bugs that fit all tensors of a stage; else those that fit the most of the wrong ones."""
    right = good(null)
    wrong = tuple(name for name in work.tensors if name not in right)
    keys: list[Callable[[Prediction], float]] = [partial(work.relative, n) for n in work.tensors]
    keys.append(lambda guess: max(work.relative(name, guess) for name in work.tensors))
    most = precision.most
    near = [one for key in keys for one in sorted(guesses, key=key)[:NEAREST] if key(one) < most]
    null_of = {name: min(work.relative(name, right) for right in work.rights) for name in wrong}
    whole, parts = list[Explained](), list[Explained]()
    for guess in dict.fromkeys(near):
        close = [name for name in work.tensors if work.relative(name, guess) < most]
        fits = {name: work.fit(guess, name, precision) for name in close}
        fitting = good(fits)
        better = [n for n in wrong if work.relative(n, guess) < BETTER * null_of[n]]
        explained = tuple(name for name in better if name in fitting)
        others = {*wrong} - {*explained}
        # tensors are stored each for itself; what is computed for one is for others of its kernel
        # too: dv is right, so that what is wrong with dk is not P
        changed = {*right} - {*fitting} if guess.bug.store is None else set[str]()
        ruled_out = any(changed & kernel and {*wrong} & kernel for kernel in KERNELS)
        if len(fitting) == len(work.tensors) and explained == wrong:
            whole.append(Explained(guess, work.tensors, fits))
        elif explained and not ruled_out and all(work.leaves(guess, name) for name in others):
            parts.append(Explained(guess, explained, fits))
    whole, parts = work.telling_ones(whole), work.telling_ones(parts)
    told = {e.tensors for e in parts if not e.inexact}
    parts = [e for e in parts if not e.inexact or e.tensors not in told]
    if any(e.tensors == wrong for e in parts):
        whole = [e for e in whole if NO_RULE not in e.prediction.bug.variant]
    exact = [e for e in whole if not e.inexact]
    whole = exact if any(e.name not in LOOSE for e in exact) else whole
    if _generic(work, whole):  # bugs of one kernel say more exactly than rules
        whole = [*(e._replace(tensors=wrong) for e in whole), *parts]

    def merit(e: Explained) -> tuple[object, ...]:
        """What is listed says the same as what was read in fewer words, unless of some rows."""
        bug = e.prediction.bug
        of_rows, read = ELSEWHERE in bug.variant, bug in work.read
        return -len(e.tensors), e.rms > 1.5, of_rows, read, e.rms

    found = sorted(whole, key=merit)
    left = set(wrong)
    chosen: list[Explained] = []
    while tensors := max((left & {*e.tensors} for e in found), key=len, default=set()):
        chosen += [e for e in found if left & {*e.tensors} == tensors]
        left -= tensors
    rest, some = tuple(name for name in wrong if name in left), tuple(chosen)
    return StageVerdict(work, precision.name, right, some, rest, null) if some else None

"""Whose rounding is it? Errors that follow those of an intermediate, or of sums, in fewer bits. The
slope to the right values is 1: such a computation is right, but coarser than it need be."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue.inputs import PRODUCTS, word
from rawattn.check.diagnose.catalogue.partial_sums import Parts, Results, merged, splits, steps
from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.catalogue.sparse.selection import GATED
from rawattn.check.diagnose.engine.attention import FORWARD, NONE, PROGRAMS, Bug, Rounding, solve
from rawattn.check.diagnose.engine.effort import over
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step, changed, times
from rawattn.check.diagnose.evidence.precision import residual, to_dtype, to_tf32
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.inferred import row_numbers, terms
from rawattn.check.diagnose.judge.match import FAR, StageVerdict, good
from rawattn.check.diagnose.judge.proofs import finding

ALL = 2**40
CHUNKS = (1, 4, 8, 16, 32, 64, 128, ALL)  # keys that are added up at once
LOWEST = -600.0  # of a running maximum: less than any score, and exp(-LOWEST) is a number
FOLLOWS, CLEARLY = 0.5, 0.8  # correlation of an error with a predicted one that names its cause
FAR_ONLINE = 0.1  # of the size: more is lost by no 16 bits that go from tile to tile
FEW = 16  # numbers that an error must change, for it to follow anything
RAISED = 0.8  # of the noise of 16 bits: more than right results with float32 sums have
NARROWS = 0.4  # of an error: what an intermediate that is rounded may leave of it
EXACT = 0.01  # the same, beyond doubt
LEAVES = 0.02  # the same, of a number that is another one
ALONE, ALL_BUT = ", there alone,", 0.1  # of one product; what its operands may leave
NARROW = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
OF_DERIVATIVES = {"P": "bP", "D": "D", "dP": "dP"}
OF_TANGENTS = {"E": "E", "e": "e", "P'": "tP", "the sum behind ddout": "tO"}
KEPT = {  # what may be kept in fewer bits, beside S, and the step that makes it
    "forward": {"lse": "L"},
    "backward": OF_DERIVATIVES | {"dS": "dY"},
    "jvp": {"P": "P", **OF_TANGENTS},
    "second": OF_DERIVATIVES | OF_TANGENTS | {"W": "w", "dS": "dS", "dS'": "tdS", "dP'": "tdP"},
}
KEPT_ONLINE = {"P": "exp(S - row maximum so far)", "row_sum": "row_sum", "out": "out"}
TOP = {"top": "the row maximum between tiles"}
Rounded = Callable[[Floats], Floats]


def of_right(verdict: StageVerdict, side: str, *, zeros: bool) -> list[Finding]:
    """What the errors of a right stage are. zeros: there are tensors of nothing but zeros."""
    work, finest = verdict.work, verdict.work.finest.name
    narrow, fits = work.question.dtype.itemsize == 2, work.right_at(work.finest)
    fine = [name for name in good(fits) if not narrow or fits[name].rms <= RAISED]
    if not verdict.sound or len(fine) == len(fits):
        return []
    numbers = () if narrow else (*terms.single(work.sample), *row_numbers.bugs(work.sample))
    coarse = [name for name in verdict.right if name not in fine]
    for guess in work.planted(numbers):  # they may be off by no more than rounding may be
        leaves = max(work.relative(n, guess) / verdict.null[n].relative for n in coarse)
        if leaves < LEAVES:
            said = f"planted in the float64 reference it leaves {leaves:.1g} of what is off"
            of = side, guess.bug.name, f"{work.stage}: {', '.join(coarse)}", "high", (said,)
            return [finding(*of, form=guess.bug.variant)]
    form, told, left = narrowed(verdict, verdict.right)
    allowed = verdict.precision == finest  # of what is coarse without need
    found = [] if zeros or left < EXACT else in_16_bits(verdict, side, verdict.right)
    if found and (found[0].sure or not allowed):
        return found
    if allowed and not (fine or found or left < EXACT):
        return []
    off = {name: verdict.null[name].relative for name in verdict.right}
    most = max(off, key=lambda name: off[name])
    said = f"{', '.join(verdict.right)} are right to the rounding of {verdict.precision}"
    said += f", not to that of {finest}" * (not allowed)
    said += f": {most} is off by {off[most]:.1g} of its size"
    where = f"{work.stage}: {', '.join(name for name in off if off[name] > off[most] / 8)}"
    # float16 may be TF32, which is allowed of float32 operands and has as many bits: of all of them
    of_64 = work.question.dtype == np.float64
    operand = " in float16" in form and form.startswith(("P ", "exp", "dS ")) and not of_64
    if form and not narrow and (left < EXACT or not operand):
        sure = "medium" if operand or "TF32" in form else "high"
        return [finding(side, "narrow-intermediate", where, sure, (told, said), form=form)]
    like = "coarser than need be" if allowed else f"as if computed in {verdict.precision}"
    like = form if left < EXACT else "sums in 16 bits" if found else like
    like += f", but {', '.join(fine)} as in {finest}" * bool(fine and left >= EXACT)
    if of_64 or (fine and not narrow):  # what is coarse in some products alone, nobody asked for
        return [finding(side, "narrow-intermediate", where, "medium", (said,), form=like)]
    evidence = [said, *([told] if told else []), *(x for one in found for x in one.evidence)]
    told_so = finding(side, "rounding", where, "high", evidence, form=like)
    return [replace(told_so, form=like if found else form or None)]


def of_wrong(verdict: StageVerdict, side: str) -> list[Finding]:
    """The same of tensors that are off by more than any rounding of single operations."""
    far = all(verdict.null[name].relative > FAR for name in verdict.unexplained)
    if far or (over(verdict.work.until) and not verdict.work.shown):
        return []
    where = f"{verdict.work.stage}: {', '.join(verdict.unexplained)}"
    form, told, left = narrowed(verdict, verdict.unexplained)
    if left >= EXACT and (found := in_16_bits(verdict, side, verdict.unexplained)):
        return found
    sure = "high" if left < LEAVES else "medium"
    return [finding(side, "narrow-intermediate", where, sure, (told,), form=form)] if form else []


def _followed(
    verdict: StageVerdict, names: Sequence[str], how: Rounding, bugs: Iterable[Bug]
) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Of each bug its form, and how errors, beside those of ``how``, follow those that it makes."""
    work = verdict.work

    def stored(bug: Bug) -> Answers:
        """The rows of what a stage gives, in the dtypes of the answers."""
        x = solve(work.question, work.stage, bug, rounding=how, given=work.given)
        kept = {n: x[n].astype(work.found[n].dtype) for n in names if n in x}
        return {n: by_rows(n, x)[work.rows[n]] for n, x in kept.items()}

    found, null = {n: work.pair(n)[0][work.rows[n]] for n in names}, stored(Bug("right"))
    for bug in bugs:
        planted = stored(bug)
        off = {n: [residual(y[n], x, np.s_[:]) for y in (found, planted)] for n, x in null.items()}
        yield bug.variant, {n: _follows(*of) for n, of in off.items()}


def _follows(error: Floats, predicted: Floats) -> tuple[float, float]:
    """The correlation of an error with a predicted one, and the size of that beside it, or 0."""
    size, of = (float(np.sqrt(np.mean(x**2))) if x.size else 0.0 for x in (error, predicted))
    if not (0 < size < np.inf and 0 < of < np.inf) or np.count_nonzero(predicted) < FEW:
        return 0.0, 0.0
    return float(np.mean(error * predicted) / (size * of)), of / size


def narrowed(verdict: StageVerdict, tensors: Sequence[str]) -> tuple[str, str, float]:
    """Which narrow intermediate explains the errors, a sentence of that, and what it leaves."""
    question, stage = verdict.work.question, verdict.work.stage
    best = (0, 0, NARROWS, "", "")  # how many tensors, how many not, what is left of their errors
    coarse = {*tensors} - {*good(verdict.work.right_at(verdict.work.finest))}
    ways = [verdict.work.finest.rounding] * (question.dtype.itemsize == 2) + [NONE]
    fine = stage == "forward" and all(verdict.null[n].relative < FAR_ONLINE for n in tensors)
    for how in ways:  # loops, which are dear, with the first one alone
        loops = _of_loops(question) if fine and how is ways[0] else ()
        bugs = itertools.chain(_roundings(stage, question.dtype == np.float64), loops)
        for form, of in _followed(verdict, tensors, how, bugs):
            left = {n: 1 + by**2 - 2 * like * by for n, (like, by) in of.items() if by > 1 / 4}
            # what one tensor shows to the last digit, others need not, but of many alike
            of_product = ALONE in form
            if of_product and coarse - left.keys():
                continue
            some = min(left.values(), default=1.0) < EXACT**2 and not of_product
            share = math.sqrt(max(0.0, (min if some else max)(left.values(), default=1.0)))
            if share < (ALL_BUT if of_product else NARROWS):
                named = [name for name, of_it in left.items() if of_it < NARROWS**2]
                unlike = len(left) - len(named)
                best = min(best, (-len(named), unlike, round(share, 4), form, ", ".join(named)))
    *_, share, form, names = best
    text = f"{names}: the error is that of {form}, which leaves {share:.2g} of it; the slope is 1"
    return (form, text, share) if form else ("", "", 1.0)


def _roundings(stage: str, fine: bool) -> Iterator[Bug]:
    """A stage with one intermediate in fewer bits: slope 1, and the same error on every run; of
    ``fine`` numbers float32 is coarse."""
    for dtype in (*NARROW, np.float32)[: len(NARROW) + fine]:
        for words, kept in _kept_in(to_dtype(dtype), stage):
            form = f"{words} in {np.dtype(dtype).name}"
            yield Bug("narrow-intermediate", form, (stage,), steps=kept)
    coarse = {np.dtype(dtype).name: to_dtype(dtype) for dtype in NARROW[:2]}
    coarse |= {"float32": lambda x: x.astype(np.float32)} if fine else {}  # and so are its sums
    coarse |= {"TF32 (or float16)": to_tf32, "TF32, cut off": partial(to_tf32, half=0)}
    for name, r in coarse.items():
        for step in (step for step in PROGRAMS[stage] if step in PRODUCTS):
            product, operands, _ = PRODUCTS[step]
            some = {f"the operands of {product}": operands}
            some |= {f"{word(x, stage)} of {product}": (x,) for x in operands if "TF32" not in name}
            for words, of in some.items():
                narrow = {x: lambda c, r=r, x=x: r(getattr(c, x)) for x in of}
                kept = {step: with_values(step, **narrow)}
                yield Bug("", f"{words}{ALONE} in {name}", (stage,), steps=kept)


def _of_loops(question: Question) -> Iterator[Bug]:
    """A forward pass with what goes from tile to tile, or is merged, in fewer bits."""
    for dtype in NARROW:
        r, name, eight = to_dtype(dtype), np.dtype(dtype).name, np.dtype(dtype).itemsize == 1
        kept_ones = [*(KEPT_ONLINE | TOP).items()][: 1 if eight else None]
        for (kept, words), chunk, down in itertools.product(kept_ones, CHUNKS[2:], (False, True)):
            tiles = f"by tiles of {chunk} keys,{' downwards,' * down}" if chunk < ALL else "whole,"
            form = f"{words}, {tiles} in {name}"
            yield Bug("", form, FORWARD, steps=_online(chunk, down, {kept: r}))
        for at, cut in ({} if eight else splits(question)).items():

            def stored(p: Parts, r: Rounded = r) -> Results:
                return merged(Parts(p.tops, p.sums | {"out": r(p.outs) * p.sums["row_sum"]}))

            form, of = f"out of each of {at} in {name}", steps("forward", cut, stored)
            yield Bug("", form, FORWARD, steps=of)


def _kept_in(r: Rounded, stage: str) -> Iterator[tuple[str, dict[str, Step]]]:
    def over_narrow(c: Context) -> Floats:
        top = c.S.max(axis=-1, initial=-np.inf)
        sums = np.exp(np.where(np.isneginf(top), 0.0, c.L - top))
        return np.asarray(STEPS["O"](changed(c, P=c.P * (sums / r(sums))[..., None])))

    def added_up(c: Context) -> Floats:
        return np.asarray(reduce(lambda a, b: r(a + r(b)), np.moveaxis(c.dO * c.O, -1, 0)) - c.dL)

    def after(step: str) -> dict[str, Step]:
        return {step: lambda c: r(STEPS[step](c))}

    yield "S", after("Y")
    for words, by in (("softmax_scale", 1.0), ("softmax_scale log2(e)", LOG2_E)):
        scaled = {"Q": lambda c, by=by: r(by * c.s * c.Q) / (by * c.s)}
        yield f"Q times {words}, before Q K^T,", {"Y": with_values("Y", **scaled)}
    if stage == "forward":
        yield "P", {"O": lambda c: STEPS["O"](changed(c, P=r(c.P)))}
        yield "the row sum", {"O": over_narrow}
    else:
        step = "P" if stage == "jvp" else "bP"
        yield "lse", {step: with_values("bP", L=lambda c: r(c.L))}
        yield "lse in base 2", {step: with_values("bP", L=lambda c: r(LOG2_E * c.L) / LOG2_E)}
    yield "block_scale", {x: with_values(x, G=lambda c: r(c.G)) for x in GATED}
    for words, step in KEPT[stage].items():
        yield words, after(step)
    if "D" in KEPT[stage]:
        yield "dout . out, before dlse,", {"D": lambda c: r((c.dO * c.O).sum(axis=-1)) - c.dL}
    if stage == "backward":
        yield "P (of P^T dO) and dS", {"dV": with_values("dV", P=lambda c: r(c.P))} | after("dY")
        yield "D, column by column,", {"D": added_up}


def in_16_bits(verdict: StageVerdict, side: str, tensors: Sequence[str]) -> list[Finding]:
    best = (FOLLOWS if verdict.work.question.dtype.itemsize == 2 else CLEARLY, "", "")
    sums = itertools.starmap(_running, itertools.product(NARROW[1::-1], CHUNKS, (False, True)))
    for form, of in _followed(verdict, tensors, NONE, sums):
        best = max([best, *((like, n, form) for n, (like, by) in of.items() if 1 / 4 < by < 4)])
    follows, name, form = best
    said = f"the error of {name} follows that of a running sum in {form}: correlation {follows:.2f}"
    confidence, where = "high" if follows > CLEARLY else "medium", f"{verdict.work.stage}: {name}"
    return [finding(side, "accumulates-in-16-bit", where, confidence, (said,))] if name else []


def _running(dtype: type, chunk: int, alone: bool) -> Bug:
    """Products whose sums run in ``dtype``, by ``chunk`` terms; ``alone``: not P and row sums."""
    rounded = to_dtype(dtype)

    def product(a: Floats, b: Floats) -> Floats:
        total: Floats = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), 1, 1))
        for start in range(0, a.shape[-1], chunk):
            here = slice(start, start + chunk)
            total = rounded(total + rounded(a[..., here] @ b[..., here, :]))
        return np.broadcast_to(total, (*total.shape[:-2], a.shape[-2], b.shape[-1]))

    made = _online(chunk, False, dict.fromkeys(("out",) if alone else KEPT_ONLINE, rounded)) | {
        "dQ": lambda c: c.s * product(c.o(c.dY), c.K),
        "dK": lambda c: c.s * product(c.o(c.dY).swapaxes(1, 2), c.Q),
        "dV": lambda c: product(c.o(c.P).swapaxes(1, 2), c.dO),
    }
    return Bug("", f"{np.dtype(dtype).name}, {chunk} at a time", steps=made)


def _online(chunk: int, down: bool, kept: Mapping[str, Rounded]) -> dict[str, Step]:
    """The softmax over tiles of ``chunk`` keys, with some of it ``kept`` in fewer bits."""
    of = {name: kept.get(name, NONE.operation) for name in KEPT_ONLINE | TOP}

    def results(c: Context) -> tuple[Floats, Floats]:
        top, total = np.full(c.S.shape[:2], LOWEST), np.zeros(c.S.shape[:2])
        out = np.zeros((*c.S.shape[:2], c.V.shape[1]))
        for start in [*range(0, c.S.shape[2], chunk)][:: -1 if down else 1]:
            here = slice(start, start + chunk)
            new = np.maximum(top, c.S[..., here].max(axis=-1))
            factor, weights = np.exp(top - new), np.exp(c.S[..., here] - new[..., None])
            total = of["row_sum"](total * factor + weights.sum(axis=-1))
            out = of["out"](out * factor[..., None] + times(of["P"](weights), c.V[here]))
            top = of["top"](new)
        if c.sink is not None:
            total = total + np.exp(c.sink - top)
        with np.errstate(divide="ignore"):
            return np.log(total) + top, out / np.where(total == 0, 1.0, total)[..., None]

    return {"L": lambda c: results(c)[0], "O": lambda c: results(c)[1]}

"""Bugs that are named without a prediction of the numbers: by an identity, or by where they are.

A cotangent on padding rows that nobody saved, garbage from memory, sums in some unknown order: no
planted computation gives these numbers, but their structure says enough. Long, one proof after the
other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.attention import (
    FIRST,
    NO_BUG,
    NONE,
    Bug,
    Context,
    Floats,
    Rounding,
    Step,
    sequences,
    solve,
    times,
)
from rawattn.check.diagnose.engine.question import (
    BY_ROW,
    OF_KEYS,
    OF_SINKS,
    STAGES,
    Answers,
    Question,
    given_to_backward,
)
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.findings import Check, Finding
from rawattn.check.diagnose.inferred import narrow, stale_max, terms
from rawattn.check.diagnose.judge.match import (
    Fit,
    StageVerdict,
    defined,
    eps_of,
    fit,
    ladder,
    predictions,
    relative_residual,
    smallest_of,
)

Call = Callable[[Question], Answers]
CHUNKS = (1, 4, 8, 16, 32, 64, 128)  # keys that are added up at once
FOLLOWS = 0.5  # correlation of an error with a predicted one that names its cause
FAR = 0.1  # residual of what may not be a copy, or NaN
NARROWS = 0.4  # of an error: what an intermediate that is rounded may leave of it
FEW = 0.05  # share of rows that change from call to call, beside which others can be judged
OF_SINKS_NOISE = 16  # times what rounding makes of them, beyond which they are wrong
UNRELATED = 0.2  # correlation below which two arrays have nothing in common


def finding(side: str, bug: str, where: str, confidence: str, evidence: Sequence[str]) -> Finding:
    known = CLASSES[bug]
    return Finding(side, bug, known.title, where, confidence, tuple(evidence), known.look_at)


# ---- asked twice ------------------------------------------------------------------------------


def of_race(
    question: Question, answers: Answers, side: str, call: Call | None
) -> tuple[list[Finding], Answers]:
    """Two equal calls that differ by more than the order of additions can explain.

    Also the answers that can be judged nonetheless: with the right numbers in rows that change, if
    these are few; else none.
    """
    if call is None:
        return [], answers
    first, second = call(question), call(question)
    found: dict[str, str] = {}
    steady = dict(answers)
    for name in first:
        if name not in second or first[name].shape != second[name].shape:
            continue
        one, two = (by_rows(name, x[name]) for x in (first, second))
        rows = np.asarray(np.isfinite(one).all(axis=2) & np.isfinite(two).all(axis=2))
        changed = relative_residual(one, two, rows)
        eps = eps_of(first[name])
        if changed > 16 * eps:
            bad = (np.abs(one - two).max(axis=2) > 16 * eps * np.abs(one).max(initial=0)) & rows
            places = structure.where(question, name, bad)
            found[name] = (
                f"a second, equal call changes {name} by {changed:.2g} of its size; the order of "
                f"additions explains about {eps:.1g}" + "".join(f"; {x}" for x in places[:1])
            )
            if name in steady and bad.mean() < FEW:
                steady[name] = _with_right_rows(question, answers, name, bad)
            else:
                steady = {}
                break
    if not found:
        return [], answers
    return [finding(side, "race", ", ".join(found), "proved", tuple(found.values()))], steady


def _with_right_rows(
    question: Question, answers: Answers, name: str, bad: np.ndarray
) -> np.ndarray:
    stage = next(stage for stage, names in STAGES.items() if name in names)
    right = predictions(question, answers, stage, [NO_BUG])[0].answers
    if name not in right:
        return answers[name]
    mended = np.where(bad[..., None], by_rows(name, right[name]), by_rows(name, answers[name]))
    of_rows = mended[..., 0].T if name in BY_ROW else mended
    return np.asarray(of_rows.astype(answers[name].dtype))


# ---- numbers that say nothing of how they were made ---------------------------------------------


def of_empty(question: Question, answers: Answers, side: str) -> tuple[list[Finding], Answers]:
    """Tensors that are NaN all over, or copies of an input, and the answers without them."""
    told: dict[str, list[str]] = {}  # titles, and whose
    for stage in question.stages:
        names = [name for name in answers if name in STAGES[stage]]
        right = predictions(question, answers, stage, [NO_BUG])[0].answers if names else {}
        for name in (name for name in names if name in right):
            rows = defined(question, name, right[name])
            found, wanted = (by_rows(name, x) for x in (answers[name], right[name]))
            if not rows.any() or relative_residual(found, wanted, rows) < FAR:
                continue
            if np.isnan(found[rows]).all():
                told.setdefault("every element is NaN", []).append(name)
            elif of := _copied(question, answers[name]):
                told.setdefault(f"a copy of {' and '.join(of)}", []).append(name)
    findings = []
    for text, names in told.items():
        where = ", ".join(names)
        one = finding(side, "unknown", where, "proved", (f"{where}: {text}",))
        look_at = "whether the kernel ran, what it was given, and which array was saved"
        findings.append(replace(one, title=f"{where}: {text}", look_at=look_at))
    gone = {name for names in told.values() for name in names}
    return findings, {name: x for name, x in answers.items() if name not in gone}


def _copied(question: Question, found: np.ndarray) -> list[str]:
    inputs = {n: getattr(question, n) for n in ("q", "k", "v", "dout", "tq", "tk", "tv")}
    return [n for n, x in inputs.items() if x is not None and np.array_equal(x, found)]


def _first_nan(question: Question, name: str, found: np.ndarray) -> str:
    """How many rows have NaN, and where they begin."""
    bad = np.isnan(by_rows(name, found)).any(axis=2)
    bad &= (question.sequence_of("k" if name in OF_KEYS else "q") >= 0)[:, None]
    if not bad.any():
        return ""
    row, head = (int(n) for n in np.argwhere(bad)[0])
    side = "k" if name in OF_KEYS else "q"
    b = int(question.sequence_of(side)[row])
    within = row - int(getattr(question, f"cu_seqlens_{side}")[b])
    return f"{int(bad.sum())} rows have NaN, from row {within} of sequence {b}, head {head}, on"


# ---- zeros ------------------------------------------------------------------------------------


def of_zeros(question: Question, answers: Answers, side: str) -> list[Finding]:
    """Tensors of zeros where the right values are too small for the dtype to hold."""
    found = []
    for stage in question.stages:
        names = [name for name in answers if name in STAGES[stage]]
        if not names:
            continue
        right = predictions(question, answers, stage, [NO_BUG])[0].answers
        for name in (name for name in names if name in right):
            x, wanted = np.asarray(answers[name]), right[name]
            if not x.size or np.any(x.astype(np.float64) != 0) or not np.any(wanted):
                continue
            if not np.any(wanted.astype(x.dtype)):
                size = float(np.abs(np.where(np.isfinite(wanted), wanted, 0)).max())
                found.append(
                    f"{name} is 0 everywhere, and in {x.dtype.name} the right values are too: they "
                    f"reach {size:.2g}, its smallest number is "
                    f"{smallest_of(x):.2g}"
                )
    return [finding(side, "vacuous", "the comparison", "proved", found)] if found else []


# ---- sinks ------------------------------------------------------------------------------------


def of_sinks(question: Question, answers: Answers, side: str) -> list[Finding]:
    """Gradients of sinks that are off by more than rounding: the sums of all rows of a head."""
    found = []
    for name, stage in zip(OF_SINKS, ("backward", "second"), strict=True):
        if name not in answers or stage not in question.stages or question.sinks is None:
            continue
        given, coarsest = given_to_backward(question, answers), ladder(question.dtype)[-1]
        right = solve(question, stage, given=given)[name]
        rounded = solve(question, stage, given=given, rounding=coarsest.rounding)[name]
        noise = coarsest.factor * np.abs(rounded - right).max()
        noise += eps_of(question.q) * np.abs(right).max()
        off = np.abs(np.asarray(answers[name], dtype=np.float64) - right)
        if off.max() <= OF_SINKS_NOISE * noise:
            continue
        without_dlse = Bug("", steps={"D": lambda c: (c.dO * c.O).sum(axis=-1)})
        forms = {
            "they are 0": np.zeros_like(right),
            "their sign is the other one": -right,
            "dlse is not in them": solve(question, stage, without_dlse, given=given)[name],
        }
        said = [f"{name}: off by up to {off.max():.2g}; rounding explains {noise:.1g}"]
        for text, form in forms.items():
            if np.abs(answers[name] - form).max() <= OF_SINKS_NOISE * noise:
                said.append(f"{name}: {text}")
        found.append(finding(side, "sinks-gradient", name, "high", said))
    return found


# ---- identities alone ---------------------------------------------------------------------------

RUNS = {"I7": "unknown", "I8": "offsets-shifted", "I9": "neighbour-leak", "I11": "score-scale"}
EXACT = ("I8", "I9", "I11")  # hold in every precision


def of_runs(
    question: Question, side: str, verdicts: Sequence[StageVerdict], failing: Sequence[Check]
) -> list[Finding]:
    """Answers that are right, and not those to questions that differ in what must not matter."""
    finest = ladder(question.dtype)[0].name
    coarse = any(verdict.precision != finest for verdict in verdicts)
    found = []
    for check in failing:
        if check.name in RUNS and not (coarse and check.name not in EXACT):
            said = f"{check.name} fails ({check.text}), though the results themselves are right"
            one = finding(side, RUNS[check.name], check.where, "proved", (said,))
            title = f"{one.title}: seen where the function is asked another question"
            found.append(replace(one, title=title))
    return found


# ---- sums in 16 bits --------------------------------------------------------------------------


def of_noise(
    question: Question, answers: Answers, side: str, verdict: StageVerdict
) -> list[Finding]:
    """A right computation whose errors follow those of intermediates or sums in 16 bits."""
    if not verdict.sound:
        return []
    noise = {name: verdict.null[name].rms for name in verdict.tensors}
    followed = terms.followed(question, answers, verdict.stage, noise)
    if followed:
        stage = verdict.stage
        return [
            finding(side, one.bug, f"{stage}: {one.tensor}", one.confidence, (one.evidence,))
            for one in followed
        ]
    if verdict.precision == ladder(question.dtype)[0].name:
        return []
    return in_16_bits(question, answers, side, verdict, verdict.tensors)


def of_precision(
    question: Question, answers: Answers, side: str, verdict: StageVerdict
) -> list[Finding]:
    """Right results whose rounding is that of a coarser dtype than they have."""
    finest = ladder(question.dtype)[0].name
    if not verdict.sound or verdict.precision == finest:
        return []
    off = max((verdict.null[name].relative, name) for name in verdict.tensors)
    said = (
        f"{', '.join(verdict.tensors)} agree with the right values down to the rounding of "
        f"{verdict.precision}, not to that of {finest}: {off[1]} is off by {off[0]:.1g} of its size"
    )
    told = rounded(question, answers, verdict, verdict.tensors)
    return [finding(side, "rounding", verdict.stage, "high", (said, *told))]


def rounded(
    question: Question, answers: Answers, verdict: StageVerdict, tensors: Sequence[str]
) -> list[str]:
    """Which intermediate in which narrow dtype leaves hardly an error of those that it changes."""
    if verdict.stage not in FIRST or question.dtype == np.float64:
        return []
    right = predictions(question, answers, verdict.stage, [NO_BUG])[0]
    rows = {name: defined(question, name, right.answers[name]) for name in tensors}

    def stored(bug: Bug, how: Rounding) -> Answers:
        found = solve(question, verdict.stage, bug, rounding=how, given=right.given)
        return {name: found[name].astype(answers[name].dtype) for name in tensors}

    def apart(one: Answers, other: Answers) -> dict[str, float]:
        pairs = {n: (by_rows(n, one[n]), by_rows(n, other[n])) for n in tensors}
        return {n: relative_residual(*pairs[n], rows[n]) for n in tensors}

    best = (0, NARROWS, "")  # how many tensors, what is left of their errors
    for how in (ladder(question.dtype)[0].rounding, NONE)[: 4 // question.dtype.itemsize]:
        null = stored(NO_BUG, how)
        start = apart(answers, null)
        for bug in narrow.roundings(verdict.stage):
            planted = stored(bug, how)
            changed = [n for n, x in apart(planted, null).items() if x > start[n] / 4 > 0]
            left = apart(answers, planted)
            share = max((left[n] / start[n] for n in changed), default=1.0)
            if share < NARROWS:
                text = f"{', '.join(changed)}: the error is that of {bug.variant}"
                best = min(best, (-len(changed), share, text))
    _, share, text = best
    return [f"{text}, which leaves {share:.2g} of it; the slope is 1"] if text else []


def in_16_bits(
    question: Question,
    answers: Answers,
    side: str,
    verdict: StageVerdict,
    tensors: Sequence[str],
) -> list[Finding]:
    if question.dtype.itemsize > 4:
        return []
    best: tuple[float, str, str] = (FOLLOWS, "", "")
    right = predictions(question, answers, verdict.stage, [NO_BUG])
    for dtype in (np.float16, ml_dtypes.bfloat16):
        for chunk in CHUNKS:
            bug = Bug("accumulates-in-16-bit", steps=_running(dtype, chunk))
            for base in right:
                planted = solve(question, verdict.stage, bug, given=base.given)
                for name in tensors:
                    follows = _follows(question, name, answers[name], base.answers, planted)
                    if follows > best[0]:
                        form = f"{np.dtype(dtype).name}, {chunk} at a time"
                        best = follows, name, form
    if not best[1]:
        return []
    evidence = (
        f"the error of {best[1]} follows that of a running sum in {best[2]}: correlation "
        f"{best[0]:.2f}. The slope to the right values is 1, and the error grows with the length."
    )
    confidence = "high" if best[0] > 0.8 else "medium"
    where = f"{verdict.stage}: {best[1]}"
    return [finding(side, "accumulates-in-16-bit", where, confidence, (evidence,))]


def _follows(
    question: Question, name: str, found: np.ndarray, right: Answers, planted: Answers
) -> float:
    """Correlation of an error with the planted one, if their sizes are alike; else 0."""
    if name not in planted:
        return 0.0
    rows = defined(question, name, right[name])
    x, base, other = (by_rows(name, a)[rows] for a in (found, right[name], planted[name]))
    with np.errstate(invalid="ignore"):
        error, predicted = (x - base).ravel(), (other - base).ravel()
    if not error.size or not np.isfinite(error).all() or not np.isfinite(predicted).all():
        return 0.0
    sizes = float(np.sqrt(np.mean(error**2))), float(np.sqrt(np.mean(predicted**2)))
    if not sizes[0] or not 0.25 < sizes[1] / sizes[0] < 4:
        return 0.0
    return float(np.mean(error * predicted) / (sizes[0] * sizes[1]))


def _running(dtype: type, chunk: int) -> dict[str, Step]:
    """Products whose long sums run in ``dtype``, ``chunk`` terms at a time."""

    def rounded(x: Floats) -> Floats:
        return x.astype(dtype).astype(np.float64)

    def product(a: Floats, b: Floats) -> Floats:
        total: Floats = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), 1, 1))
        for start in range(0, a.shape[-1], chunk):
            here = slice(start, start + chunk)
            total = rounded(total + rounded(a[..., here] @ b[..., here, :]))
        return np.broadcast_to(total, (*total.shape[:-2], a.shape[-2], b.shape[-1]))

    def online(c: Context) -> tuple[Floats, Floats]:
        """The softmax as kernels have it, out and row_sum in ``dtype``."""
        top, total = np.full(c.S.shape[:2], -np.inf), np.zeros(c.S.shape[:2])
        out = np.zeros((*c.S.shape[:2], c.V.shape[1]))
        for start in range(0, c.S.shape[2], chunk):
            here = slice(start, start + chunk)
            new = np.maximum(top, c.S[..., here].max(axis=-1))
            safe = np.where(np.isneginf(new), 0.0, new)
            factor = np.exp(np.where(np.isneginf(top), safe, top) - safe)
            weights = np.exp(c.S[..., here] - safe[..., None])
            total = rounded(total * factor + weights.sum(axis=-1))
            out = rounded(out * factor[..., None] + times(rounded(weights), c.V[here]))
            top = new
        c.accumulated = out / np.where(total == 0, 1.0, total)[..., None]
        with np.errstate(divide="ignore"):
            return np.log(total) + np.where(np.isneginf(top), 0.0, top), c.S

    return {
        "softmax": online,
        "O": lambda c: c.accumulated,
        "dQ": lambda c: c.s * product(c.dY, c.K),
        "dK": lambda c: c.s * product(c.dY.swapaxes(1, 2), c.Q),
        "dV": lambda c: product(c.P.swapaxes(1, 2), c.dO),
    }


# ---- structure --------------------------------------------------------------------------------


def of_structure(
    question: Question, answers: Answers, side: str, verdict: StageVerdict
) -> list[Finding]:
    """What can be said of wrong tensors that no bug of the catalogue reproduces."""
    names = verdict.unexplained
    found = in_16_bits(question, answers, side, verdict, names)
    if found:
        return found
    where = f"{verdict.stage}: {', '.join(names)}"
    if said := rounded(question, answers, verdict, names):
        return [finding(side, "narrow-intermediate", where, "high", said)]
    right = predictions(question, answers, verdict.stage, [NO_BUG])[0].answers
    for proof in (_stale_max, _unrelated, _constant_rows, _rearranged, _dead, _by_place_in_tile):
        named = proof(question, answers, right, verdict)
        if named is not None:
            bug, confidence, evidence = named
            return [finding(side, bug, where, confidence, evidence)]
    said = [f"no bug of the catalogue reproduces {', '.join(names)} down to rounding"]
    given = " of the out and lse beside it" if verdict.source else ""
    for name in names:
        bad = wrong_rows(question, name, answers[name], right[name])
        places = structure.where(question, name, bad)
        slope, residual, _ = structure.fit(*(_finite_of(name, x) for x in (answers, right)))
        fitted = (
            f"slope to the right values{given} {slope:.4g}, which leaves {residual:.2g} of the size"
        )
        nan = [text] if (text := _first_nan(question, name, answers[name])) else []
        said.append(f"{name}: " + "; ".join((*nan, *places[:1], fitted, *places[1:])))
    told = finding(side, "unknown", where, "low", said)
    return [replace(told, look_at=_conclusion(verdict) or told.look_at)]


CONCLUSIONS: dict[tuple[str, ...], str] = {
    ("out",): "what comes after P, since lse is right and so scores, mask and row sums are: the "
    "product P V, v itself and its layout, the rescaling and the store of out",
    ("lse",): "how lse is made of the maximum and the row sum, and its store: out is right",
    ("out", "lse"): "the scores and the mask, and the row sums",
    ("dv",): "the product P^T dout and the store of dv: P is right, since dq and dk are",
    ("dq",): "the product dS K and the store of dq: dS is right, since dk is",
    ("dk",): "the product dS^T Q and the store of dk: dS is right, since dq is",
    ("dq", "dk"): "dS = P o (dP - D): P is right, since dv is; so the row term D (delta), dP, "
    "or a factor on dS (a mask, a dropout, a slope of the scores)",
    ("dk", "dv"): "the sums over queries and over the heads of a group, and their stores: P and dS "
    "are right, since dq is",
    ("dq", "dk", "dv"): "P = exp(S - lse): the scores, the mask, and the lse that is read",
    ("tout",): "what comes after the tangent of lse, which is right: P' V and P tv",
    ("tout", "tlse"): "the sum of P o E: tlse is it, and tout has it too",
    ("gq", "gk"): "dS' = P' o (dP - D) + P o (dP' - W): P' is right, since gv is",
    ("gk", "gv"): "the sums over queries and over the heads of a group, and their stores: P' and "
    "dS' are right, since gq is",
    ("gv",): "the product P'^T dout and the store of gv",
}


def _conclusion(verdict: StageVerdict) -> str:
    """Where to look, by which tensors of a stage are right and which are wrong."""
    wrong, tensors = verdict.unexplained, set(verdict.tensors)
    if wrong not in CONCLUSIONS or set(wrong) | set(verdict.right) != tensors:
        return ""
    whole = {"out": ("out", "lse"), "lse": ("out", "lse"), "gv": ("gq", "gk", "gv")}
    needed = whole.get(wrong[0], ("dq", "dk", "dv") if wrong[0][0] == "d" else wrong)
    return CONCLUSIONS[wrong] if tensors >= set(needed) else ""


def _finite_of(name: str, of: Answers) -> Floats:
    found = by_rows(name, of[name])
    return np.where(np.isfinite(found), found, 0.0)


Named = tuple[str, str, tuple[str, ...]] | None


def wrong_rows(question: Question, name: str, found: np.ndarray, right: Floats) -> np.ndarray:
    """Rows (tokens, heads) that are off by more than rounding of their size."""
    a, b = by_rows(name, found), by_rows(name, right)
    rows = defined(question, name, right)
    with np.errstate(invalid="ignore"):
        error = np.where(a == b, 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error).max(axis=2)
    size = np.abs(np.where(np.isfinite(b), b, 0.0)).max(axis=2)
    eps = 2.0**-6 if np.asarray(found).dtype.itemsize == 2 else 1e-3
    wrong: np.ndarray = rows & (
        error > eps * np.maximum(size, size[rows].mean() if rows.any() else 0.0)
    )
    return wrong


def _stale_max(
    question: Question, answers: Answers, right: Answers, verdict: StageVerdict
) -> Named:
    """Each row has a maximum of its own in it, or lacks it."""
    return stale_max.of_forward(question, answers, verdict.unexplained)


def _unrelated(
    question: Question, answers: Answers, right: Answers, verdict: StageVerdict
) -> Named:
    """No tensor of the stage has anything in common with the right one."""
    if verdict.right or (verdict.stage == "forward" and _of_these_inputs(question, answers)):
        return None
    if verdict.stage != "forward" and len(verdict.tensors) == 1:  # a product may be at fault
        return None
    said = []
    for name in verdict.tensors:
        rows = defined(question, name, right[name])
        a, b = (by_rows(name, x)[rows].ravel() for x in (answers[name], right[name]))
        if a.size < 64 or not np.isfinite(a).all() or not np.isfinite(b).all():
            continue
        if not a.std() or not b.std():
            return None
        correlation = float(np.corrcoef(a, b)[0, 1])
        if abs(correlation) > UNRELATED and name not in BY_ROW:
            return None
        if not 0.3 < a.std() / b.std() < 3:
            return None
        said.append(f"{name}: correlation with the right values {correlation:.2f}, of equal size")
    return ("other-data", "medium", tuple(said)) if said else None


def _of_these_inputs(question: Question, answers: Answers) -> bool:
    """Whether out or lse of the answers are near to the right ones."""
    right = solve(question, "forward")
    for name, near in (("out", 0.5), ("lse", 2.0**-8)):
        if name in answers:
            a, b = (by_rows(name, x) for x in (answers[name], right[name]))
            if relative_residual(a, b, defined(question, name, right[name])) < near:
                return True
    return False


def _constant_rows(
    question: Question, answers: Answers, right: Answers, verdict: StageVerdict
) -> Named:
    """dv of a sequence and head differs by the same row for every key."""
    if verdict.unexplained != ("dv",) or question.sparse:
        return None
    found = answers["dv"].astype(np.float64)
    extra = np.zeros_like(found)
    for _, _, keys in sequences(question):
        extra[keys] = (found[keys] - right["dv"][keys]).mean(axis=0)
    if not np.isfinite(extra).all():
        return None
    fits = _fit_of(question, answers, right["dv"] + extra, "dv")
    if not fits.good:
        return None
    size = float(np.abs(extra).max())
    text = (
        f"dv of every sequence and head is the right one plus one and the same row for all its "
        f"keys (up to {size:.3g}): what queries of 0, whose P is uniform, add with their cotangent"
    )
    return "padded-grad-out", "high", (text,)


def _fit_of(question: Question, answers: Answers, wanted: Floats, name: str) -> Fit:
    precision = ladder(question.dtype)[-1]
    base = predictions(question, answers, "backward", [NO_BUG])[0]
    rounded = solve(question, "backward", rounding=precision.rounding, given=base.given)[name]
    noisy = wanted + (rounded - base.answers[name])
    rows = defined(question, name, base.answers[name])
    return fit(question, name, answers[name], wanted, noisy, precision.factor, rows)


def _rearranged(
    question: Question, answers: Answers, right: Answers, verdict: StageVerdict
) -> Named:
    """The same numbers in another order."""
    for name in verdict.unexplained:
        a, b = (by_rows(name, x).ravel() for x in (answers[name], right[name]))
        if a.shape != b.shape or not a.size or not np.isfinite([a, b]).all():
            return None
        size = np.sqrt(np.mean(b**2))
        moved = np.sqrt(np.mean((a - b) ** 2))
        sorted_ = np.sqrt(np.mean((np.sort(a) - np.sort(b)) ** 2))
        if moved < 0.3 * size or sorted_ > max(2 * eps_of(answers[name]), 1e-5) * size:
            return None
    text = "sorted, its values are the right ones: only their places are wrong"
    return "transposed", "medium", (text,)


def _dead(question: Question, answers: Answers, right: Answers, verdict: StageVerdict) -> Named:
    """Wrong in the rows that see no key, and in no others."""
    for name in verdict.unexplained:
        if name in OF_KEYS:
            continue
        lse = solve(question, "forward")["lse"].T
        bad = wrong_rows(question, name, answers[name], right[name])
        if not bad.any() or not np.isneginf(lse[bad]).all():
            return None
        text = f"{name}: {int(bad.sum())} rows are wrong, all of them rows without an allowed key"
        return "dead-rows", "high", (text,)
    return None


def _by_place_in_tile(
    question: Question, answers: Answers, right: Answers, verdict: StageVerdict
) -> Named:
    """Which rows are wrong depends on their number modulo a tile, in all sequences and heads."""
    for name in verdict.unexplained:
        bad = wrong_rows(question, name, answers[name], right[name])
        for tile, places in _periods(question, name, bad):
            text = (
                f"{name}: wrong are the rows whose number in the sequence, modulo {tile}, is "
                f"{structure.named('', places).strip()}, in every sequence, and no others"
            )
            return "tile-period", "medium", (text,)
    return None


def _periods(question: Question, name: str, bad: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    within = np.full(len(bad), -1)
    for places in _tokens(question, name):
        within[places] = np.arange(len(places))
    inside = within >= 0
    for tile in (8, 16, 32, 64, 128):
        share = np.full(tile, np.nan)
        for place in range(tile):
            here = bad[inside & (within % tile == place)]
            if here.size:
                share[place] = here.mean()
        known = share[~np.isnan(share)]
        places = np.nonzero(np.nan_to_num(share) > 0.8)[0]
        # right rows between wrong ones: else it is no period, but a first or a last part
        comes_back = any(
            np.isin(within[rows], places + tile).any() for rows in _tokens(question, name)
        )
        both = (known > 0.8).any() and (known < 0.02).any()
        if comes_back and both and np.all((known > 0.8) | (known < 0.02)):
            yield tile, places


def _tokens(question: Question, name: str) -> Iterator[np.ndarray]:
    """The tokens of every sequence, on the side that a tensor has its rows on."""
    for _, rows, keys in sequences(question):
        yield keys if name in OF_KEYS else rows

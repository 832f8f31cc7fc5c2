"""Bugs that are named without a prediction of the numbers: by an identity, by where they are, or by
what only a case itself shows: ignored strides, NaN that nobody must see, rows past the end. And
which options, where nobody said them, would make a wrong answer right. Long by what they read."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.attention import Given, solve
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence import precision, structure
from rawattn.check.diagnose.evidence.places import places_of
from rawattn.check.diagnose.evidence.precision import defined, eps_of, ladder, relative_residual
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.inferred import row_numbers
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.judge.match import StageVerdict
from rawattn.check.expected import Expected, expect

FAR = 0.1  # residual of what may not be a copy, or NaN
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
SMALLEST = 2.0**-20  # what a term may be off by in float16 that is too small for a relative error
OF_SINKS_NOISE = 16  # times what rounding makes of them, beyond which they are wrong
STARTS, STEPS, STEP = (0.3, 1.0, 4.0), 9, 1e-4  # of Newton's method, for a scale
CELLS = 2_000_000  # intervals of all rows that are tried
NEAR = {2: 2e-2, 4: 1e-4, 8: 1e-6}  # of the values, by the bytes of the inputs
Option = tuple[str, dict[str, Any]]  # what may have been meant, in words, and as fields
# fields of a Question that Tensors have too
ARRAYS = ("q", "k", "v", "dout", "dlse", "tq", "tk", "tv")
# what must not matter: the class and how sure it is (keys that are seen do the same where all of
# them are NaN), the title, the evidence, and where to look
STRIDES = (
    *("input-layout", "high"),
    "the strides of {inputs} are ignored, as if they were contiguous",
    "right with all inputs contiguous, wrong with {inputs} strided",
    "where addresses are made: strides of tokens and heads, given or asked for",
)
NANS = (
    *("neighbour-leak", "medium"),
    "NaN in rows of {inputs} that nobody sees gets into {results}, if only as 0 * NaN",
    "right with all inputs 0 in rows that nobody sees, wrong with {inputs} NaN there",
    "loads past the end of a sequence, of a list or of what is in use: such rows must be zeros in "
    "every product, not masked in P alone",
)


def finding(
    side: str, bug: str, where: str, sure: str, said: Sequence[str], *others: str, **words: Any
) -> Finding:
    """Of a class, in its words where there are no other ``words`` (title, look_at); with the form
    that it has here, if one of them. others: what would look the same."""
    known, form = CLASSES[bug], words.pop("form", "")
    title = known.title + (f": {form}" if form else "")
    found = Finding(side, bug, title, where, sure, tuple(said), known.look_at, others)
    return replace(found, **{name: text for name, text in words.items() if text})


def reference_of(question: Question, names: Collection[str], given: Given) -> Answers:
    """The right values of these, a backward pass given this out and lse."""
    found: Answers = {}
    for stage in (x for x in question.stages if not {*STAGES[x]}.isdisjoint(names)):
        found |= solve(question, stage, given=given)
    return {name: found[name] for name in names if name in found}


def of_empty(question: Question, answers: Answers, side: str) -> tuple[list[Finding], Answers]:
    """Tensors that are NaN all over, or copies of others, and the answers without them; and those
    of zeros where the right values are too small for the dtype to hold."""
    told: dict[str, list[str]] = {}  # titles, and whose
    zeros = []
    inputs = {n: getattr(question, n) for n in ("q", "k", "v", "dout", "tq", "tk", "tv")}
    rights = reference_of(question, answers, question.given_to_backward(answers))
    for name, right in rights.items():
        x, rows = answers[name], defined(question, name, right)
        found, wanted = by_rows(name, x), by_rows(name, right)
        if x.size and right.any() and not found.any() and not right.astype(x.dtype).any():
            zeros.append(f"{name} is 0 everywhere, and in {x.dtype.name} the right values are too")
        if not rows.any() or relative_residual(found, wanted, rows) < FAR:
            continue
        alike = (n for n, y in rights.items() if y.shape == right.shape)
        itself = {n for n in alike if np.allclose(rights[n], right, equal_nan=True)}
        others = {n: answers[n] for n in rights if n not in itself}
        of = [n for n, y in (inputs | others).items() if y is not None and np.array_equal(y, x)]
        if np.isnan(found[rows]).all():
            told.setdefault("every element is NaN", []).append(name)
        elif of and found.any():
            told.setdefault(f"a copy of {' and '.join(of)}", []).append(name)
    findings = [finding(side, "vacuous", "the comparison", "proved", zeros)] if zeros else []
    look_at = "whether the kernel ran, what it was given, and which array was saved"
    for text, names in told.items():
        title = f"{', '.join(names)}: {text}"
        given = (side, "unknown", ", ".join(names), "proved", (title,))
        findings.append(finding(*given, title=title, look_at=look_at))
    gone = {name for names in told.values() for name in names}
    return findings, {name: x for name, x in answers.items() if name not in gone}


def of_past(q: Question | Case, answers: Answers, side: str, sure: str = "medium") -> list[Finding]:
    """Rows behind the last sequence that are not 0."""
    said = {}
    for name in (n for names in STAGES.values() for n in names if n in answers):
        x, sequence = answers[name], q.sequence_of(side_of(name))
        there = x[sequence < 0] if x.ndim > 2 and len(x) == len(sequence) else np.zeros(0)
        if there.any():
            number = f"{there[there != 0].flat[0]:.4g}"
            said[name] = f"rows of {name} past the last sequence hold {number}"
    title = f"rows of {', '.join(said)} past the last sequence must be 0, and are not"
    look_at = "the bounds of what is stored, and what results begin with"
    given = (side, "rows-not-written", ", ".join(said), sure, [*said.values()])
    return [finding(*given, title=title, look_at=look_at)] if said else []


def of_sinks(q: Question, answers: Answers, side: str, others: Sequence[Finding]) -> list[Finding]:
    """Gradients of sinks that are off by more than rounding, unless they follow from ``others``."""
    if any(one.bug != "rounding" for one in others):
        return []
    found = []
    for name, stage in (("dsinks", "backward"), ("gsinks", "second")):
        if name not in answers or stage not in q.stages or q.sinks is None:
            continue
        given, coarsest = q.given_to_backward(answers), ladder(q.dtype)[-1]
        right = solve(q, stage, given=given)[name]
        rounded = solve(q, stage, given=given, rounding=coarsest.rounding)[name]
        noise = coarsest.factor * np.abs(rounded - right).max()
        noise += eps_of(q.q) * np.abs(right).max()
        wrong, allowed = np.asarray(answers[name], dtype=np.float64), OF_SINKS_NOISE * noise
        if (off := np.abs(wrong - right).max()) > allowed:
            evidence = [f"{name}: off by up to {off:.2g}; rounding explains {noise:.1g}"]
            forward = given or itemgetter("out", "lse")(solve(q, "forward"))
            told = row_numbers.of_sinks(q, stage, forward, wrong, allowed)
            found.append(finding(side, "sinks-gradient", name, "high", evidence, form=told))
    return found


def of_race(question: Question, call: Callable[[Question], Answers], side: str) -> list[Finding]:
    """Answers that change when the same is asked again, by more than another order of sums does."""
    q, differ = replace(question, out=None, lse=None), dict[str, tuple[float, float]]()
    ulps = ULPS[q.dtype.itemsize] * eps_of(q.q)  # also of results in more bits
    with suppress(Exception):  # a function may refuse to be asked again
        first, again = call(q), call(q)
        tiny = np.sqrt(max((*q.lengths_q, *q.lengths_k))) * SMALLEST if q.dtype == np.float16 else 0
        for name in (n for n, x in again.items() if n in first and x.ndim > 1):  # of rows
            inside = slice(*q.offsets(name)[[0, -1]].tolist())
            before, now = (by_rows(name, of[name])[inside] for of in (first, again))
            with np.errstate(invalid="ignore"):
                off = np.abs(np.where(np.isfinite(before) & (now != before), now - before, 0))
            allowed = float(ulps * np.abs(precision.finite(before)).max(initial=0.0) + tiny)
            most = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
            differ |= {name: (most, allowed)} if most > allowed else {}
    if not differ:
        return []
    most, allowed = max(differ.values(), key=lambda change: change[0] - change[1])
    said = f"a second, equal call changes them by up to {most:.2g}"
    said += f"; the order of additions explains {allowed:.1g}"
    return [finding(side, "race", ", ".join(differ), "proved", (said,))]


def of_traps(candidate: Candidate, case: Case, side: str) -> list[Finding]:
    """What is wrong with ``candidate``, called ``side``, where nothing else is."""
    expected = expect(candidate.fit(case))
    given = {name: getattr(expected.tensors, name, None) for name in (*ARRAYS, "block_scale")}
    there = {name: x for name, x in given.items() if x is not None}
    strided = {n: np.ascontiguousarray(x) for n, x in there.items() if not x.flags.c_contiguous}
    filled = {n: np.where(np.isnan(x), x.dtype.type(0), x) for n, x in there.items()}
    filled = {n: x for n, x in filled.items() if np.isnan(there[n]).any()}
    try:
        wrong = _failing(candidate, expected)
        for plain, trap in (strided, STRIDES), (filled, NANS):
            if plain and not _failing(candidate, expected, **plain):
                one = [n for n in plain if _failing(candidate, expected, **plain | {n: there[n]})]
                words = {"inputs": ", ".join(one), "results": ", ".join(wrong)}
                bug, sure, title, said, look_at = (text.format(**words) for text in trap)
                of = (side, bug, words["results"], sure, (said,))
                return [finding(*of, title=title, look_at=look_at)] if one else []
    except Exception:  # of which others tell
        return []
    for name, x in wrong.items():
        target, due = expected.targets[name], x.copy()
        if x.ndim < 3 or target.sequence_of.shape != x.shape[:1]:
            return []
        due[target.sequence_of < 0] = 0
        if target.judge(due).verdict == "FAIL":  # past the end is not all that is wrong
            return []
    return of_past(expected.case, wrong, side, "high")


def of_nan(found: Finding) -> bool:
    """Whether a finding says no more than that NaN gets into results."""
    return found.bug == NANS[0] and found.form is None


def _failing(candidate: Candidate, expected: Expected, **changes: Any) -> Answers:
    """The results that are wrong, with other inputs of the same numbers."""
    found = candidate.run(replace(expected, tensors=replace(expected.tensors, **changes)))
    there = ((name, of) for name, of in expected.targets.items() if name in found)
    return {name: found[name] for name, of in there if of.judge(found[name]).verdict == "FAIL"}


def of_structure(verdict: StageVerdict, side: str) -> Finding:
    """What can be said of wrong tensors that no bug of the catalogue reproduces."""
    work, names = verdict.work, verdict.unexplained
    question, where = work.question, f"{work.stage}: {', '.join(names)}"
    said, places = ["no known bug gives these numbers"], set[str]()
    for name in names:
        nan = int(np.isnan(by_rows(name, work.found[name])).any(axis=2).sum())
        told = [f"{nan} rows have NaN"] if nan else []
        told += structure.where(question, name, work.bad(name))
        columns = [] if nan else [*structure.columns(*work.pair(name), work.bad(name))]
        places |= {": ".join((name, *columns))} if work.found[name].ndim > 2 else set()
        said.append(f"{name}: {'; '.join(told + columns)}")
    title = next((x for x in places if len(places) == 1 and ": " in x), "")
    judged = {*names, *verdict.right} == {*work.tensors} >= {*NEEDED.get(work.stage, names)}
    look_at = CONCLUSIONS.get(names, "") if judged else ""
    return finding(side, "unknown", where, "low", said, title=title, look_at=look_at)


NEEDED = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
# where to look, by which of these are wrong
CONCLUSIONS: dict[tuple[str, ...], str] = {
    ("out",): "what comes after P, as lse is right: P V, v and its layout, rescaling, the store",
    ("lse",): "how lse is made of the maximum and the row sum, and its store: out is right",
    ("out", "lse"): "the scores and the mask, and the row sums",
    ("dv",): "the product P^T dout and the store of dv: P is right, since dq and dk are",
    ("dq",): "the product dS K and the store of dq: dS is right, since dk is",
    ("dk",): "the product dS^T Q and the store of dk: dS is right, since dq is",
    ("dq", "dk"): "dS = P o (dP - D), as dv and so P is right: D (delta), dP, or a factor on dS",
    ("dk", "dv"): "sums over queries and heads of a group, and stores: P, dS are right, as dq is",
    ("dq", "dk", "dv"): "P = exp(S - lse): the scores, the mask, and the lse that is read",
}


def meant(
    question: Question, answers: Answers, left_out: Collection[str], *, forward: bool
) -> Iterator[Option]:
    """What may have been meant of what is ``left_out``; ``forward``: the forward pass is wrong."""
    if "causal" in left_out:
        yield f"causal = {not question.causal}", {"causal": not question.causal}
    if question.sparse:
        return
    if not forward:
        # D = dout . out - dlse with some dlse, which dq tells: it is linear in that of its row
        sample = Sample(question, answers, "backward") if "dlse" in left_out else None
        if question.dlse is None and sample and "dq" in sample.wrong:
            if read := row_numbers.read_of(sample, row_numbers.DELTA):
                yield "a cotangent of lse (dlse)", {"dlse": -read[1].astype(np.float32)}
        return
    if (wanted := _seen(question, answers)) is not None:
        for words, changes in _masks(question, wanted):
            as_read = np.array_equal(places_of(replace(question, **changes)).right, wanted)
            if as_read and changes.keys() <= {*left_out}:
                yield words, changes
                return
    # another softmax_scale that gives these lse: by Newton's method from several ones
    found = np.asarray(answers.get("lse", np.zeros(0)), dtype=np.float64)
    for start in STARTS if found.size and "softmax_scale" in left_out else ():
        s = question.scale * start
        for _ in range(STEPS):
            asked = (replace(question, softmax_scale=x) for x in (s, s * (1 + STEP)))
            here, beside = (solve(one, "forward")["lse"] for one in asked)
            there = np.isfinite(here) & np.isfinite(found)
            left, by = found[there] - here[there], (beside[there] - here[there]) / (s * STEP)
            s = max(s + float(left @ by / (by @ by or 1.0)), s / 4)
        size = np.abs(found[there]).max(initial=1e-30)
        if np.abs(left).max(initial=0.0) < NEAR[question.dtype.itemsize] * size:
            yield f"softmax_scale = {s:.6g}", {"softmax_scale": s}
            return


def _seen(question: Question, answers: Answers) -> np.ndarray | None:
    """Which token sees which, (total_q, total_k), read off out, where all heads see one interval:
    no other one sums up to their numbers. None where they do not, or as the question says."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (question.q, question.k, question.v))
    if "out" not in answers or question.rare or len(q) * len(k) ** 2 > CELLS:
        return None
    found = np.zeros((len(q), len(k)), dtype=bool)
    heads = np.arange(q.shape[1]) // question.group
    mixed = np.random.default_rng(0).standard_normal(v.shape[2])  # one number of each row
    values = np.einsum("khd,d->hk", v[:, heads], mixed)
    out = np.einsum("qhd,d->hq", np.asarray(answers["out"], dtype=np.float64), mixed)
    scores = question.scale * np.einsum("qhd,khd->hqk", q, k[:, heads])
    for row in range(len(q)):
        weights = np.exp(scores[:, row] - scores[:, row].max(axis=1, keepdims=True))
        total = np.pad(np.cumsum([weights, weights * values], axis=2), ((0, 0), (0, 0), (1, 0)))
        sums, moments = total[:, :, None] - total[..., None]  # by where intervals begin and stop
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(moments / sums - out[:, row, None, None]).max(axis=0)
        off = np.where(np.isnan(off) | (np.tri(len(off)) > 0), np.inf, off)
        first, stop = np.unravel_index(off.argmin(), off.shape)
        if off[first, stop] > NEAR[question.dtype.itemsize] * np.abs(values).max():
            return None
        found[row, first:stop] = True
    return None if np.array_equal(found, places_of(question).right) else found


def _masks(question: Question, wanted: np.ndarray) -> Iterator[Option]:
    """A window, or sequences that begin where no token sees one on the other side."""
    places = places_of(question)
    distance = np.append((places.j - places.p)[wanted & places.own], 0)
    longest = max((*question.lengths_q, *question.lengths_k))
    left, right = (-1 if n >= longest - 1 else int(n) for n in (-distance.min(), distance.max()))
    window = (left, -1 if question.causal else right)
    yield f"window = {window}", {"window": window}
    n = len(wanted)
    if wanted.shape == (n, n):
        linked = wanted | wanted.T | np.eye(n, dtype=bool)
        farthest = np.maximum.accumulate(n - 1 - linked[:, ::-1].argmax(axis=1))
        of = np.append(0, np.flatnonzero(farthest == np.arange(n)) + 1)
        yield f"cu_seqlens = {of.tolist()}", {"cu_seqlens_q": of, "cu_seqlens_k": of}

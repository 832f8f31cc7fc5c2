"""From a case that fails to a diagnosis: the candidate is asked again, on small problems like it,
with lengths that tell bugs apart and no traps, and then on the case itself. Long by the two ways
between cases and questions: a change of one must be made in the other."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from operator import itemgetter
from typing import Any, cast

import numpy as np

from rawattn.check.candidate import Candidate, Unsupported
from rawattn.check.cases import DTYPES, Case, Tensors, lse_dtype, make
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, empty, solve
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import STAGES, TENSORS, WIDE, Answers, Question, by_rows
from rawattn.check.diagnose.evidence.precision import rows_off
from rawattn.check.diagnose.evidence.support import NO_RULE
from rawattn.check.diagnose.findings import CONFIDENCE, NAMELESS, Diagnosis, Finding, of_sides
from rawattn.check.diagnose.judge.diagnosis import costs_of, diagnose, sizes_of
from rawattn.check.diagnose.judge.least import UNUSED, Asker, least, of_stage, with_lengths
from rawattn.check.diagnose.judge.match import LOOSE, catalogue
from rawattn.check.diagnose.judge.proofs import ARRAYS, finding, of_nan, of_traps, reference_of
from rawattn.check.diagnose.read.name import NEAR, PASSES, UNREAD, Readings, read
from rawattn.check.expected import Expected, Target, expect
from rawattn.check.run import evaluate
from rawattn.check.sparse_cases import SparseCase
from rawattn.check.sparse_tensors import SparseTensors

SIDE = "candidate"
PAIRS = 400_000  # of queries and keys, over all heads: a case beyond is not looked at itself
SECONDS = 9.0  # of an idle machine, after which no further problem is begun
AGREEING, SETTLED, DEAR = 4, 200.0, 2000.0  # kinds of cases; effort after which 2, 1 are enough
SURE, COARSE = ("high", "medium"), "narrow-intermediate"
FURTHER = ((21, 3, 48, 0, 38), (70, 9, 32), (5, 19, 2, 27, 13, 40, 11, 23, 64))  # lengths
REFUTED = "it does not give the numbers of other problems"
OF_MASKS = (*LOOSE, "tile-skipped")  # told as what is missed, or seen, beside the mask
FORMS = 12  # and bugs that look the same, of which one may hold on further problems
Kind = tuple[list[Case], Diagnosis]  # cases of one kind, and what was found
Gives = Callable[[Mapping[str, Bug], Collection[str]], bool | None]
Lacking = Callable[[Finding], Iterable[str]]
LEAST = 3  # kinds of cases that are made smaller
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
OF_BLOCKS = ("block_indices", "block_counts", "block_scale", "tblock_scale")


def explain_failures(
    candidate: Candidate,
    cases: Sequence[Case],
    other: Candidate | None = None,
    *,
    against: str = "reference",
    seconds: float = SECONDS,
) -> Diagnosis:
    """What is wrong with ``candidate``, which fails on ``cases``: one diagnosis of them all. Cases
    of the same small problem, but for its dtype, are of one kind; kinds are looked at until enough
    say the same or for ``seconds`` of effort. other: what it was compared with, if another one."""
    kinds: dict[Case, list[Case]] = {}
    for case in sorted(cases, key=_plainness):
        kinds.setdefault(replace(small(case), dtype=""), []).append(case)
    sides = {SIDE: candidate} | ({} if other is None else {against: other})
    begun = spent()
    until = begun + 1000 * seconds
    found: list[Kind] = []
    known, brief, dtypes = UNREAD, False, set[str]()
    for kind in kinds.values():
        if found and (spent() > until or _agree(found, spent() - begun)):
            break
        lost = bool(found) and not any(_has_name(f) for _, of in found for f in of.findings)
        nan = bool(found) and all(of_nan(f) for _, of in found for f in of.findings)
        if (lost and kind[0].dtype in dtypes) or (nan and kind[0].causal):  # which may hide numbers
            continue
        dtypes |= {kind[0].dtype} if lost else set()
        asked = partial(explain_failure, sides, brief=brief, known=known)
        asked = partial(asked, until=0.0 if lost or nan else until)
        again = (of for _, of in found if other is None and _explains(candidate, of, kind[0]))
        diagnosis = next(again, None) or asked(_finest(candidate, kind[0]))
        if [f.confidence for f in diagnosis.findings] == ["high"] and kind[0].dtype != "float64":
            told = _explains(candidate, diagnosis, kind[0])
            diagnosis = diagnosis if told else asked(kind[0])  # it may have another one there
        sure = [f for f in diagnosis.findings if f.confidence in SURE and not f.alternatives]
        names = {f.bug for f in sure if f.form is not None} - {*NAMELESS}
        known, brief = Readings(shown=known.shown | names), brief or any(f.sure for f in sure)
        if not lost or any(map(_has_name, diagnosis.findings)):
            found.append((kind, diagnosis))
    joined = _joined(f"{candidate.name} against {against}", found)
    every = {str(case): case for kind, _ in found for case in kind}

    def asked_again(f: Finding) -> Finding:
        """As sure as problems of other lengths and options leave it."""
        asked = question_of(candidate.fit(small(every[f.cases[0]])), clean=True)
        lacking = partial(_lacking, candidate, every[f.cases[0]])
        return once_more(f, asked, partial(gives, candidate, asked), lacking)

    failing = _as_failing(joined.findings)
    findings = [asked_again(f) if f.side == SIDE else f for f in failing]
    findings.sort(key=lambda f: (f.bug in NAMELESS, f.rank, any(REFUTED in x for x in f.evidence)))
    findings.sort(key=lambda f: f.confidence == "low" and any(REFUTED in x for x in f.evidence))
    if findings and (first := findings[0]).side == SIDE and not first.sure:
        fewest = min(cases, key=lambda case: (case.num_heads_q, _plainness(case)))
        some = [*(every[name] for name in first.cases[: LEAST - 1]), fewest]  # heads may differ
        findings[0] = replace(first, least=_least(candidate, first, some) or first.least)
    return replace(joined, findings=tuple(findings))


def _finest(candidate: Candidate, case: Case) -> Case:
    """The case in float64, which tells the most, where its small problem fails then too."""
    fine = replace(case, dtype="float64")
    rows = () if fine == case else evaluate(candidate, small(fine))
    return fine if any(x.verdict.verdict == "FAIL" and x.tensor != "-" for x in rows) else case


def once_more(f: Finding, asked: Question, gives: Gives, lacking: Lacking) -> Finding:
    """A finding of a problem, whose numbers its bugs give, or others; ``lacking``: where they do
    not give those of other problems."""
    if f.confidence in SURE and (lacks := [*lacking(f)]):
        for one in islice(_others(f, asked, gives), FORMS):
            if not any(lacking(one)):
                return one
        told, less = f"{REFUTED}: {', '.join(lacks)}", CONFIDENCE[f.rank + 1]
        f = replace(f, confidence=less, evidence=(*f.evidence[:1], told, *f.evidence[1:]))
    return f


def _others(f: Finding, asked: Question, gives: Gives) -> Iterator[Finding]:
    """The same finding with other forms of the bug that the problem leaves, and then with other
    bugs that give its numbers."""
    found = {(f.bug, form): {**bugs} for form, bugs in f.forms.items()}
    for stage in f.planted:
        more = selection.of_weights(asked) if asked.sparse else ()
        for bug in (bug for bug in (*catalogue(asked, stage), *more) if stage in bug.stages):
            found.setdefault((bug.name, bug.variant), {}).setdefault(stage, bug)
    for (name, form), bugs in sorted(found.items(), key=lambda one: one[0][0] != f.bug):
        whole = bugs.keys() == f.planted.keys() and (name, form) != (f.bug, f.form)
        if whole and gives(bugs, f.tensors):
            one, of = replace(f, forms={form: bugs}).worded(form), CLASSES[name]
            other = replace(one, bug=name, form=form, planted=bugs, look_at=of.look_at, sight=None)
            yield one if name == f.bug else replace(other, title=f"{of.title}: {form}")


def _lacking(candidate: Candidate, case: Case, f: Finding) -> Iterator[str]:
    """On which further problems what was planted does not give the function's numbers."""
    if any(not _holds(candidate, f, case, lengths) for lengths in FURTHER):
        yield "at other lengths"
    for name, unused in UNUSED.items():
        of_mask = f.bug in OF_MASKS and name in ("causal", "window")
        about = of_mask or name.partition("_")[0] in f.bug
        there = getattr(case, name, unused) != unused and not about
        if there and not _holds(candidate, f, replace(case, **{name: unused}), FURTHER[-1]):
            yield f"without {name}"


def _explains(candidate: Candidate, diagnosis: Diagnosis, case: Case) -> bool:
    """Whether the one bug that another kind of cases showed gives all that is wrong here."""
    if [f.confidence for f in diagnosis.findings] != ["high"]:
        return False
    (one,), asked = diagnosis.findings, question_of(candidate.fit(small(case)), clean=True)
    right, so = dict.fromkeys(asked.stages, NO_BUG), partial(gives, candidate, asked)
    return so(right | {**one.planted}) is True and so(right) is False


def _holds(candidate: Candidate, f: Finding, case: Case, lengths: Sequence[int]) -> bool:
    """Whether what was planted gives the numbers of another problem too, if it can be asked."""
    apart = case.lengths_q != case.lengths_k
    like = replace(small(case), direction=case.direction)
    other = with_lengths(like, (tuple(lengths), tuple(lengths[:: -1 if apart else 1])))
    asked = question_of(candidate.fit(other), clean=True)
    return gives(candidate, asked, f.planted, f.tensors) is not False


def gives(
    of: Candidate | Answers, q: Question, bugs: Mapping[str, Bug], names: Collection[str] = TENSORS
) -> bool | None:
    """Whether these are the answers, or a candidate's, with bugs by stage; None where they cannot
    be planted, or it cannot be asked."""
    try:
        answers = _once(of, q) if isinstance(of, Candidate) else of
        given = q.given_to_backward(answers)
        due = [solve(q, stage, bug, given=given) for stage, bug in bugs.items()]
    except Exception:  # of what it throws was told before; a plant may be of its problem alone
        return None
    for name, x in (pair for of in due for pair in of.items()):
        if name in names and name in answers and x.ndim > 1:  # sums over all rows are apart
            found, planted = (by_rows(name, y) for y in (answers[name], x))
            rows = np.repeat(q.sequence_of(name)[:, None] >= 0, planted.shape[1], axis=1)
            if rows_off(found, planted, rows, NEAR[q.dtype.itemsize]).any():
                return False
    return True


def _least(candidate: Candidate, f: Finding, cases: Sequence[Case]) -> str:
    """All that is wrong on the smallest problem of the stage of a finding, in the fewest words."""
    for stage in [x for x in STAGES if x in f.stages or PASSES[x] in f.where] or STAGES:
        if (one := of_stage(candidate, stage)) is not None:
            asker = Asker(one, stage, partial(question_of, clean=True), partial(answers_of, one))
            kinds = [*{replace(case, dtype=""): case for case in map(small, cases)}.values()]
            told = [*filter(None, (least(asker, candidate.fit(x)) for x in kinds[:LEAST]))]
            if told:
                return min(told, key=len)
    return ""


def _as_failing(findings: Sequence[Finding]) -> list[Finding]:
    """Coarse results are no mere note where nothing else is found; of an intermediate: a name."""
    if any(one.bug != "rounding" for one in findings):
        return [*findings]
    found = []
    for one in findings:
        bug = COARSE if one.form else "unknown"
        title = f"results are less exact than is allowed, {one.title.rpartition(': ')[2]}"
        title = f"{CLASSES[bug].title}: {one.form}" if one.form else title
        found.append(replace(one, bug=bug, title=title, confidence="medium"))
    return found


def explain_failure(
    sides: dict[str, Candidate],
    case: Case,
    *,
    until: float = math.inf,
    known: Readings = UNREAD,
    brief: bool = False,
) -> Diagnosis:
    """What is wrong with SIDE, which fails on ``case``. The case itself is looked at where the
    small problem shows no bug that has a name, unless it is ``until`` by effort.spent(). known: of
    other cases; where rules were all that these showed, no more is searched for. brief: only what
    is listed and read is tried, since others have shown what is sure."""
    candidate, look = sides[SIDE], partial(_asked, sides)
    asked = question_of(candidate.fit(small(case)), clean=True)
    if known.shown:  # what it is for others to agree, first
        best = look(asked, until=0.0, told=known)
        named = {one.bug for one in best.findings}
        if named and named <= known.shown:
            return best
    told = _read(candidate, asked) if spent() < until else UNREAD
    of_rules = known.shown and known.shown <= {*LOOSE}
    best = look(asked, until=0.0 if of_rules or brief else until, told=told)
    if not best.findings and (trapped := of_traps(candidate, case, SIDE)):
        masked = not isinstance(case, SparseCase) and case.mask_window != (-1, -1)
        if masked and of_nan(trapped[0]):  # what no query may see anyway, numbers do not show
            without = replace(small(case), causal=False, window=(-1, -1))
            asked = question_of(candidate.fit(without), clean=True)
            shown = look(asked, until=0.0, told=_read(candidate, asked)).findings
            trapped = [*filter(_has_name, shown), *trapped]
        return replace(best, findings=tuple(trapped))
    unnamed = not any(map(_has_name, best.findings))
    if unnamed and sum(costs_of(case)) <= PAIRS and spent() < until:
        of_traps_alone = 0.0 if best.findings or brief else until  # else it was looked for already
        own = look(question_of(candidate.fit(case)), until=of_traps_alone, told=told)
        best = own if any(map(_has_name, own.findings)) or not best.findings else best
    if best.findings:
        return best
    given = (SIDE, "unknown", str(case), "low", ("not on a small problem of its kind",))
    title = "it fails, but no bug is to be seen"
    look_at = "what the case has: its lengths, NaN in other sequences and past the end, strides"
    return replace(best, findings=(finding(*given, title=title, look_at=look_at),))


def small(case: Case) -> Case:
    """The dedicated problem for cases like ``case``; the same for many of them."""
    lengths_q, lengths_k = case.lengths_q, case.lengths_k
    if max(lengths_k, default=0) > 0:
        large = max(lengths_q) > 100
        unit = case.block_size if isinstance(case, SparseCase) else 60 if large else 30
        longest = 4 * unit + 6 if unit < 30 else 2 * unit + 10
        lengths_q = lengths_k = (unit // 2 + 5, longest, 1, unit + 7)
        if case.lengths_q != case.lengths_k:
            lengths_q, lengths_k = (13, unit + 11, 1, 37), (29, longest, 5, 16)
    plain: dict[str, Any] = {"poisoned": (), "past_q": 0, "past_k": 0, "strided": False}
    plain |= {"direction": (True, True, True), "sinks_direction": True}
    if isinstance(case, SparseCase):
        plain |= {"gate_direction": True, "index_dtype": "int32"}
    return with_lengths(replace(case, name="small", **plain), (lengths_q, lengths_k))


def question_of(case: Case, seed: int = 0, *, clean: bool = False) -> Question:
    """The inputs of ``case``; backward passes are given the reference's out and lse. clean: no NaN
    in keys that are not in use, nor in what nobody sees of a sparse case, and no odd padding."""
    expected = expect(case, seed)
    t = expected.tensors
    given: dict[str, Any] = {name: getattr(t, name) for name in (*ARRAYS, *OFFSETS)}
    given |= {"out": expected.out, "lse": expected.lse}
    given |= {"causal": case.causal, "softmax_scale": case.softmax_scale}
    if not isinstance(case, SparseCase) or not isinstance(t, SparseTensors):
        given |= {"softcap": case.softcap, "sinks": t.sinks, "tsinks": t.tsinks}
        if clean and t.seqused_k is not None:
            whole = make(replace(case, seqused_k=None), seed)
            given |= {name: getattr(whole, name) for name in ("k", "v", "tk", "tv")}
        return Question(**given, window=case.window, seqused_k=t.seqused_k)
    given |= {name: getattr(t, name) for name in OF_BLOCKS}
    given |= {"block_size": case.block_size, "own": case.own}
    window = case.mask_window if case.window == (-1, -1) else case.window  # which causal closes
    given |= {"sliding": window if case.sliding else None}
    if clean:
        dense, rng, named = make(case, seed), np.random.default_rng(seed), t.block_indices
        given |= {name: getattr(dense, name) for name in ("k", "v", "tk", "tv")}
        for name in ("block_scale", "tblock_scale"):
            if (gate := getattr(t, name)) is not None:
                noise = 1 + 0.5 * rng.standard_normal(gate.shape)
                given[name] = np.where(np.isnan(gate), noise, gate).astype(gate.dtype)
        blocks = -(-np.array([*case.lengths_k, 0]) // case.block_size)[case.sequence_of("q")]
        given["block_indices"] = np.clip(named, -1, blocks[:, None, None]).astype(named.dtype)
    return Question(**given)


def answers_of(candidate: Candidate, question: Question) -> Answers:
    """What ``candidate`` says to ``question``. Raises Unsupported, and what it raises itself."""
    if question.dout is None:
        candidate = replace(candidate, backward=None, preprocess=None, double_backward=None)
    return {n: x for n, x in candidate.run(_expected(question)).items() if n in TENSORS}


_once = lru_cache(maxsize=2)(answers_of)  # of many bugs


def reference_answers(question: Question) -> Answers:
    """What the float64 reference says to ``question``, rounded as right results are."""
    right = reference_of(question, TENSORS, question.passed)
    return {name: a.astype(_dtype(question, name)) for name, a in right.items()}


def _asked(sides: dict[str, Candidate], q: Question, *, until: float, told: Readings) -> Diagnosis:
    """What is wrong with what all sides say to a question; ``told``: of the first one."""
    judged: dict[str, Diagnosis] = {}
    for side, one in sides.items():
        known: dict[str, Any] = {}
        if side == SIDE:
            known = {"told": told, "call": lambda x, one=one: _as_due(x, answers_of(one, x))}
        try:
            answers = answers_of(one, q)
        except Unsupported as lack:
            return Diagnosis(f"{one.name}: {lack}", ())
        except Exception as error:  # whatever a candidate throws is its result
            kind, look_at = type(error).__name__, "the function itself, called with these lengths"
            given = (side, "unknown", sizes_of(q), "proved", (f"{kind}: {error}",))
            raised = finding(*given, title=f"it raises {kind}", look_at=look_at)
            judged[side] = Diagnosis(one.name, (raised,))
            continue
        due = _as_due(q, answers)
        found = diagnose(q, due, side=side, until=until, **known)
        # results of another dtype than they must have are judged in that one nonetheless
        wrong = [n for n, x in answers.items() if x.dtype != due[n].dtype]
        said = [f"{n} is {answers[n].dtype}; it must be {due[n].dtype}" for n in wrong]
        strange = [finding(side, "wrong-dtype", ", ".join(wrong), "proved", said)] if wrong else []
        judged[side] = replace(found, findings=(*strange, *found.findings))
    return of_sides(" against ".join(judged), judged)


def _read(candidate: Candidate, question: Question) -> Readings:
    def ask(stage: str) -> Callable[[Question], Answers] | None:
        alone = of_stage(candidate, stage)
        return None if alone is None else partial(answers_of, alone)

    so, stages = partial(gives, candidate, question), question.stages
    return read(question, ask, enough=lambda bug: so(dict.fromkeys(stages, bug)) is True)


def _as_due(question: Question, answers: Answers) -> Answers:
    with np.errstate(over="ignore"):
        real = {n: x for n, x in answers.items() if x.dtype.name in DTYPES}
        return answers | {n: x.astype(_dtype(question, n)) for n, x in real.items()}


def _agree(found: Sequence[Kind], effort: float) -> bool:
    """Whether enough kinds of cases show the same bugs; coarse numbers, or NaN, may hide others."""
    dear = effort > DEAR
    told = [[f for f in of.findings if _has_name(f) and (dear or not of_nan(f))] for _, of in found]
    said = [{(f.side, f.bug) for f in of if dear or f.sure or f.bug != COARSE} for of in told]
    same = max(map(said.count, filter(None, said)), default=0)
    return same >= (1 if dear else 2 if same == len(found) and effort > SETTLED else AGREEING)


def _joined(title: str, found: Sequence[Kind]) -> Diagnosis:
    """One diagnosis of several: each bug once, the surest first, with the cases that show it."""
    said: dict[tuple[str, str, str], list[tuple[Finding, Kind]]] = {}
    for one, kind in ((one, of) for of in found for one in of[1].findings):
        what = one.title if one.bug == "unknown" else ""
        said.setdefault((one.side, one.bug, what), []).append((one, kind))
    tensors = {what: of[0][0].tensors for what, of in said.items()}
    fineness = {x: max(DTYPES.index(kind[0].dtype) for _, (kind, _) in said[x]) for x in said}

    def confidence(what: tuple[str, str, str]) -> int:
        """The best that a case has: less where one with finer numbers says something else of the
        same tensors, or this is shown once and others have no name for it."""
        best = min(one.rank for one, _ in said[what])
        others = [x for x in said if x != what and x[0] == what[0] and tensors[x] & tensors[what]]
        others = [x for x in others if said[x][0][0].form is not None or x[1] in NAMELESS]
        if best and any(fineness[one] > fineness[what] for one in others):
            return CONFIDENCE.index("low")
        nameless = any(one[1] in NAMELESS for one in others)
        return best + (best == CONFIDENCE.index("high") and len(said[what]) == 1 and nameless)

    def rank(what: tuple[str, str, str]) -> tuple[bool, int, bool, bool, int]:
        """First what has a name, is surer, gives the numbers, is a rule, is shown more often."""
        planted = any(one.form is not None for one, _ in said[what])
        unsure = confidence(what), not planted, NO_RULE in what[2]
        return what[1] in NAMELESS, *unsure, -len(said[what])

    findings: list[Finding] = []
    shown = found[0][1]
    for key in sorted(said, key=rank):
        best, (cases, diagnosis) = _best(said[key])
        shown = shown if findings else diagnosis
        every = dict.fromkeys([*cases, *(case for _, kind in said[key] for case in kind[0])])
        told, sure = tuple(map(str, every)), CONFIDENCE[confidence(key)]
        findings.append(replace(best, cases=told, confidence=sure))
    return replace(shown, title=title, findings=tuple(findings))


def _best(alike: Sequence[tuple[Finding, Kind]]) -> tuple[Finding, Kind]:
    """The surest of findings, with the form of the bug that fits the most kinds of cases."""
    often = Counter(form for one, _ in alike for form in {*one.forms})

    def merit(found: tuple[Finding, Kind]) -> tuple[int, bool, int, int]:
        one, (cases, _) = found  # where there are more heads, fewer maps of them look alike
        most = max((often[form] for form in one.forms), default=0)
        return one.rank, one.form is None, -most, -cases[0].num_heads_q

    best, kind = min(alike, key=merit)
    return best.worded(max(best.forms, key=lambda form: often[form], default="")), kind


def _has_name(f: Finding) -> bool:
    """Whether a bug has a name, or was read off and gives the same numbers when it is planted."""
    return f.bug not in NAMELESS or f.confidence == "high"


def _plainness(case: Case) -> tuple[bool, bool, int]:
    """The least special first, and what has the finest numbers, in which a bug shows best."""
    special = case.window != (-1, -1) or case.softmax_scale is not None or not case.dlse
    special |= case.softcap is not None or case.sinks or case.seqused_k is not None
    odd = case.head_dim != case.head_dim_v or max(case.lengths_k, default=0) == 0
    return odd, special, -DTYPES.index(case.dtype)


def _expected(question: Question) -> Expected:
    """``question`` in the form in which candidates are run, with the shapes of results alone."""
    q, names = question, ("out", "lse")
    given = zip(names, q.passed or itemgetter(*names)(solve(q, "forward")), strict=True)
    out, lse = (x.astype(_dtype(q, name), copy=False) for name, x in given)
    direction = replace(q, tq=q.q, dout=np.zeros(0), sliding=None)
    shapes = {n: x.shape for stage in direction.stages for n, x in empty(direction, stage).items()}
    shapes |= {f"sliding {name}": shapes[name] for name in names}
    targets, nowhere = {}, np.zeros(0, dtype=np.int64)
    for name, shape in shapes.items():
        zeros = np.broadcast_to(0.0, shape)
        targets[name] = Target(zeros, zeros, _dtype(q, name), nowhere, (), None, 0, 1)
    ints = (*OFFSETS, "seqused_k")
    inputs: dict[str, Any] = {n: getattr(q, n) for n in (*ARRAYS, *ints, "sinks", "tsinks")}
    inputs |= {n: np.asarray(x, np.int32) for n, x in inputs.items() if n in ints and x is not None}
    lists = {name: getattr(q, name) for name in OF_BLOCKS}
    tensors = SparseTensors(**inputs, **lists) if q.sparse else Tensors(**inputs)
    # options are all that candidates are told of a case
    lengths_k = tuple(int(n) for n in np.diff(q.cu_seqlens_k))
    options: dict[str, Any] = {"causal": q.causal, "softmax_scale": q.softmax_scale}
    options |= {"lengths_q": q.lengths_q, "past_q": len(q.q) - sum(q.lengths_q)}
    options |= {"lengths_k": lengths_k, "past_k": len(q.k) - sum(lengths_k)}
    if not q.sparse:
        options |= {"softcap": q.softcap, "sinks": q.sinks is not None, "window": q.window}
        options |= {"seqused_k": None if q.seqused_k is None else q.lengths_k}
    else:
        own = q.sliding in (None, (q.block_size - 1, 0))
        options |= {"window": (-1, -1) if own else q.sliding, "sliding": q.sliding is not None}
        options |= {"block_size": q.block_size, "own": q.own}
        options |= {"counts": q.block_counts is not None, "gate": q.block_scale is not None}
    case = (SparseCase if q.sparse else Case)("asked", **options)
    return Expected(case, tensors, cast(Any, None), out, lse, targets)


def _dtype(question: Question, name: str) -> np.dtype:
    return lse_dtype(question.dtype.name) if name in WIDE else question.dtype

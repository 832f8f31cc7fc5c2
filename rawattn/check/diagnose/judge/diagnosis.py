"""``diagnose``: which side is wrong, and which bug it is. Each side is judged on its own: by the
bugs of the catalogue (``match``), by its ``rounding``, and by ``proofs`` from other runs and
structure; of a large problem a part is, and all rows are compared. Long by evidence in words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.cases import Case
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine import question as problems
from rawattn.check.diagnose.engine.attention import empty
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import OF_KEYS, OF_SINKS, Answers, Question, by_rows
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.evidence.support import sight_of
from rawattn.check.diagnose.findings import NAMELESS, Diagnosis, Finding
from rawattn.check.diagnose.inferred import row_numbers
from rawattn.check.diagnose.judge import match, proofs, rounding
from rawattn.check.diagnose.judge.match import Explained, Stage, StageVerdict
from rawattn.check.diagnose.read.name import BEYOND, PASSES, UNREAD, Readings
from rawattn.check.diff import FLOATING

Call = Callable[[Question], Answers]
BY_HEAD = (*(n for names in problems.BY_TOKENS.values() for n in names), "sinks", "tsinks")
SCORES = 1_200_000  # of all heads, of a part
MOST = 20_000_000  # scores of all sequences and heads: of more nothing is said
OFF = 2.0**-5  # of the size of a row: more than any rounding
EFFORT = 6000.0  # units, after which nothing but the usual bugs is tried
CUT = "the search was cut short: not all bugs were tried"
SENTENCES = ("P is", "dS ", "dq is", "dk is", "dv is", "lse is", "the slope ", "the heads ")
# in how many sequences chance may show a bug of lengths
OF_LENGTHS = {"tail-tile-dropped": 2, "tile-skipped": 2, "offsets-shifted": 1}
ORDER = {name: n for n, name in enumerate(CLASSES)} | dict.fromkeys(match.LOOSE, len(CLASSES))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # answers may hold anything
def diagnose(
    question: Question,
    answers: Answers,
    *,
    side: str = "candidate",
    call: Call | None = None,
    until: float | None = None,
    told: Readings = UNREAD,
) -> Diagnosis:
    """What is wrong with ``answers`` to ``question``. side: what to call whoever gave them. call:
    that function itself, to be asked again on other inputs. until: by effort.spent(), EFFORT from
    now by default; from then on only the usual bugs are tried. told: what was read off it."""
    until = spent() + EFFORT if until is None else until
    given, strange = _well_formed(question, answers, side)
    whole = question
    with_rows = {name: x for name, x in given.items() if name not in OF_SINKS}
    question, part, fact = cut(whole, with_rows)
    found, facts = _judge(question, part, side, call, until, told)
    if any(one.bug == "unknown" for one in found) and (run := _numbers(question, part)):
        others, _ = _judge(*problems.part(question, part, *run), side, call, until, UNREAD)
        if others and not any(one.bug in NAMELESS for one in others):
            found = others
            facts.append(f"{side}: there is NaN in sequences other than {run[0]} to {run[1] - 1}")
    if fact:
        found = of_all(whole, with_rows, side, found)
    else:
        found += proofs.of_sinks(question, given, side, found)
    facts = [sizes_of(whole), *([f"{side}: {fact}"] if fact else []), *facts]
    return told.told(Diagnosis(side, (*strange, *found), (side,), tuple(facts)), side)


def _numbers(question: Question, answers: Answers) -> tuple[int, int] | None:
    """The longest run of sequences without NaN, where others have some."""
    nan = np.zeros(question.batch, dtype=bool)
    for name, x in answers.items():
        of, rows = question.sequence_of(name), np.isnan(by_rows(name, x)).any(axis=(1, 2))
        nan[of[rows & (of >= 0)]] = True
    return run([2 * SCORES if x else 1 for x in nan]) if nan.any() and not nan.all() else None


def _well_formed(question: Question, answers: Answers, side: str) -> tuple[Answers, list[Finding]]:
    """The floating arrays of the shapes that they must have; what is said of others, or of None,
    because of a bug if that is known."""
    shapes = {n: x.shape for stage in question.stages for n, x in empty(question, stage).items()}
    shapes |= {"delta": question.q.shape[1::-1]}
    shapes |= {f"sliding {name}": shapes[name] for name in ("out", "lse")}
    found = {name: np.asarray(x) for name, x in answers.items()}
    wrong = {n: x.shape for n, x in found.items() if shapes.get(n, x.shape) != x.shape}
    said = {n: f"{n} has shape {shape}, not {shapes[n]}" for n, shape in wrong.items()}
    gradients = {"dq", "dk", "dv", "gq", "gk", "gv"} >= wrong.keys()
    swapped = gradients and sorted(shapes[n] for n in wrong) == sorted(wrong.values())
    strange = {n: x.dtype for n, x in found.items() if x.dtype not in FLOATING}
    said |= {n: f"{n} is {dtype}; it must be floating" for n, dtype in strange.items()}
    bug = "gradients-swapped" if swapped and not strange else ""
    if [*said] == ["dblock_scale"] and answers["dblock_scale"] is None:
        bug = "sparse-gate-gradient-missing"
    found = {name: x for name, x in found.items() if name not in said}
    where, look_at = ", ".join(said), "" if bug else "what the function returns, and in which order"
    title = "" if bug else f"{where} has another form than it must have"
    given = (side, bug or "unknown", where, "high" if bug else "proved", [*said.values()])
    return found, [proofs.finding(*given, title=title, look_at=look_at)] if said else []


def sizes_of(question: Question) -> str:
    q, both = question, (question.lengths_q, question.lengths_k)
    of_q, of_k = (", ".join(map(str, x[:8])) + ", ..." * (len(x) > 8) for x in both)
    lengths = f"{of_q} tokens" if both[0] == both[1] else f"{of_q} queries on {of_k} keys"
    heads = f"{q.num_heads_q} head{'s' if q.num_heads_q > 1 else ''} on {q.num_heads_kv}"
    mask = ["causal" if q.causal else "not causal", *q.rare]
    mask += [] if q.window == (-1, -1) else [f"window {q.window}"]
    count = f"{q.batch} sequence{'s' if q.batch != 1 else ''}"
    rest = f"head_dim {q.q.shape[2]}, {', '.join(mask)}, {q.dtype.name}"
    return f"{'block-sparse ' * q.sparse}attention of {count} ({lengths}), {heads}, {rest}"


def _judge(
    question: Question, answers: Answers, side: str, call: Call | None, until: float, told: Readings
) -> tuple[list[Finding], list[str]]:
    races = list[Finding]()
    if call is not None:
        races = proofs.of_race(question, lambda x: _well_formed(x, call(x), "")[0], side)
    answers = {} if races else answers  # which cannot be judged
    empty_ones, answers = proofs.of_empty(question, answers, side)
    verdicts: list[StageVerdict] = []
    # what was read such that it can be planted in problems of other lengths
    told = replace(told, hints=[x.bug for x in told.of if x.bug is not None and x.support.plain])
    for stage in question.stages:
        if verdict := Stage(question, answers, stage, until, told).verdict():
            verdicts.append(verdict)
            if verdict.explained and not verdict.unexplained:
                told = replace(told, hints=[*told.hints, verdict.explained[0].prediction.bug])
    sound = {", ".join(of.right): of.precision for of in verdicts if of.sound}
    facts = [f"{side}: {names} right, with rounding as of {of}" for names, of in sound.items()]
    facts += [f"{side}: {verdict.work.stage}: {CUT}" for verdict in verdicts if verdict.cut]
    findings = _resolve(question, side, verdicts)
    zeros = any(one.bug == "vacuous" for one in empty_ones)
    findings += [x for of in verdicts for x in rounding.of_right(of, side, zeros=zeros)]
    findings += [*empty_ones, *races]
    if call is not None and not findings and question.dtype.itemsize == 2:  # it fails nonetheless
        findings += [one for of in verdicts for one in rounding.in_16_bits(of, side, of.right)]
    found: dict[str, Finding] = {}  # one for each bug
    for one in findings:
        found[one.bug] = found[one.bug].joined(one) if one.bug in found else one
    return sorted(found.values(), key=lambda f: (f.rank, not f.where.startswith("forward"))), facts


class _Part(NamedTuple):
    """Wrong tensors of one stage that one bug has to explain; the best fit of each class."""

    verdict: StageVerdict
    tensors: tuple[str, ...]
    best: dict[str, Explained]


def _resolve(question: Question, side: str, verdicts: Sequence[StageVerdict]) -> list[Finding]:
    """One finding for each bug, the bugs as few as will do."""
    wrong = {verdict.work.stage for verdict in verdicts if not verdict.sound}
    left: list[_Part] = []
    findings: list[Finding] = []
    for verdict in verdicts:
        left += [_Part(verdict, *part) for part in verdict.parts.items()]
        if verdict.unexplained:
            findings += rounding.of_wrong(verdict, side) or [proofs.of_structure(verdict, side)]

    def merit(name: str, here: Sequence[_Part]) -> tuple[float, ...]:
        """More parts first, then the order of classes, then bugs of the wrong stages alone."""
        own = all(set(part.best[name].prediction.bug.stages) <= wrong for part in here)
        worst = max(part.best[name].rms for part in here)
        return -len(here), worst > 1.5, ORDER[name], not own, worst

    found: list[Finding] = []
    while left:
        parts = {name: [x for x in left if name in x.best] for part in left for name in part.best}
        name = min(parts, key=lambda name: merit(name, parts[name]))
        alike = set.intersection(*({*part.best} for part in parts[name])) - {name, *match.LOOSE}
        others = sorted(alike, key=lambda other: ORDER[other])
        found.append(_found(question, side, name, parts[name], others))
        left = [part for part in left if name not in part.best]
    return found + findings


def _found(
    question: Question, side: str, name: str, parts: Sequence[_Part], others: Sequence[str]
) -> Finding:
    works = {tensor: part.verdict for part in parts for tensor in part.tensors}
    wrong = {name: of for name, of in works.items() if not of.null[name].good}
    best = [part.best[name] for part in parts]
    bugs = [of.prediction.bug for of in best]
    form, must = bugs[0].variant, structure.mask_rule(question)
    where = " and ".join(dict.fromkeys(PASSES[part.verdict.work.stage] for part in parts))
    cut = any(part.verdict.cut for part in parts)
    evidence = [_said(name, parts, form, must), *[CUT] * cut]
    doubts = [cut, others, *(part.verdict.unexplained for part in parts)]
    doubts.append(name == "rows-not-written" and {*wrong} <= {*OF_KEYS})  # sums over no queries
    if name in OF_LENGTHS:
        bad = {tensor: of.work.bad(tensor).any(axis=1) for tensor, of in wrong.items()}
        sequences = {b for x, rows in bad.items() for b in question.sequence_of(x)[rows]}
        doubts.append(len(sequences) <= OF_LENGTHS[name])
    given = (question.q, question.k, question.v, question.dout)
    if any(x is not None and np.isnan(x).any() for x in given):
        pairs = (of.work.pair(name) for name, of in wrong.items())
        off = (np.isfinite(x) & ~np.isclose(x, y, 0.1, 0.0) for x, y in pairs)
        doubts.append(not any(x.any() for x in off))  # it is which NaN of them came through
    clear = not any(doubts) and not best[0].inexact
    where = f"{where}: {', '.join(wrong or works)}"
    sure, title = "high" if clear else "medium", _title(name, form, must)
    forms = [(part.verdict.work.stage, part.verdict.forms(name, part.tensors)) for part in parts]
    every = (x for x in forms[0][1] if all(x in others for _, others in forms))
    alike = {x: {stage: of[x] for stage, of in forms} for x in every}
    planted = {part.verdict.work.stage: bug for part, bug in zip(parts, bugs, strict=True)}
    one = proofs.finding(side, name, where, sure, evidence, *others, title=title)
    return replace(one, form=form, forms=alike, planted=planted, sight=sight_of(question, bugs[0]))


def _title(name: str, form: str, must: str) -> str:
    title = CLASSES[name].title
    if form.startswith("j ") and must:
        return f"{title}: the mask is {form}, it must be {must}"
    if not form or form in title:
        return title
    if name == "unknown" or form.startswith(SENTENCES):
        return form
    return f"{title}: {form}" + f", where the mask must be {must}" * bool("window" in name and must)


def _said(name: str, parts: Sequence[_Part], form: str, must: str) -> str:
    """How well a bug fits, in the words of somebody who sees none of the tool's."""
    agrees = max(part.best[name].fits[tensor].relative for part in parts for tensor in part.tensors)
    differs = max(part.verdict.null[tensor].relative for part in parts for tensor in part.tensors)
    of_mask = form.startswith("j ") and must
    bug, without = (form, f"with {must}") if of_mask else ("this bug", "without it")
    near = f"to {agrees:.1g} of their size" if agrees else "exactly"
    near += f", which is the rounding of {parts[0].verdict.precision}" * (agrees >= 1e-6)
    apart = f"they are {float(f'{100 * differs:.2g}'):g} % apart"  # 51 %, 110 %
    apart = apart if math.isfinite(differs) else "other elements are finite, or not 0"
    return f"the float64 reference with {bug} gives these numbers {near} ({without} {apart})"


def costs_of(q: Question | Case) -> list[int]:
    """Scores of every sequence, of all heads."""
    return [n * m * q.num_heads_q for n, m in zip(q.lengths_q, q.lengths_k, strict=True)]


def cut(question: Question, answers: Answers) -> tuple[Question, Answers, str]:
    """Neighbouring sequences, or heads of a long one, that there is time for; and that in words."""
    costs = costs_of(question)
    if sum(costs) <= SCORES:
        return question, answers, ""
    first, stop = run(costs)
    question, answers = problems.part(question, answers, first, stop)
    text = f"sequences {first} to {stop - 1} of {len(costs)} were judged"
    total = sum(costs[first:stop])
    if total > SCORES and question.num_heads_kv > 1 and not question.sparse:
        count = max(1, question.num_heads_kv * SCORES // total)
        text += f", {count} of their key/value heads"

        def kept(name: str, x: np.ndarray, of_q: int = count * question.group) -> Any:
            heads = slice(count if problems.side_of(name) == "k" else of_q)
            return x[heads] if x.ndim < 3 else x[:, heads]

        changes = {n: kept(n, x) for n in BY_HEAD if (x := getattr(question, n)) is not None}
        question = replace(question, **changes)
        answers = {name: kept(name, x) for name, x in answers.items()}
    return question, answers, text


def run(costs: Sequence[float]) -> tuple[int, int]:
    """The longest run of sequences within the budget that cost something; else the cheapest one."""
    total = np.append(0, np.cumsum(costs))
    stops = np.searchsorted(total, total[:-1] + SCORES, side="right") - 1
    longest = (stops - np.arange(len(costs))) * (total[stops] > total[:-1])
    first = int(np.argmax(longest) if longest.any() else np.argmin(costs))
    return first, max(first + 1, int(stops[first]))


def of_all(q: Question, answers: Answers, side: str, findings: Sequence[Finding]) -> list[Finding]:
    """``findings`` of a part, and before them what all rows say where these are not sure."""
    if (findings and findings[0].sure) or sum(costs_of(q)) > MOST:
        return [*findings]
    works = [Stage(q, answers, stage, 0.0) for stage in q.stages]
    of = {name: work for work in works for name in work.tensors if name != "delta"}
    wrong = dict[str, np.ndarray]()
    for name, work in of.items():
        (x, y), bad = work.pair(name), work.bad(name, OFF)
        if work.stage in BEYOND:  # rows that cancel are beside the largest of all
            bad &= ~(np.abs(x - y) <= OFF * np.abs(y[np.isfinite(y)]).max(initial=0.0)).all(axis=2)
        wrong |= {name: bad} if bad.any() else {}
    said = [f"{n}: {'; '.join(structure.where(q, n, bad))}" for n, bad in wrong.items()]
    for work in works:  # numbers of rows that only all sequences have
        mine = [name for name in wrong if of[name] is work]
        for guess in work.planted(row_numbers.bugs(work.sample)) if mine else ():
            telling = guess.bug.name == "statistics-misplaced"
            if telling and all(work.relative(n, guess) < OFF for n in mine):
                given = side, guess.bug.name, f"{work.stage}: {', '.join(mine)}", "medium", said
                return [proofs.finding(*given, title=guess.bug.variant), *findings]
    if findings or not wrong:
        return [*findings]
    first, name = min((int(bad.any(axis=1).argmax()), name) for name, bad in wrong.items())
    held_ones = (by_rows(n, answers[n])[bad] for n, bad in wrong.items())
    zero = not any((x[~np.isneginf(x)] != 0).any() for x in held_ones)
    bug, held = ("rows-not-written", "0") if zero else ("unknown", "wrong")
    title = f"rows of {', '.join(wrong)} are {held}, from row {first} of {name} on"
    look_at = "offsets in memory (their width), grids, and workspaces: short packs are right"
    given = (side, bug, ", ".join(wrong), "medium", said)
    return [proofs.finding(*given, title=title, look_at=look_at)]

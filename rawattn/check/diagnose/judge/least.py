"""The smallest problem on which a function fails, and all that is wrong there: what was read of the
pass, entry by entry, or else the rows of its results. (A rule may hold on some lengths alone.)"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case, in_use
from rawattn.check.diagnose.engine.attention import FIRST, solve
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question, by_rows, part, side_of
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.inferred.row_numbers import Rows
from rawattn.check.diagnose.judge.diagnosis import costs_of, sizes_of
from rawattn.check.diagnose.read import probe
from rawattn.check.diagnose.read.fields import NEAR
from rawattn.check.diagnose.read.name import READ, ask_branch
from rawattn.check.diagnose.read.said import branch_of, largest
from rawattn.check.diagnose.read.tables import OFF, ROW, Table, Whose, tables_of, told
from rawattn.check.expected import Target, expect
from rawattn.check.second import expect_second

Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of q and of k
WIDE, TRIED = 64, 4  # columns; problems that fail, of which some by less than a table tells
ROUNDED = 1e-2  # of the noise of numbers of about 1: no problem shows a bug by less
TELLING = 1e-2  # of products, at most, that rounding leaves where these tell whose they are
PAIRS = 200_000  # of all heads, of a sequence that is told
SIZES = (1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 20, 24, 32, 33, 40, 48, 49, 64, 65, 80, 96, 97, 128, 129)
FEW = (1, 2, 4, 9, 17, 33, 65)
# what a case may have, and the value of those that have it not
UNUSED: dict[str, Any] = dict.fromkeys(("seqused_k", "softmax_scale", "softcap"))
UNUSED |= dict.fromkeys(("sinks", "causal", "own", "gate", "counts", "dlse"), False)
UNUSED |= {"window": (-1, -1)}
MOVED = {"second": "dd", "jvp": "t"}  # what directions are called

# what each tells by unit vectors of an operand, or of its direction
OF_V = {"v": "P o (E - e)", "tv": "P"}
LINEAR = {"tout": OF_V, "ddout": OF_V, "gv": {"dout": "P o (E - e)"}}
LINEAR |= {"gq": {"k": "tdS", "tk": "dS"}, "gk": {"q": "tdS", "tq": "dS"}}
LINEAR |= {"dq": {"k": "dS"}, "dk": {"q": "dS"}, "dv": {"dout": "P"}}  # that READ may refuse
# P o (x - n): the number n of a row, and the product x of queries and keys
LESS = {"P o (E - e)": ("e", "E"), "tdS": ("W", "tdP"), "dS": ("D", "dP"), "P": ("", "dP")}
PRODUCTS = {"E": (("tq", "k"), ("q", "tk")), "tdP": (("dout", "tv"),), "dP": (("dout", "v"),)}
OF_VALUES = ("out", "sliding out", "dv", "gv", "ddout", "jvp out", "tout")  # as wide as v


class Asker(NamedTuple):
    """A pass of a candidate alone; how a case is made a question, and what it says to one."""

    candidate: Candidate
    stage: str
    question: Callable[[Case], Question]
    ask: probe.Ask

    def results(self, case: Case) -> tuple[Answers, dict[str, Target]]:
        expected = (expect if self.stage in FIRST else expect_second)(case)
        return self.candidate.run(expected), expected.targets

    @np.errstate(invalid="ignore")
    def fails(self, case: Case) -> bool:
        """Whether it fails on a problem; what it raises is another matter."""
        try:
            found, targets = self.results(case)
        except Exception:
            return False
        rounded = ROUNDED * probe.NOISE[case.dtype]
        for name in found.keys() & targets.keys():
            off = np.abs(np.subtract(found[name], targets[name].reference, dtype=np.float64))
            if targets[name].judge(found[name]).verdict == "FAIL" and not (off < rounded).all():
                return True
        return False


def least(asker: Asker, case: Case) -> str:
    """The lengths of the smallest problem on which a pass fails, and what is wrong; "" for none."""
    needed = []
    for name, plainest in {"dtype": "float64", **UNUSED}.items() if asker.fails(case) else ():
        one = replace(case, **{name: plainest}) if hasattr(case, name) else case
        if one != case and asker.fails(one):
            case = case if name in ("causal", "window") else one  # which leave few pairs
        elif one != case:
            needed += [name] * (name != "dtype")
    wide = replace(case, head_dim=WIDE, head_dim_v=WIDE)  # which tell sums of more rows
    tried = (one for of in (wide, case)[asker.stage in FIRST :] for one in _tried(of))
    for shown in islice(filter(asker.fails, tried), TRIED):
        said = list[str]()
        for moved, one in _moved(asker, shown):
            question = asker.question(one)
            texts = (told(field, question) for field in _fields(asker, one, question))
            said += [moved + text for text in islice(filter(None, texts), 1)]
        if said:
            alone = f" (without {' or '.join(needed)} it is right)" * bool(needed)
            return f"{sizes_of(asker.question(shown))}{alone}: {'; '.join(said)}"
    return ""


def _moved(asker: Asker, case: Case) -> list[tuple[str, Case]]:
    """The problem; of tangents with one direction alone, those that show it; in words which."""
    if asker.stage in FIRST:
        return [("", case)]
    names = (name for name in ("sinks_direction", "gate_direction") if hasattr(case, name))
    still: dict[str, Any] = dict.fromkeys(names, False)
    shown = []
    for n, name in enumerate("qkv"):
        one = replace(case, direction=(n == 0, n == 1, n == 2), **still)
        shown += [(f"with {MOVED[asker.stage]}{name} alone ", one)] if asker.fails(one) else []
    return shown or [("", case)]


def of_stage(candidate: Candidate, stage: str) -> Candidate | None:
    """The pass of a candidate alone."""
    name = {"second": "double_backward"}.get(stage, stage)
    function = getattr(candidate, name)
    nothing: dict[str, Any] = dict.fromkeys(("forward", "backward", "preprocess", "jvp"))
    nothing |= {"double_backward": None, "repeat": False, "symmetry": False}
    return None if function is None else replace(candidate, **nothing | {name: function})


def _tried(case: Case) -> Iterator[Case]:
    """Problems like ``case``, the smallest first: of one sequence, then of two."""
    apart = case.lengths_q != case.lengths_k
    for n, m in sorted(product(FEW, FEW), key=sum) if apart else ():
        yield with_lengths(case, ((n,), (m,)))
    yield from (with_lengths(case, ((n,), (n,))) for n in SIZES)
    for two in sorted(product((0, *FEW), (0, *FEW)), key=sum):
        yield with_lengths(case, (two, two[::-1] if apart else two))


def with_lengths(case: Case, lengths: Lengths) -> Case:
    used = None if case.seqused_k is None else in_use(lengths[1])
    return replace(case, lengths_q=lengths[0], lengths_k=lengths[1], seqused_k=used)


def _fields(asker: Asker, case: Case, question: Question) -> Iterator[Table]:
    """What a pass makes of a problem, and what it must: from its first step to its results."""
    stage, asked = asker.stage, [("", asker.ask, replace(question, **probe.STILL))]
    if stage == "forward" and question.sliding is not None:
        asked.append(("sliding ", ask_branch(question, asker.ask), branch_of(question)))
    for name, function, of in asked:
        with suppress(probe.Refused):
            read = READ[stage](function, of)
            yield from (replace(one, name=name + one.name) for one in tables_of(read))
    found, targets = asker.results(case)
    for name in (name for name in STAGES[stage] if name in found and name in targets):
        target = targets[name]
        given = [x for x in LINEAR.get(name, ()) if getattr(question, x) is not None]
        for units in given if target.judge(found[name]).verdict == "FAIL" else ():
            with suppress(probe.Refused):
                yield from entries(asker, question, name, units)
        yield _of_rows(name, found[name], target.reference, question, target.allowance())


def of_shortest(question: Question, answers: Answers, f: Finding) -> Finding:
    """A finding that is not sure, of arrays alone, with what is wrong in the shortest sequence."""
    costs, off = costs_of(question), 2 * probe.NOISE[question.dtype.name]
    if f.sure or f.least:
        return f
    for b, stage in product(sorted(range(question.batch), key=costs.__getitem__), f.stages):
        here, found = part(question, answers, b, b + 1)
        given = None if stage in ("forward", "jvp") else here.given_to_backward(found)
        due = solve(here, stage, given=given) if costs[b] < PAIRS else {}
        for name in (name for name in due if name in found):
            size = float(np.abs(due[name]).max(initial=0.0))
            if text := told(_of_rows(name, found[name], due[name], here, off * size), here):
                return replace(f, least=f"sequence {b} alone, {sizes_of(here)}: {text}")
    return f


def _of_rows(name: str, found: Any, due: Any, question: Question, off: float) -> Table:
    """A result by rows, as sums of rows of the inputs where it can be told."""
    x, y = (by_rows(name, a).swapaxes(0, 1) for a in (found, due))
    size = float(np.abs(y[np.isfinite(y)]).mean()) or 1.0
    columns = ROW if x.shape[2] == 1 else "slot" if name.endswith("block_scale") else "column"
    of_rows = Table(name, x, y, side_of(name), columns, max(2 * off / size, 1e-6))
    moved = next((MOVED[of] for of in MOVED if name in STAGES[of]), "")
    return _summed(of_rows, question, moved) or of_rows


def entries(asker: Asker, question: Question, name: str, units: str) -> Iterator[Table]:
    """What a result tells by unit vectors, entry by entry, but for what is off by a number of each
    row times P; and that number."""
    near, stage, what = probe.NOISE[question.dtype.name], asker.stage, LINEAR[name][units]
    of, (number, product), asked = units.removeprefix("t"), LESS[what], list[Question]()
    other = of if of != units else f"t{of}"
    if (kept := getattr(question, other, None)) is not None:  # in the columns of no unit vector
        kept = np.concatenate([0 * kept[..., : len(kept)], kept[..., len(kept) :]], axis=-1)

    def ask(answers: probe.Ask, x: Question) -> Answers:
        given = {} if kept is None else {other: kept, units: getattr(x, of)}
        asked.append(probe.with_right(replace(x, **given))[1])
        return answers(asked[-1])

    def weights(x: Question) -> Answers:
        """P, as a result that is a sum of unit vectors has it."""
        if units[-1] in "kv":
            return {name: solve(replace(x, v=getattr(x, units)), "forward")["out"]}
        of_q = replace(x, dout=getattr(x, units), v=x.v if units == "dout" else x.k)
        return {name: solve(of_q, "backward")["dv"]}

    every = (partial(ask, by) for by in (asker.ask, partial(solve, stage=stage), weights))
    found, due, P = (probe.read_entries(by, question, name, of) for by in every)
    P, size = P * (question.scale if of in "qk" else 1.0), np.zeros(P.shape[:2])
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.where(P > 0, (found - due) / P, np.nan)
    for h, i in np.argwhere(np.isfinite(off).any(axis=2)) if number else ():
        alike = largest(off[h, i], near)
        size[h, i] = off[h, i][alike].mean() if alike.sum() > 1 else 0.0
    found = found - P * size[..., None]
    whose = _whose(asked[0], stage, number, product, P, found - due)
    text = f"{what}{f', but for {number},' * bool((np.abs(size) > near).any())} of {name}"
    yield Table(text, found, due, "q", "j", OFF * near, whose=whose)
    if number and len(asked) == 3:  # one each
        n = Rows(asked[0], None, stage).of(number)[..., None]
        yield Table(f"{number} of {name}", n - size[..., None], n, "q", ROW, OFF * near)


def _whose(x: Question, stage: str, number: str, name: str, P: Any, off: Any) -> Whose | None:
    """Whose product an entry holds that is off: that of another key, query or head."""
    if x.softcap is not None or x.block_scale is not None or x.dtype.itemsize not in NEAR:
        return None
    every, heads = dict[str, Any](), np.arange(len(P))
    for one, sums in PRODUCTS.items():
        every[one] = np.zeros((*P.shape[:2], x.num_heads_kv, P.shape[2]))
        for a, b in ([getattr(x, of) for of in both] for both in sums):
            if a is not None and b is not None:
                every[one] += np.einsum("ihd,jgd->higj", a, b) * (x.scale if one == "E" else 1)
    own = {one: of[heads, :, heads // x.group] for one, of in every.items()}
    by, of_rows = P, Rows(x, None, stage).of
    if name == "tdP" and not every[name].any():
        name, by = "E", P * (own["dP"] - of_rows("D")[..., None])
    lacks = off - of_rows(number)[..., None] * P if number else np.inf + P
    with np.errstate(divide="ignore", invalid="ignore"):
        held, size = own[name] + off / by, np.abs(by).max() + np.abs(by)
        near = NEAR[x.dtype.itemsize] * size / np.abs(by)
        near = np.where(near < TELLING, near, np.nan) * np.abs(every[name]).max()

    def whose(h: int, i: int, j: int) -> str:
        g, close = h // x.group, np.abs(every[name] - held[h, i, j]) <= near[h, i, j]
        if np.abs(lacks[h, i, j]) <= near[h, i, j] * abs(by[h, i, j]):
            return f"has no {number}"
        if abs(held[h, i, j]) <= near[h, i, j]:
            return f"has {name} of zeros"
        keys = ((a, g, b - j, "j") for a, b in np.argwhere(close[h, i]).tolist())
        rows = ((a, h, b - i, "i") for a, b in np.argwhere(close[:, :, g, j]).tolist())
        said = [f"head {a}, " * (a != b) + f"{of} {by:+d}" for a, b, by, of in (*keys, *rows)]
        return f"has {name} of {said[0]}" if len(said) == 1 else ""

    return whose


def _summed(of: Table, q: Question, moved: str) -> Table | None:
    """Rows of a result as sums of rows of the inputs, where these are few."""
    heads, _, width = of.found.shape
    given = {"k": q.k, "q": q.q, "dout": q.dout, "v": q.v}
    given |= {f"{moved}{name}": getattr(q, f"t{name}") for name in "kqv"} if moved else {}
    of_v = of.name in OF_VALUES
    kinds = [n for n in given if given[n] is not None and (n[-1] == "v" or n == "dout") == of_v]
    count = sum(len(given[n]) * max(1, given[n].shape[1] // heads) for n in kinds)
    if of.columns != "column" or count > 3 * width // 4 or not np.isfinite(of.found).all():
        return None
    basis, labels, own = [], [], " of its group" * (heads > 1)
    for name in kinds:
        x = np.nan_to_num(np.asarray(given[name], dtype=np.float64))  # keys that nobody must see
        x = x.repeat(max(1, heads // x.shape[1]), axis=1)  # heads of keys, of which several use one
        n, many = len(x), x.shape[1] // heads
        basis.append(np.moveaxis(x, 0, 1).reshape(heads, many * n, x.shape[2]))
        labels += [f"{name}[{i}{f', head {h}{own}' * (many > 1)}]" for h, i in np.ndindex(many, n)]
    rows = np.concatenate(basis, axis=1)
    x, y = (every @ np.linalg.pinv(rows) for every in (of.found, of.due))
    if not np.allclose(x @ rows, of.found, rtol=of.noise, atol=of.noise):
        return None  # columns differ in what they are sums of
    return Table(of.name, x, y, of.side, tuple(labels), max(10 * of.noise, 1e-4))

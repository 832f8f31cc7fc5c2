"""How often each query sees each key, solved for row by row: a mask as it is, or dropout.

Out and dq are sums over keys with the counts as factors, many equations for few unknowns that are
0 or 1, or 0 or 1 / (1 - p). Counts that come out as no such numbers say that it is something else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    FIRST,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    times,
)
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.inferred.keys.pattern import Place
from rawattn.check.diagnose.inferred.keys.sums import out_and_lse, scores, wide

MOST = 60_000_000  # equations times unknowns of all rows
AT_ONCE = 32  # rows that are solved for together
FIRST_ROWS = 8  # of which most must come out
STEPS = 150  # of the solver within bounds
CLEAR = 0.15  # how far a count may be from a whole one
FLIPS = 40
MISSING = 0.05  # of all rows, at most, without counts

Counts = Mapping[tuple[int, int], Floats]  # by sequence and head


def bugs(question: Question, answers: Answers, wrong: np.ndarray, stage: str) -> Iterator[Bug]:
    """Dropout, and the mask as the ``wrong`` rows (total_q, heads) tell."""
    yield from dropout(question, answers, stage)
    if stage == "forward" and "out" in answers:
        yield from _as_it_is(question, answers, wrong)


# ---- solving ----------------------------------------------------------------------------------


class System(NamedTuple):
    """Equations of some rows: a (rows, equations, keys) times counts = b (rows, equations)."""

    a: Floats
    b: Floats


def least_squares(system: System) -> Floats:
    """Counts (rows, keys) without bounds."""
    a, b = system
    norm = _norms(a)
    scaled = a / norm[:, None]
    gram = scaled.swapaxes(1, 2) @ scaled
    gram += 1e-13 * np.eye(gram.shape[1])
    right = scaled.swapaxes(1, 2) @ b[..., None]
    return np.asarray(np.linalg.solve(gram, right)[..., 0] / norm)


def within_bounds(system: System) -> Floats:
    """Counts (rows, keys) between 0 and 1, which needs fewer equations: alternating directions."""
    a, b = system
    norm = _norms(a)
    scaled = a / norm[:, None]
    gram = scaled.swapaxes(1, 2) @ scaled
    rho = 0.1
    inverse = np.linalg.inv(gram + rho * np.eye(gram.shape[1]))
    right = (scaled.swapaxes(1, 2) @ b[..., None])[..., 0]
    z = 0.5 * norm
    u = np.zeros_like(z)
    for _ in range(STEPS):
        y = (inverse @ (right + rho * (z - u))[..., None])[..., 0]
        z = np.clip(y + u, 0, norm)
        u += y - z
    return np.asarray(z / norm)


def _norms(a: Floats) -> Floats:
    norm = np.sqrt((a**2).sum(axis=1))
    floor = 1e-9 * norm.max(axis=1, keepdims=True)
    return np.asarray(np.maximum(norm, np.maximum(floor, 1e-300)))


def _left(system: System, counts: Floats) -> Floats:
    """Root mean square, by row, of what the counts do not explain, over that of b."""
    off = (system.a @ counts[..., None])[..., 0] - system.b
    size = np.sqrt(np.mean(system.b**2, axis=1))
    return np.asarray(np.sqrt(np.mean(off**2, axis=1)) / np.maximum(size, 1e-300))


def _flipped(system: System, counts: Floats, tolerance: float) -> Floats:
    """Counts of 0 and 1, single ones of them changed as long as that helps."""
    found = counts.copy()
    for row in np.flatnonzero(_left(system, counts) > tolerance):
        a, x = system.a[row], found[row]
        squares = (a**2).sum(axis=0)
        off = system.b[row] - a @ x
        for _ in range(FLIPS):
            turn = 1 - 2 * x
            gain = 2 * turn * (a.T @ off) - squares
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                break
            off = off - turn[best] * a[:, best]
            x[best] = 1 - x[best]
    return found


# ---- dropout ----------------------------------------------------------------------------------


def dropout(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """0 or 1 / (1 - p) in front of every P, by head."""
    sources = ["out"] if stage == "forward" else ["dq"]
    if stage == "forward" and question.dout is not None:
        sources = ["out", "dq"]
    tried = [tuple(name for name in sources if name in answers)]
    if len(tried[0]) > 1:
        tried.append(("out",))
    for names in tried:
        found = _dropped(question, answers, names) if names else None
        if found is not None:
            counts, kept = found
            text = f"p = {1 - 1 / kept:.2g}" if kept > 1.005 else "kept ones are not rescaled"
            steps = _with_counts(counts, own_out=given_to_backward(question, answers) is None)
            yield Bug("dropout", text, FIRST, steps=steps)
            return


def _dropped(
    question: Question, answers: Answers, names: tuple[str, ...]
) -> tuple[Counts, float] | None:
    """The counts of every head, and what the kept ones are."""
    tolerance = _tolerance(answers[names[0]])
    systems: dict[tuple[int, int], tuple[Place, System]] = {}
    work = 0
    for b, n in enumerate(question.lengths_q):
        place = Place(question, b, np.arange(n))
        if not n or not place.m:
            continue
        for head in range(question.num_heads_q):
            work += n * place.m * (question.v.shape[2] * 2)
            if work > MOST:
                return None
            system = _weights(question, answers, place, head, names)
            if system is None:
                return None
            systems[b, head] = place, system
    kept = _kept(systems)
    if kept is None:
        return None
    counts: dict[tuple[int, int], Floats] = {}
    rows = lost = 0
    for of, (_, system) in systems.items():
        scaled = System(system.a * kept, system.b)
        found = np.round(within_bounds(scaled))
        found = _flipped(scaled, found, tolerance)
        rows += len(found)
        lost += int((_left(scaled, found) > tolerance).sum())
        if lost > MISSING * max(rows, 20):
            return None
        counts[of] = found * kept
    return counts, kept


def _kept(systems: Mapping[tuple[int, int], tuple[Place, System]]) -> float | None:
    """What the kept counts are, where rows with few keys show that counts are 0 or that."""
    found = []
    for place, (a, b) in systems.values():
        few = np.flatnonzero((place.high - place.low)[:, 0] * 2 <= a.shape[1])[:AT_ONCE]
        few = few[(b[few] != 0).any(axis=1) | (place.high > place.low)[few, 0]]
        if not len(few):
            continue
        norm = np.sqrt((a[few] ** 2).sum(axis=1))
        solved = least_squares(System(a[few], b[few]))
        found.append(solved[norm > 0.03 * norm.max(axis=1, keepdims=True)])
    values = np.concatenate(found) if found else np.zeros(0)
    large = values[values > 0.5]
    if len(values) < 64 or len(large) < 16:
        return None
    kept = float(np.median(large))
    near = np.minimum(np.abs(values), np.abs(values - kept)) < CLEAR * kept
    dropped = (np.abs(values) < CLEAR * kept).mean()
    if near.mean() < 0.97 or not 0.005 < dropped < 0.97 or not 0.98 < kept < 20:
        return None
    return kept if kept > 1.005 else 1.0


def _weights(
    question: Question, answers: Answers, place: Place, head: int, names: tuple[str, ...]
) -> System | None:
    """What the counts of a head are multiplied by in out and in dq, and what comes out."""
    rows = place.start_q + place.rows
    heads = np.array([head])
    own = slice(place.start_k, place.start_k + place.m)
    S = np.where(place.seen, scores(question, place, heads)[0][:, own], -np.inf)
    top = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.where(np.isfinite(top), top, 0.0))
    P /= np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
    k, v = (wide(x)[own, head // question.group] for x in (question.k, question.v))
    given = out_and_lse(question, answers)[0]
    if given_to_backward(question, answers) is None and "out" in answers:
        given = answers["out"]
    parts, wanted = [], []
    if "out" in names:
        parts.append(P[:, None] * v.T[None])
        wanted.append(wide(answers["out"])[rows, head])
    if "dq" in names:
        dout = wide(question.dout)[rows, head]
        D = (dout * wide(given)[rows, head]).sum(axis=1)
        if question.dlse is not None:
            D = D - wide(question.dlse)[head, rows]
        dq = wide(answers["dq"])[rows, head] / (question.scale or 1.0) + D[:, None] * (P @ k)
        weight = P * (dout @ v.T)
        size = np.sqrt(np.mean(wide(given) ** 2)) / max(float(np.sqrt(np.mean(dq**2))), 1e-300)
        parts.append(weight[:, None] * k.T[None] * size)
        wanted.append(dq * size)
    return System(np.concatenate(parts, axis=1), np.concatenate(wanted, axis=1))


def _with_counts(counts: Counts, own_out: bool) -> dict[str, Step]:
    """Steps with dropout; ``own_out``: D is of the out with dropout, whatever is given."""

    def of(c: Context) -> Floats | float:
        found = [counts.get((c.view.sequence, int(head))) for head in c.view.heads]
        same = [x for x in found if x is not None and x.shape == c.S.shape[1:]]
        return np.stack(same) if len(same) == len(found) else 1.0

    def out(c: Context) -> Floats:
        return np.asarray(c.r(times(c.o(c.P * of(c)), c.V)))

    steps: dict[str, Step] = {
        "O": out,
        "dP": lambda c: c.r(of(c) * c.r(times(c.dO, c.V.T))),
        "dV": lambda c: c.r(c.o(c.P * of(c)).swapaxes(1, 2) @ c.dO),
    }
    if own_out:
        steps["D"] = lambda c: (c.dO * out(c)).sum(axis=-1) - c.dL
    return steps


def _tolerance(found: np.ndarray) -> float:
    """What rounding leaves of a row."""
    return 0.02 if np.asarray(found).dtype.itemsize == 2 else 2e-3


# ---- a mask as it is --------------------------------------------------------------------------


def _as_it_is(question: Question, answers: Answers, wrong: np.ndarray) -> Iterator[Bug]:
    """The mask that all heads share, solved for in the rows that are wrong."""
    tolerance = _tolerance(answers["out"])
    inside = question.sequence_of("q") >= 0
    counts: dict[int, Floats] = {}
    rows = np.flatnonzero(wrong.any(axis=1) & inside)
    equations = question.num_heads_q * (question.v.shape[2] + 1)
    if not len(rows) or len(rows) * equations * max(question.lengths_k) > MOST:
        return
    sequence = question.sequence_of("q")
    few = rows[np.linspace(0, len(rows) - 1, min(FIRST_ROWS, len(rows))).astype(int)]
    for chosen in (few, rows):
        lost = 0
        for b in np.unique(sequence[chosen]):
            here = chosen[sequence[chosen] == b]
            for start in range(0, len(here), AT_ONCE):
                part = here[start : start + AT_ONCE]
                found = _mask_of(question, answers, int(b), part, tolerance)
                lost += sum(row is None for row in found)
                counts |= {int(t): x for t, x in zip(part, found, strict=True) if x is not None}
        if lost > MISSING * len(chosen):
            return
    some = rows[np.linspace(0, len(rows) - 1, min(3, len(rows))).astype(int)]
    told = ", ".join(_told(question, int(row), counts[int(row)]) for row in some if row in counts)
    stages = (*FIRST, "second", "jvp")
    yield Bug("wrong-keys", f"keys by row: {told}", stages, _planted(counts))


def _mask_of(
    question: Question, answers: Answers, b: int, rows: np.ndarray, tolerance: float
) -> list[Floats | None]:
    """How often every row sees the keys of its sequence; None where that is not to be told."""
    place = Place(question, b, rows - int(question.cu_seqlens_q[b]))
    nothing: list[Floats | None] = [None] * len(rows)
    if not place.m:
        return nothing
    system, alone = _shared(question, answers, place)
    keys, equations = place.m, system.a.shape[1]
    if equations >= 1.1 * keys:
        solved = least_squares(system)
    elif "lse" in answers and equations >= 0.6 * keys:
        solved = within_bounds(system)
    else:
        return nothing
    if "lse" not in answers:
        large = np.where(solved > 0.5 * solved.max(axis=1, keepdims=True), solved, np.nan)
        solved = solved / np.nanmedian(large, axis=1, keepdims=True)
    norm = np.sqrt((system.a**2).sum(axis=1))
    clear = norm > 10 * tolerance * norm.max(axis=1, keepdims=True)
    whole = np.clip(np.round(solved), 0, 3)
    near = (np.abs(solved - whole) < 2 * CLEAR) | ~clear
    whole = np.where(clear | near, whole, place.seen)
    fits = (alone(whole) < tolerance) & (whole.any(axis=1) | _nothing(answers, rows))
    good = fits & (near.mean(axis=1) > 0.9)
    return [row if told else None for row, told in zip(whole, good, strict=True)]


def _nothing(answers: Answers, rows: np.ndarray) -> np.ndarray:
    """Rows whose lse says that they see no key."""
    if "lse" not in answers:
        return np.zeros(len(rows), dtype=bool)
    return np.asarray(
        np.isneginf(np.asarray(answers["lse"], dtype=np.float64)[:, rows]).any(axis=0)
    )


def _shared(
    question: Question, answers: Answers, place: Place
) -> tuple[System, Callable[[Floats], Floats]]:
    """Equations of all heads for one mask, and a test that takes out alone."""
    heads = np.arange(question.num_heads_q)
    rows = place.start_q + place.rows
    own = slice(place.start_k, place.start_k + place.m)
    S = scores(question, place, heads)[..., own]
    v = wide(question.v)[own][:, heads // question.group]
    out = wide(answers["out"])[rows][:, heads]
    size = float(np.sqrt(np.mean(v**2))) or 1.0
    if "lse" in answers:
        with np.errstate(over="ignore"):
            lse = np.asarray(answers["lse"], dtype=np.float64)[heads][:, rows]
            weight = np.exp(np.minimum(S - np.where(np.isfinite(lse), lse, 0.0)[..., None], 50))
    else:
        weight = np.exp(S - S.max(axis=2, keepdims=True))
        weight /= weight.sum(axis=2, keepdims=True)
    # sum over keys of count x weight x (v - out) = 0
    moved = [weight[h][:, None] * (v[:, h].T[None] - out[:, h, :, None]) / size for h in heads]
    sums = weight.swapaxes(0, 1) if "lse" in answers else weight[:1].swapaxes(0, 1)
    a = np.concatenate([*moved, sums], axis=1)
    b = np.zeros(a.shape[:2])
    b[:, -sums.shape[1] :] = 1.0

    def alone(counts: Floats) -> Floats:
        total = np.maximum(np.einsum("hrc,rc->hr", weight, counts), 1e-300)
        off = [np.abs((moved[h] @ counts[..., None])[..., 0]).max(axis=1) / total[h] for h in heads]
        return np.asarray(np.max(off, axis=0))

    return System(a, b), alone


def _told(question: Question, row: int, counts: Floats) -> str:
    b = int(question.sequence_of("q")[row])
    seen = np.flatnonzero(counts)
    more = np.flatnonzero(counts > 1)
    twice = f" ({named('', more)} more than once)" if len(more) else ""
    place = row - int(question.cu_seqlens_q[b])
    return f"row {place} of sequence {b} sees {named('key', seen)}{twice}"


def _planted(counts: Mapping[int, Floats]) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            weight = np.array(view.weight)
            for place, row in enumerate(view.rows):
                if int(row) in counts:
                    weight[:, place] = counts[int(row)]
            found.append(replace(view, weight=weight))
        return found

    return see

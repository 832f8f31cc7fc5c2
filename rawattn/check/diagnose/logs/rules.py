"""Two prints that differ: the first rule that applies names why.

Long by its rules and by what each has to say as evidence.
"""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.logs.padding import constant_factor
from rawattn.check.diagnose.logs.pairs import CONSTANT, Fit, Pair
from rawattn.check.diagnose.logs.rows import Log, Rows, first_row
from rawattn.check.diagnose.logs.tensor import Flags
from rawattn.check.diagnose.logs.words import few, finding_of, listed, rows_named

DIGITS = 50  # units of the last printed place, from which on a logarithm can be taken


def differs(pair: Pair, log: Log) -> Finding:
    """The first that applies; the order is from proofs to descriptions."""
    fit = pair.fit()
    found = _not_finite(pair) or _unmasked(pair, log) or _wrong_delta(pair, log)
    if found is None and fit and fit.constant and abs(fit.slope - 1) > CONSTANT:
        found = constant_factor(pair, fit, log)
    found = found or _transposed(pair) or _powers(pair)
    return found or _row_factors(pair) or _structure(pair, fit, log)


def _not_finite(pair: Pair) -> Finding | None:
    broken = [~np.isfinite(p.values) for p in (pair.a, pair.b)]
    if (broken[0] == broken[1]).all():
        return None
    worse = int(broken[1].sum() > broken[0].sum())
    title = (pair.a, pair.b)[worse].title
    rows = [label for label, index in pair.rows if broken[worse][index].any()]
    where = f"{title}, {rows_named(rows)}" if rows else title
    count = f"{broken[worse].sum()} printed entries of {title} are NaN or infinite"
    return finding_of(
        pair.sides[worse],
        "unknown",
        where,
        "medium",
        (count, f"{broken[1 - worse].sum()} of the other side are"),
        ("dead-rows", "masked-tile-nan", "no-max-subtraction"),
        title="NaN or infinity where the other side has numbers",
        look_at="rows without an allowed key, tiles that are masked as a whole, exp of large "
        "scores: print the scores of such a row and its maximum",
    )


def _unmasked(pair: Pair, log: Log) -> Finding | None:
    """One side masks dS (or P), the other one does not."""
    inside, hidden = pair.visible, pair.hidden
    if inside is None or hidden is None or not pair.masked:
        return None
    bad = int(hidden[1] > hidden[0])
    p, other = (pair.b, pair.a) if bad else (pair.a, pair.b)
    if hidden[bad] <= 2 * p.units.max():
        return None
    side, own, right = pair.sides[bad], log.rows.get(p.start), log.rows.get(other.start)
    shares, about_shares = _shares(pair, inside, bad)
    evidence = [
        f"{p.title} above the diagonal: up to {hidden[bad]:.3g}, where masked keys must give 0; "
        f"{other.title}: 0",
        *about_shares,
    ]
    bug = "mask-missing-in-backward"
    if own is not None and own.masked_delta:
        evidence = [*own.evidence, *evidence]
        evidence += _right_side(right) if right is not None and right.sound else []
        return finding_of(side, bug, own.where, "proved", evidence)
    if own is not None and not own.sound:
        return finding_of(side, bug, own.where, "medium", (own.evidence[0], *evidence))
    if own is None and pair.kind == "dS" and shares:
        evidence.append("rows are elided: their sums cannot be taken")
        return finding_of(side, bug, p.title, "high", evidence, ("causal-dropped",))
    if own is not None:
        evidence.append(f"rows of {p.title} sum to 0 over all keys: its P and D agree")
    at = np.nonzero(~inside.reshape(-1, *inside.shape[-2:])[0])
    shown = np.abs(p.values).reshape(-1, *p.values.shape[-2:])[:, at[0], at[1]].max(axis=0) > 0
    next_to = at[1] - at[0] == (at[1] - at[0]).min()
    bug, title = "unknown", ""
    alternatives: tuple[str, ...] = ()
    if np.array_equal(shown, next_to) and not next_to.all():
        bug = "causal-off-by-one"
        evidence.append("beyond the diagonal only the next key has weight")
    elif shown.mean() > 0.9:
        bug = "causal-dropped"
        alternatives = ("causal-off-by-one",) if next_to.all() else ()
    else:
        title = "keys are seen that the other side masks"
        alternatives = ("causal-dropped", "causal-off-by-one", "neighbour-leak")
        evidence.append(f"{shown.sum()} of {shown.size} places above the diagonal are not 0")
    look_at = "which of the two is meant: one side masks where the other one does not"
    return finding_of(
        side, bug, p.title, "medium", evidence, alternatives, title=title, look_at=look_at
    )


def _shares(pair: Pair, inside: Flags, bad: int) -> tuple[bool, list[str]]:
    """The unmasked side over the other one on visible keys, by row: a constant where only the
    denominator of P differs, and 1 in the row that sees all."""
    ratios, constant = [], True
    for _, index in pair.rows:
        chosen = np.zeros(inside.shape, np.bool_)
        chosen[index] = inside[index]
        fit = pair.fit(chosen)
        if fit is not None:
            constant &= fit.beyond <= CONSTANT
            ratios.append(1 / fit.slope if bad else fit.slope)
    if not ratios or not constant:
        return False, []
    names = " / ".join((pair.b.title, pair.a.title) if bad else (pair.a.title, pair.b.title))
    words = f"{names} on the visible entries is constant in each row ({listed(ratios, 3)})"
    if all(abs(ratio - 1) <= CONSTANT for ratio in ratios):
        return True, [f"{words}: P = exp(S - lse) with the masked lse, but without the mask"]
    if max(ratios) <= 1 + CONSTANT and abs(ratios[-1] - 1) <= CONSTANT:
        return True, [
            f"{words}: the share of an unmasked softmax that falls on visible keys; the last row "
            "sees every key, so it agrees"
        ]
    return False, [words]


def _right_side(rows: Rows) -> Iterator[str]:
    title = rows.printed.title
    yield f"{title} is right: its rows sum to {listed(rows.sums.ravel())}, and it is masked"
    first = first_row(rows.printed)
    if rows.masked and first is not None and not first.any():
        yield (
            f"the zero first row of {title} is right: with one visible key P is 1 whatever the "
            "score, so dS of that row is 0, and dQ with it"
        )


def _wrong_delta(pair: Pair, log: Log) -> Finding | None:
    """One side's rows sum to 0, the other's do not, with one mask."""
    rows = [log.rows.get(pair.a.start), log.rows.get(pair.b.start)]
    if rows[0] is None or rows[1] is None or rows[0].sound == rows[1].sound:
        return None
    own, right = (rows[1], rows[0]) if rows[0].sound else (rows[0], rows[1])
    side, title = pair.sides[int(rows[0].sound)], own.printed.title
    evidence = [own.evidence[0], f"rows of {right.printed.title} do sum to 0"]
    gap = own.printed.values - right.printed.values
    total = gap.sum(axis=-1, keepdims=True)
    slack = 2 * pair.digits + 2.0**-7 * np.abs(total)
    if (gap * np.sign(total) >= -slack).all():
        evidence.append(
            "the difference of the two sides has one sign in each row, so it is P times a number "
            "of that row: P agrees, D does not"
        )
        other = ("delta-of-another-out", "lse-gradient-dropped")
        return finding_of(side, "delta-omitted", title, "medium", evidence, other)
    return finding_of(
        side,
        "unknown",
        title,
        "medium",
        evidence,
        ("softmax-backward-without-p", "delta-of-another-out", "mask-missing-in-backward"),
        title="dS is not the gradient of any softmax: its rows do not sum to 0",
        look_at="P and D = dout . out: they must be of one softmax; print both for one row",
    )


def _transposed(pair: Pair) -> Finding | None:
    a, b, places = pair.a.values, pair.b.values, pair.a.places
    slack = float(pair.digits.max()) + 8 * pair.noise * pair.size
    for one, other in [(-1, -2), (-2, -3)][: max(0, a.ndim - 1)]:
        turned = np.swapaxes(b, one, other)
        alike = a.shape == turned.shape and np.array_equal(places[one], places[other])
        if alike and a.shape[one] > 1 and (np.abs(a - turned) <= slack).all():
            evidence = (f"{pair.title}: equal once axes {one} and {other} are exchanged",)
            side = " or ".join(pair.sides)
            return finding_of(side, "transposed", pair.title, "medium", evidence)
    return None


def _powers(pair: Pair) -> Finding | None:
    """P of one side is a power of that of the other, row by row: its scores are multiplied."""
    a, b = pair.a.values, pair.b.values
    if pair.kind != "P" or a.ndim < 2:
        return None
    there = pair.finite & (np.minimum(a, b) > DIGITS * np.maximum(pair.a.units, pair.b.units))
    several = there.sum(axis=-1, keepdims=True)
    there &= several > 1
    if there.sum() < 4:
        return None
    logs = [np.log(np.where(there, x, 1.0)) for x in (a, b)]
    x, y = (z - z.sum(axis=-1, keepdims=True) / np.maximum(several, 1) for z in logs)
    x, y = x[there], y[there]
    slope = float(x @ y / (y @ y)) if y.any() else 0.0
    left = float(np.linalg.norm(x - slope * y)) / max(float(np.linalg.norm(x)), 1e-30)
    if slope <= 0 or left > CONSTANT or abs(slope - 1) <= CONSTANT:
        return None
    larger = int(slope < 1)
    ratio = 1 / slope if larger else slope
    root = round(ratio**2)
    named = f" = sqrt({root})" if abs(ratio / root**0.5 - 1) <= CONSTANT / 4 else ""
    evidence = (
        f"log P of {pair.sides[larger]} is {ratio:.4g}{named} times that of "
        f"{pair.sides[1 - larger]} in every row (residual {left:.1%}): so are its scores",
    )
    side = pair.sides[larger]
    other = f"or {pair.sides[1 - larger]} applies softmax_scale twice; it is head_dim ** -0.5, once"
    look_at = f"softmax_scale: {side} lacks it, {other}"
    return finding_of(side, "score-scale", pair.title, "medium", evidence, look_at=look_at)


def _row_factors(pair: Pair) -> Finding | None:
    """Every row has its own factor: the denominators of the softmax differ."""
    fits = [(label, fit) for label, index in pair.rows if (fit := pair.fit(index)) is not None]
    slopes = np.array([fit.slope for _, fit in fits])
    if len(fits) < 3 or not all(fit.constant for _, fit in fits) or (slopes <= 0).any():
        return None
    if np.abs(slopes - 1).max() <= 2 * CONSTANT:
        return None
    evidence = [
        f"{pair.title} is constant within each row: "
        + few([f"{label}: {fit.slope:.3f}" for label, fit in fits])
    ]
    side = " or ".join(pair.sides)
    if (slopes > 1 - CONSTANT).all() or (slopes < 1 + CONSTANT).all():
        side = pair.sides[int(slopes.mean() > 1)]
        evidence.append(f"{side} has the smaller values in every row that differs")
    return finding_of(
        side,
        "unknown",
        pair.title,
        "medium",
        evidence,
        ("padded-keys", "neighbour-leak", "not-normalised"),
        title="each row differs by a factor of its own",
        look_at="the denominator of the softmax: which keys one side counts and the other does "
        "not, and how lse or row_sum is stored",
    )


def _structure(pair: Pair, fit: Fit | None, log: Log) -> Finding:
    """No known relation: which rows differ, and how."""
    worst = float(pair.difference.max(initial=0.0))
    evidence = [f"{pair.title}: largest difference {worst:.3g}, values of size {pair.size:.3g}"]
    side = " or ".join(pair.sides)
    alternatives: tuple[str, ...] = ()
    empty = [p.title for p in (pair.a, pair.b) if not p.values.any()]
    if empty:
        evidence.append(f"{empty[0]} is 0 in all printed entries, the other side is not")
    alike = pair.within(4 * pair.noise * pair.scale)
    equal = [label for label, index in pair.rows if alike[index].all()]
    unlike = [label for label, index in pair.rows if not alike[index].all()]
    if equal:
        differ = f"different in {rows_named(unlike)}"
        evidence.append(f"{pair.title}: equal in {rows_named(equal)}, {differ}")
    elif fit is not None:
        evidence.append(f"no constant factor: a slope of {fit.slope:.3g} leaves {fit.residual:.0%}")
    firsts = [first_row(p) for p in (pair.a, pair.b)]
    zero = [first is not None and not first.any() for first in firsts]
    if pair.kind == "dQ" and zero[0] != zero[1]:
        right, wrong = (pair.a, pair.b) if zero[0] else (pair.b, pair.a)
        words = f"the first row of {right.title} is 0, that of {wrong.title} is not"
        if log.first_row_zero:
            side = pair.sides[int(zero[0])]
            alternatives = ("mask-missing-in-backward", "delta-omitted", "delta-of-another-out")
            words += f": the zero is right, as that query sees one key; {wrong.title} is wrong"
        else:
            words += "; under a causal mask with as many keys as queries the zero is right"
        evidence.append(words)
    return finding_of(
        side,
        "unknown",
        f"{pair.title}, {rows_named(unlike)}" if unlike else pair.title,
        "low",
        evidence,
        alternatives,
        title="the two sides differ, in no way that these entries explain",
        look_at="print more: whole rows of a small case, dS and P beside the gradients, or save "
        "the arrays and compare those",
    )

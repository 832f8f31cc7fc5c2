"""Two prints that differ: the first rule that applies names why. Long by what each has to say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import CONSTANT, Fit, Pair, fit
from rawattn.check.diagnose.logs.rows import Rows, few, listed, rows_named

DIGITS = 50  # units of the last printed place, from which on a logarithm can be taken
LIKELY = (0.98, 1.7)  # the mean of exp(score), of scores around 0 that vary by up to 1
SHRUNK = ("", "O", "dV")  # what zero keys in the denominator divide by nearly one number
LOG2_E = 1 / math.log(2)
OTHER_MASK = "mask-missing-in-backward"


@dataclass(frozen=True)
class Log:
    """What holds for the whole log. rows: of printed dS, by ``start``. causal: None where the log
    does not say, or says both."""

    lengths: tuple[int, ...]
    rows: dict[int, Rows]
    causal: bool | None


def _finding(
    pair: Pair, side: int | None, bug: str, sure: str, evidence: Sequence[str], **more: Any
) -> Finding:
    """On one side, or on either. more: as of a finding, and ``where`` it is not in all entries."""
    whose, where = pair.either if side is None else pair.sides[side], more.pop("where", pair.title)
    return finding(whose, bug, where, sure, evidence, more.pop("others", ()), **more)


def differs(pair: Pair, log: Log) -> Finding:
    """The first that applies; the order is from proofs to descriptions."""
    return next(found for rule in RULES if (found := rule(pair, log)) is not None)


def _not_finite(pair: Pair, log: Log) -> Finding | None:
    broken = [~np.isfinite(p.values) for p in pair.both]
    if (broken[0] == broken[1]).all():
        return None
    worse = int(broken[1].sum() > broken[0].sum())
    title = pair.both[worse].title
    rows = [label for label, row in pair.rows.items() if broken[worse][row].any()]
    count = f"{broken[worse].sum()} printed entries of {title} are NaN or infinite"
    evidence = (count, f"{broken[1 - worse].sum()} of the other side are")
    return _finding(
        *(pair, worse, "unknown", "medium", evidence),
        where=f"{title}, {rows_named(rows)}" if rows else title,
        title="NaN or infinity where the other side has numbers",
        others=("dead-rows", "masked-tile-nan", "no-max-subtraction"),
        look_at="rows without an allowed key, masked tiles, exp of large scores: print such a "
        "row's scores",
    )


def _unmasked(pair: Pair, log: Log) -> Finding | None:
    """One side masks dS (or P), the other one does not."""
    bad = int(pair.hidden[1] > pair.hidden[0])
    p, other = pair.both[bad], pair.both[1 - bad]
    if not pair.masked or log.causal is False or pair.hidden[bad] <= 2 * p.units.max():
        return None
    own, right = log.rows.get(p.start), log.rows.get(other.start)
    said = [
        f"{p.title} above the diagonal: up to {pair.hidden[bad]:.3g}, where masked keys must give "
        f"0; {other.title}: 0",
    ]
    shares = _shares(pair, bad)
    if shares:
        said.append(
            f"{p.title} / {other.title} on the visible entries is constant in each row "
            f"({listed(shares, 3)}): the share of the softmax that falls on visible keys"
        )
    bug = OTHER_MASK
    if own is not None and own.wrong.any():
        if not own.masked_delta:
            return _finding(pair, bad, bug, "medium", [own.said, *said], where=own.where)
        if right is not None and not right.wrong.any():
            sums = listed(right.sums.ravel())
            said.append(f"{other.title} is right: its rows sum to {sums}, and it is masked")
        return _finding(pair, bad, bug, "proved", said, where=own.where)
    if own is None and pair.kind == "dS" and shares:
        said.append("rows are elided: their sums cannot be taken")
        return _finding(pair, bad, bug, "high", said, where=p.title, others=("causal-dropped",))
    if own is not None:
        said.append(f"rows of {p.title} sum to 0 over all keys: its P and D agree")
    return _finding(
        *(pair, bad, "causal-dropped", "medium", said),
        where=p.title,
        others=("causal-off-by-one", "neighbour-leak"),
        look_at="which of the two is meant: one side masks where the other one does not",
    )


def _shares(pair: Pair, bad: int) -> list[float]:
    """The unmasked side over the other one on visible keys, by row, if that is a constant of each
    row, as where only the denominator of P differs, and 1 in the row that sees all."""
    fits = [one for row in pair.rows.values() if (one := pair.fit(row)) is not None]
    ratios = [1 / one.slope if bad else one.slope for one in fits]
    likely = ratios and max(ratios) <= 1 + CONSTANT and abs(ratios[-1] - 1) <= CONSTANT
    return ratios if likely and all(one.beyond <= CONSTANT for one in fits) else []


def _wrong_delta(pair: Pair, log: Log) -> Finding | None:
    """One side's rows sum to 0, the other's do not, with one mask."""
    rows = [log.rows[p.start] for p in pair.both if p.start in log.rows]
    bad = [n for n, one in enumerate(rows) if one.wrong.any()]
    if len(rows) < 2 or len(bad) != 1:
        return None
    own, right = rows[bad[0]], rows[1 - bad[0]]
    where = own.printed.title
    evidence = [own.said, f"rows of {right.printed.title} do sum to 0"]
    gap = own.printed.values - right.printed.values
    total = gap.sum(axis=-1, keepdims=True)
    slack = 2 * pair.digits + 2.0**-7 * np.abs(total)
    if not (gap * np.sign(total) >= -slack).all():
        return _finding(
            *(pair, bad[0], "unknown", "medium", evidence),
            where=where,
            title="dS is not the gradient of any softmax: its rows do not sum to 0",
            others=("softmax-backward-without-p", "delta-of-another-out", OTHER_MASK),
            look_at="P and D = dout . out: they must be of one softmax; print both for one row",
        )
    evidence.append(
        "the difference of the two sides has one sign in each row, so it is P times a number of "
        "that row: P agrees, D does not"
    )
    others = "delta-of-another-out", "lse-gradient-dropped"
    return _finding(pair, bad[0], "delta-omitted", "medium", evidence, where=where, others=others)


def _constant_factor(pair: Pair, log: Log) -> Finding | None:
    """One factor between two sides: which one, and whether padding explains it."""
    found = pair.fit()
    if found is None or not found.factor:
        return None
    larger, ratio = _ratio(found)
    side, other = pair.sides[larger], pair.sides[1 - larger]
    said = [
        f"{pair.title} = {found.slope:.4g} on the {found.count} entries that both print (residual "
        f"{found.residual:.1%}), so a constant"
    ]
    head_dim = (pair.a.sizes or (1,))[-1]
    if pair.kind == "lse" and _near(ratio, LOG2_E):
        said.append(f"log2(e) = {LOG2_E:.4f}")
        return _finding(pair, larger, "lse-base-2", "high", said)
    if pair.kind in ("dQ", "dK") and _near(ratio, math.sqrt(head_dim)):
        words = f"sqrt(head_dim) = sqrt({head_dim}): {side} lacks softmax_scale there"
        said.append(f"{words}, or {other} applies it twice")
        return _finding(pair, larger, "output-scale", "medium", said)
    title = f"the two sides differ by a constant factor of {ratio:.4g}"
    look_at = "where the result is scaled: softmax_scale, a mean for a sum, a head count"
    if log.causal or ratio < 1 or pair.kind not in SHRUNK:
        return _finding(pair, None, "unknown", "medium", said, title=title, look_at=look_at)
    means = _padding(pair, log, ratio)
    if not means:
        return _finding(
            *(pair, None, "unknown", "medium", said),
            title=title,
            others=("padded-keys", "padded-grad-out"),
            look_at="the ratio for a sequence of another length: padding gives another number for "
            "each length, a forgotten factor one everywhere; --lengths says how long the "
            "sequences are",
        )
    told = few([f"{n} tokens would have m = {mean:.3g}" for n, mean in means.items()])
    said += [
        "zero keys up to the longest sequence divide by r(n) = 1 + (longest - n) / (n m), m the "
        "mean of exp(score): 1 for the longest, another number for each other length; longest is "
        f"{max(log.lengths)}, {told}",
        f"{other} has the smaller values: it is the side that attends to padding",
    ]
    where = f"{pair.title}, the sequence of {' or '.join(map(str, means))} tokens"
    sure, others = "medium" if len(means) == 1 else "low", ("padded-grad-out",)
    return _finding(pair, 1 - larger, "padded-keys", sure, said, where=where, others=others)


def _padding(pair: Pair, log: Log, ratio: float) -> dict[int, float]:
    """The lengths of which ``ratio`` may be that of zero keys up to the longest sequence, each of
    which adds e^0 = 1 to the denominator; and the mean weight of the own keys then."""
    lengths, longest = log.lengths, max(log.lengths, default=0)
    rows = {size for size in pair.a.sizes[:-1] if size in lengths}
    tried = sorted({n for n in lengths if 0 < n < longest and (not rows or n in rows)})
    means = {n: (longest - n) / (n * (ratio - 1)) for n in tried}
    return {n: mean for n, mean in means.items() if LIKELY[0] <= mean <= LIKELY[1]}


def _powers(pair: Pair, log: Log) -> Finding | None:
    """P of one side is a power of that of the other, row by row: its scores are multiplied."""
    a, b = pair.a.values, pair.b.values
    if pair.kind != "P" or a.ndim < 2:
        return None
    there = pair.finite & (np.minimum(a, b) > DIGITS * np.maximum(pair.a.units, pair.b.units))
    several = there.sum(axis=-1, keepdims=True)
    there &= several > 1
    logs = [np.log(np.where(there, x, 1.0)) for x in (a, b)]
    x, y = ((z - z.sum(-1, keepdims=True) / np.maximum(several, 1))[there] for z in logs)
    found = fit(x, y, 0 * x, 0 * y)
    if found is None or not found.factor or found.slope <= 0:
        return None
    larger, ratio = _ratio(found)
    root = round(ratio**2)
    named = f" = sqrt({root})" if _near(ratio, root**0.5) else ""
    side, other = pair.sides[larger], pair.sides[1 - larger]
    evidence = (
        f"log P of {side} is {ratio:.4g}{named} times that of {other} in every row (residual "
        f"{found.residual:.1%}): so are its scores",
    )
    look_at = f"softmax_scale, head_dim ** -0.5, once: {side} lacks it, or {other} applies it twice"
    return _finding(pair, larger, "score-scale", "medium", evidence, look_at=look_at)


def _ratio(found: Fit) -> tuple[int, float]:
    """Which side has the larger values, and how many times as large they are."""
    larger = int(abs(found.slope) < 1)
    return larger, 1 / found.slope if larger else found.slope


def _near(ratio: float, value: float) -> bool:
    return abs(ratio - value) <= CONSTANT / 4 * value


def _structure(pair: Pair, log: Log) -> Finding:
    """No known relation: which rows differ, and how."""
    found, worst = pair.fit(), float(pair.difference.max(initial=0.0))
    evidence = [f"{pair.title}: largest difference {worst:.3g}, values of size {pair.size:.3g}"]
    empty = [p.title for p in pair.both if not p.values.any()]
    if empty:
        evidence.append(f"{empty[0]} is 0 in all printed entries, the other side is not")
    alike = pair.within(4 * pair.noise * (pair.size + pair.entries))
    equal = [label for label, row in pair.rows.items() if alike[row].all()]
    unlike = [label for label in pair.rows if label not in equal]
    if equal:
        differ = f"different in {rows_named(unlike)}"
        evidence.append(f"{pair.title}: equal in {rows_named(equal)}, {differ}")
    elif found is not None:
        left = f"a slope of {found.slope:.3g} leaves {found.residual:.0%}"
        evidence.append(f"no constant factor: {left}")
    return _finding(
        *(pair, None, "unknown", "low", evidence),
        where=f"{pair.title}, {rows_named(unlike)}" if unlike else pair.title,
        title="the two sides differ, in no way that these entries explain",
        look_at="whole rows of a small case, dS and P beside the gradients; or save and compare "
        "arrays",
    )


RULES = (_not_finite, _unmasked, _wrong_delta, _constant_factor, _powers, _structure)

"""Two prints that differ: the first rule that applies names why. Long by what each has to say."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import CONSTANT, Fit, Pair, fit
from rawattn.check.diagnose.logs.rows import Rows, listed, rows_named

DIGITS = 50  # units of the last printed place, from which on a logarithm can be taken
SHRUNK = ("", "O", "dV")  # what zero keys in the denominator divide by nearly one number
LOG2_E = 1 / math.log(2)
OTHER_MASK = "mask-missing-in-backward"


class Log(NamedTuple):
    """What holds for the whole log. rows: of printed dS, by ``start``. causal: None where the log
    does not say, or says both."""

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


def _unmasked(pair: Pair, log: Log) -> Finding | None:
    """One side masks dS (or P), the other one does not."""
    if not pair.masked or log.causal is False:
        return None
    bad = int(pair.b.hidden > pair.a.hidden)
    p, other = pair.both[bad], pair.both[1 - bad]
    if p.hidden <= 2 * p.units.max():
        return None
    own, right = log.rows.get(p.start), log.rows.get(other.start)
    said = [
        f"{p.name} above the diagonal: up to {p.hidden:.3g}, where masked keys must give 0; "
        f"{other.name}: 0"
    ]
    shares = _shares(pair, bad)
    if shares:
        said.append(
            f"{p.name} / {other.name} on the visible entries is constant in each row "
            f"({listed(shares, 3)}): the share of the softmax that falls on visible keys"
        )
    if own is not None and own.wrong.any():
        if right is not None and not right.wrong.any():
            said.append(f"{other.name} is right: its rows sum to {listed(right.sums)}")
        return _finding(pair, bad, OTHER_MASK, "medium", [own.said, *said], where=own.where)
    if own is None and pair.kind == "dS" and shares:
        said.append("rows are elided: their sums cannot be taken")
        others = ("causal-dropped",)
        return _finding(pair, bad, OTHER_MASK, "high", said, where=p.name, others=others)
    return _finding(
        *(pair, bad, "causal-dropped", "medium", said),
        where=p.name,
        others=("causal-off-by-one", "neighbour-leak"),
        look_at="which of the two is meant: one side masks where the other one does not",
    )


def _shares(pair: Pair, bad: int) -> list[float]:
    """The unmasked side over the other one on visible keys, by row, if that is a constant of each
    row, as where only the denominator of P differs, and 1 in the row that sees all."""
    fits = [one for row in pair.rows.values() if (one := pair.fit(row)) is not None]
    ratios = [1 / one.slope if bad else one.slope for one in fits]
    likely = ratios and max(ratios) <= 1 + CONSTANT and abs(ratios[-1] - 1) <= CONSTANT
    return ratios if likely and all(one.residual <= CONSTANT for one in fits) else []


def _wrong_delta(pair: Pair, log: Log) -> Finding | None:
    """One side's rows sum to 0, the other's do not, with one mask."""
    rows = [log.rows[p.start] for p in pair.both if p.start in log.rows]
    bad = [n for n, one in enumerate(rows) if one.wrong.any()]
    if len(rows) < 2 or len(bad) != 1:
        return None
    own, right = rows[bad[0]], rows[1 - bad[0]]
    given = (own.printed.name, f"rows of {right.printed.name} do sum to 0")
    gap = own.printed.values - right.printed.values
    total = gap.sum(axis=-1, keepdims=True)
    slack = 2 * pair.digits + 2.0**-7 * np.abs(total)
    if (gap * np.sign(total) >= -slack).all():
        why = (
            "the difference of the two sides has one sign in each row, so it is P times a number "
            "of that row: P agrees, D does not"
        )
        return _finding(
            *(pair, bad[0], "delta-omitted", "medium", (own.said, given[1], why)),
            where=given[0],
            others=("delta-of-another-out", "lse-gradient-dropped"),
        )
    return _finding(
        *(pair, bad[0], "unknown", "medium", (own.said, given[1])),
        where=given[0],
        title="dS is not the gradient of any softmax: its rows do not sum to 0",
        others=("softmax-backward-without-p", "delta-of-another-out", OTHER_MASK),
        look_at="P and D = dout . out: they must be of one softmax; print both for one row",
    )


def _constant_factor(pair: Pair, log: Log) -> Finding | None:
    """One factor between two sides, or of P between their scores: which one."""
    fits = {
        pair.title: pair.fit(),
        f"log of {pair.title}, less its mean in each row,": _powers(pair),
    }
    factors = ((what, of) for what, of in fits.items() if of is not None and of.factor)
    what, found = next(factors, ("", None))
    if found is None:
        return None
    larger, ratio = found.larger
    side, other = pair.sides[larger], pair.sides[1 - larger]
    said = [
        f"{what} = {found.slope:.4g} on the {found.count} entries that both print (residual "
        f"{found.residual:.1%}), so a constant"
    ]
    head_dim = (pair.a.sizes or (1,))[-1]
    if what != pair.title:
        root = round(ratio**2)
        named = f" = sqrt({root})" if _near(ratio, root**0.5) else ""
        said.append(f"the scores of {side} are {ratio:.4g}{named} times those of {other}")
        look_at = f"softmax_scale, head_dim ** -0.5: {side} lacks it, or {other} applies it twice"
        return _finding(pair, larger, "score-scale", "medium", said, look_at=look_at)
    if pair.kind == "lse" and _near(ratio, LOG2_E):
        return _finding(pair, larger, "lse-base-2", "high", [*said, f"log2(e) = {LOG2_E:.4f}"])
    if pair.kind in ("dQ", "dK") and _near(ratio, math.sqrt(head_dim)):
        words = f"sqrt(head_dim) = sqrt({head_dim}): {side} lacks softmax_scale there"
        said.append(f"{words}, or {other} applies it twice")
        return _finding(pair, larger, "output-scale", "medium", said)
    shrunk = not log.causal and ratio >= 1 and pair.kind in SHRUNK
    return _finding(
        *(pair, None, "unknown", "medium", said),
        title=f"the two sides differ by a constant factor of {ratio:.4g}",
        others=("padded-keys", "padded-grad-out") if shrunk else (),
        look_at="where the result is scaled: softmax_scale, a mean for a sum, a head count; "
        "print a sequence of another length: padding gives another ratio for each",
    )


def _powers(pair: Pair) -> Fit | None:
    """Of the logarithms of P, row by row: where the scores of one side are multiplied, its P is a
    power of that of the other."""
    a, b = pair.both
    if pair.kind != "P" or a.values.ndim < 2:
        return None
    there = pair.finite & (np.minimum(a.values, b.values) > DIGITS * np.maximum(a.units, b.units))
    several = there.sum(axis=-1, keepdims=True)
    there &= several > 1
    logs = [np.log(np.where(there, p.values, 1.0)) for p in pair.both]
    x, y = ((z - z.sum(-1, keepdims=True) / np.maximum(several, 1))[there] for z in logs)
    found = fit(x, y, 0 * x, 0 * y)
    return found if found is not None and found.slope > 0 else None


def _near(ratio: float, value: float) -> bool:
    return abs(ratio - value) <= CONSTANT / 4 * value


def _structure(pair: Pair, log: Log) -> Finding:
    """No known relation: which rows differ."""
    worst = float(pair.difference.max(initial=0.0))
    evidence = [f"{pair.title}: largest difference {worst:.3g}, values of size {pair.size:.3g}"]
    evidence += [f"{p.name} is 0 in all printed entries" for p in pair.both if not p.values.any()]
    alike = pair.within(4 * pair.noise * (pair.size + pair.entries))
    equal = [label for label, row in pair.rows.items() if alike[row].all()]
    unlike = [label for label in pair.rows if label not in equal]
    if equal:
        evidence.append(f"{pair.title}: equal in {rows_named(equal)}, not in {rows_named(unlike)}")
    broken = [int((~np.isfinite(p.values)).sum()) for p in pair.both]
    if broken[0] != broken[1]:
        worse = int(broken[1] > broken[0])
        of = f"{broken[worse]} printed entries of {pair.both[worse].name} are NaN or infinite"
        return _finding(
            *(pair, worse, "unknown", "medium", [of, *evidence]),
            title="NaN or infinity where the other side has numbers",
            others=("dead-rows", "masked-tile-nan", "no-max-subtraction"),
            look_at="rows without an allowed key, masked tiles, exp of large scores: print such a "
            "row's scores",
        )
    return _finding(
        *(pair, None, "unknown", "low", evidence),
        title="the two sides differ, in no way that these entries explain",
        look_at="whole rows of a small case, dS and P beside the gradients; or save and compare "
        "arrays",
    )


RULES = (_unmasked, _wrong_delta, _constant_factor, _structure)

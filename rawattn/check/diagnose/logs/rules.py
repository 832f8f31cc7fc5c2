"""What printed tensors prove: of one side alone, by its rows; of two that differ, why.

Long by what each rule has to say.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.findings import Check, Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.pairs import CONSTANT, ROUNDING, Pair
from rawattn.check.diagnose.logs.printed import Float64, Printed

SHOWN = 12
SHRUNK = ("", "O", "dV")  # what zero keys in the denominator divide by nearly one number
LOG2_E = 1 / math.log(2)
OTHER_MASK = "mask-missing-in-backward"


class Rows:
    """The rows of one whole printed P, which sum to 1, or dS, which sum to 0.

    off: how far their sums are from that. wrong: rows that are off by more than ``allowed``.
    inside: sums over the keys that a causal mask allows. masked_delta: P of all keys with D of the
    masked output, so that rows of dS sum to 0 over the causal keys alone.
    """

    def __init__(self, printed: Printed, side: str) -> None:
        self.printed, self.side, x = printed, side, printed.values
        self.sums, self.inside = x.sum(axis=-1), (x * printed.causal).sum(axis=-1)
        self.must = int(printed.kind == "P")
        self.off: Float64 = np.abs(self.sums - self.must * x.any(axis=-1))  # all 0 without keys
        # a row's own size may be that of a small difference, dP - D
        digits, largest = 0.505 * printed.unit * x.shape[-1], np.abs(x).sum(axis=-1).max()
        self.allowed = float(digits + 4 * ROUNDING * largest)
        self.wrong = self.off > self.allowed
        fine = digits + ROUNDING * largest
        parts = ((np.abs(x) * seen).sum(axis=-1) for seen in (printed.causal, ~printed.causal))
        telling = np.logical_and(*(part > 10 * fine for part in parts)).any()
        causal = telling and (np.abs(self.inside) <= fine).all()
        self.masked_delta = not self.must and bool(self.wrong.any() and causal)

    @property
    def said(self) -> str:
        sums = f"{listed(self.sums)} (rounding excuses {self.allowed:.1g})"
        return f"rows of {self.printed.name} must sum to {self.must}, but sum to {sums}"

    @property
    def where(self) -> str:
        rows = np.unique(np.nonzero(self.wrong)[-1])
        return f"{self.printed.name}, {rows_named([str(row) for row in rows])}"

    @property
    def check(self) -> Check:
        """The identity, at the row that is off by most."""
        at = np.unravel_index(int(self.off.argmax()), self.off.shape)
        verdict = "FAIL" if self.wrong.any() else "pass" if self.printed.values.any() else "vacuous"
        text = f"rows of {self.printed.kind} sum to {self.must}"
        told = ("I1" if self.must else "I2", text, float(self.off[at]), self.allowed, verdict)
        return Check(self.side, *told, f"{self.printed.name}, row {int(at[-1])}")

    def proved(self) -> Iterator[Finding]:
        """What a dS on its own proves, which needs no other side."""
        if self.masked_delta:
            most, first = (f"{np.abs(x).max():.1g}" for x in (self.inside, self.inside[..., 0]))
            inside = (
                f"{self.printed.name}: each row up to the diagonal does sum to 0 (off by {most} "
                f"at most, by {first} in the first row, which sees one key): D is that of the "
                "masked output, P that of all keys"
            )
            yield finding(self.side, OTHER_MASK, self.where, "proved", (self.said, inside))

    @property
    def failed(self) -> Finding:
        """Of a side of which nothing else is known."""
        if self.must:
            others = ("padded-keys", "neighbour-leak", "not-normalised")
        else:
            others = ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p")
        return finding(
            *(self.side, "unknown", self.where, "medium", (self.said,), others),
            title=f"an identity fails: {self.check.text}",
            look_at="P, lse and D of one row: they must be of one softmax, with one mask",
        )


class Log(NamedTuple):
    """What holds for the whole log. causal: None where the log does not say, or says both."""

    rows: dict[Printed, Rows]
    causal: bool | None


def differs(pair: Pair, log: Log) -> Finding:
    """The first that applies; the order is from proofs to descriptions."""
    return next(found for rule in RULES if (found := rule(pair, log)) is not None)


def _finding(
    pair: Pair, side: int | None, bug: str, sure: str, evidence: Sequence[str], **more: Any
) -> Finding:
    """On one side, or on either. more: as of a finding, and ``where`` it is not in all entries."""
    whose = " or ".join(pair.sides) if side is None else pair.sides[side]
    where, others = more.pop("where", pair.title), more.pop("others", ())
    return finding(whose, bug, where, sure, evidence, others, **more)


def _mask(pair: Pair, log: Log) -> Finding | None:
    """One side masks dS (or P), the other one does not."""
    if pair.kind not in ("dS", "P") or pair.a.values.ndim < 2 or log.causal is False:
        return None
    unmasked = [p.unmasked for p in pair.both]
    if all(unmasked) or not any(unmasked):
        return None
    bad = int(unmasked[1] > 0)
    p, other = pair.both[bad], pair.both[1 - bad]
    own, right = log.rows.get(p), log.rows.get(other)
    said = [
        f"{p.name} above the diagonal: up to {unmasked[bad]:.3g}, where masked keys must give 0; "
        f"{other.name}: 0"
    ]
    if right is not None and not right.wrong.any():
        said.append(f"{other.name} is right: its rows sum to {listed(right.sums)}")
    if pair.kind == "dS" and own is None:
        said.append("rows are elided: their sums cannot be taken")
        given = (pair, bad, OTHER_MASK, "medium", said)
        return _finding(*given, where=p.name, others=("causal-dropped",))
    if own is not None and pair.kind == "dS" and own.wrong.any():
        return _finding(pair, bad, OTHER_MASK, "medium", [own.said, *said], where=own.where)
    return _finding(
        *(pair, bad, "causal-dropped", "medium", said),
        where=p.name,
        others=("causal-off-by-one", "neighbour-leak"),
        look_at="which of the two is meant: one side masks where the other one does not",
    )


def _delta(pair: Pair, log: Log) -> Finding | None:
    """Rows of one side's dS sum to 0, the other's do not, with one mask."""
    rows = [log.rows[p] for p in pair.both if p in log.rows]
    bad = [n for n, one in enumerate(rows) if one.wrong.any()]
    if pair.kind != "dS" or len(rows) < 2 or len(bad) != 1:
        return None
    own, right = rows[bad[0]], rows[1 - bad[0]]
    said = [own.said, f"rows of {right.printed.name} do sum to 0"]
    gap = own.printed.values - right.printed.values
    total = gap.sum(axis=-1, keepdims=True)
    slack = pair.digits + 2 * ROUNDING * np.abs(total)
    if (gap * np.sign(total) >= -slack).all():
        why = (
            "the difference of the two sides has one sign in each row, so it is P times a number "
            "of that row: P agrees, D does not"
        )
        return _finding(
            *(pair, bad[0], "delta-omitted", "medium", [*said, why]),
            where=own.printed.name,
            others=("delta-of-another-out", "lse-gradient-dropped"),
        )
    return _finding(
        *(pair, bad[0], "unknown", "medium", said),
        where=own.printed.name,
        title="dS is not the gradient of any softmax: its rows do not sum to 0",
        others=("softmax-backward-without-p", "delta-of-another-out", OTHER_MASK),
        look_at="P and D = dout . out: they must be of one softmax; print both for one row",
    )


def _factor(pair: Pair, log: Log) -> Finding | None:
    """One factor between two sides, or of P between their scores: which one."""
    plain, of_logs = pair.fit(), pair.fit_of_logs()
    found = next((of for of in (plain, of_logs) if of is not None and of.factor), None)
    if found is None:
        return None
    larger, ratio = found.larger
    side, other = pair.sides[larger], pair.sides[1 - larger]
    what = pair.title if found is plain else f"log of {pair.title}, less its mean in each row,"
    said = [
        f"{what} = {found.slope:.4g} on the {found.count} entries that both print (residual "
        f"{found.residual:.1%}), so a constant"
    ]
    head_dim = pair.a.sizes[-1]
    if found is of_logs:
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


def _near(ratio: float, value: float) -> bool:
    return abs(ratio - value) <= CONSTANT / 4 * value


def _structure(pair: Pair, log: Log) -> Finding:
    """No known relation: which rows differ."""
    worst = float(pair.difference.max(initial=0.0))
    evidence = [f"{pair.title}: largest difference {worst:.3g}, values of size {pair.size:.3g}"]
    evidence += [f"{p.name} is 0 in all printed entries" for p in pair.both if not p.values.any()]
    equal, unlike = pair.rows
    if equal and unlike:
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


RULES = (_mask, _delta, _factor, _structure)


def listed(values: Float64) -> str:
    return few([f"{value:z.4f}" for value in np.ravel(values)])


def rows_named(labels: Sequence[str]) -> str:
    return f"row{'' if len(labels) == 1 else 's'} {few(labels)}"


def few(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more

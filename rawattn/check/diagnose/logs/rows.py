"""What must hold on one side alone: whole rows of dS and of P, and the mask that a dS shows."""

from collections.abc import Iterator, Sequence

import numpy as np

from rawattn.check.diagnose.findings import Check, Finding
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Flags, Float64, Printed

SHOWN = 12


class Rows:
    """The rows of one whole printed dS, of which each is the gradient of a softmax, or P.

    sums: of rows; off: how far they are from 0, or from 1. inside: over the keys that a causal mask
    allows. wrong: rows that are off by more than ``allowed``. masked: sound, square, of more than
    one row, with nothing above the diagonal. masked_delta: P of all keys with D of the masked
    output, so that rows sum to 0 over the causal keys alone.
    """

    def __init__(self, printed: Printed) -> None:
        p = self.printed = printed
        self.sums, self.inside = p.values.sum(axis=-1), (p.values * p.causal).sum(axis=-1)
        must = p.values.any(axis=-1) if p.kind == "P" else 0.0  # rows without keys are all 0
        self.off: Float64 = np.abs(self.sums - must)
        # a row's own size may be that of a small difference, dP - D
        digits, largest = 0.505 * p.units.sum(axis=-1), np.abs(p.values).sum(axis=-1).max()
        self.allowed: Float64 = digits + 2.0**-6 * largest
        self.wrong: Flags = self.off > self.allowed
        self.square = p.sizes[-2] == p.sizes[-1]
        sound = bool(p.values.any()) and not self.wrong.any()
        self.masked = sound and self.square and p.sizes[-1] > 1 and not p.hidden
        fine = digits + SIXTEEN_BIT.get(p.dtype, 2.0**-11) * largest
        parts = ((np.abs(p.values) * seen).sum(axis=-1) for seen in (p.causal, ~p.causal))
        telling = np.logical_and(*(part > 10 * fine for part in parts)).any()
        inside = (np.abs(self.inside) <= fine).all()
        self.masked_delta = bool(self.wrong.any() and telling and inside)

    @property
    def said(self) -> str:
        sums = f"{listed(self.sums)} (rounding excuses {self.allowed.max():.1g})"
        return f"rows of {self.printed.name} must sum to 0, but sum to {sums}"

    @property
    def where(self) -> str:
        rows = np.unique(np.nonzero(self.wrong)[-1])
        return f"{self.printed.name}, {rows_named([str(row) for row in rows])}"

    def judged(self) -> Iterator[Finding]:
        """What a dS on its own proves, which needs no other side."""
        if self.masked_delta:
            most, first = (f"{np.abs(x).max():.1g}" for x in (self.inside, self.inside[..., 0]))
            inside = (
                f"{self.printed.name}: each row up to the diagonal does sum to 0 (off by {most} "
                f"at most, by {first} in the first row, which sees one key): D is that of the "
                "masked output, P that of all keys"
            )
            given = ("mask-missing-in-backward", self.where, "proved", (self.said, inside))
            yield finding(self.printed.side, *given)

    def checks(self, causal: bool) -> Iterator[Check]:
        """Identities, each at the row that is off by most."""
        p = self.printed
        told = ("I1", "rows of P sum to 1") if p.kind == "P" else ("I2", "rows of dS sum to 0")
        of = [(*told, self.off, self.allowed)]
        if causal and self.square and p.kind == "dS":
            above = np.abs(p.values * ~p.causal).max(axis=-1)
            unit = np.full_like(above, p.units.max())
            of.append(("mask", "dS is 0 above the diagonal", above, unit))
        for name, text, off, allowed in of:
            at = np.unravel_index(int((off - allowed).argmax()), off.shape)
            verdict = "pass" if off[at] <= allowed[at] else "FAIL"
            verdict = verdict if p.values.any() else "vacuous"
            where = f"{p.name}, row {int(at[-1])}"
            yield Check(p.side, name, text, float(off[at]), float(allowed[at]), verdict, where)


def listed(values: Float64 | Sequence[float], digits: int = 4) -> str:
    return few([f"{value:z.{digits}f}" for value in np.ravel(values)])


def rows_named(labels: Sequence[str]) -> str:
    return f"row{'' if len(labels) == 1 else 's'} {few(labels)}"


def few(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more

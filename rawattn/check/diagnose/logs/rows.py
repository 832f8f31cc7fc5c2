"""What must hold on one side alone: whole rows of dS and of P, and the mask that a dS shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.findings import Check
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Float64, Printed

PART_WORDS = frozenset({"tile", "block", "partial", "chunk", "slice", "sub"})
SHOWN = 12


@dataclass(frozen=True, eq=False)
class Rows:
    """The whole rows of one printed dS, (matrices, queries, keys)."""

    printed: Printed
    values: Float64

    @cached_property
    def causal(self) -> np.ndarray:
        """Who sees whom under a causal mask: the last query sees every key."""
        _, rows, keys = self.values.shape
        return np.tri(rows, keys, keys - rows, dtype=bool)

    @cached_property
    def sums(self) -> Float64:
        return np.asarray(self.values.sum(axis=2))

    @cached_property
    def inside(self) -> Float64:
        """Sums over the keys that a causal mask allows."""
        return np.asarray(np.where(self.causal, self.values, 0.0).sum(axis=2))

    def excused(self, relative: float) -> Float64:
        """What the digits excuse, and a share of the largest row: a row's own size may be that of a
        small difference, dP - D."""
        digits = 0.505 * self.printed.units.reshape(self.values.shape).sum(axis=2)
        return np.asarray(digits + relative * np.abs(self.values).sum(axis=2).max())

    @cached_property
    def allowed(self) -> Float64:
        return self.excused(2.0**-6)

    @property
    def sound(self) -> bool:
        return bool((np.abs(self.sums) <= self.allowed).all())

    @property
    def masked(self) -> bool:
        """Sound, square, of more than one row, with nothing above the diagonal."""
        square = self.values.shape[1] == self.values.shape[2] > 1
        zeros = not self.values[:, ~self.causal].any() and bool(self.values.any())
        return self.sound and square and zeros

    @property
    def masked_delta(self) -> bool:
        """P of all keys with D of the masked output: rows sum to 0 over the causal keys alone."""
        fine = self.excused(SIXTEEN_BIT.get(self.printed.dtype, 2.0**-11))
        size = np.abs(self.values)
        parts = (np.where(seen, size, 0.0).sum(axis=2) for seen in (self.causal, ~self.causal))
        telling = np.logical_and(*(part > 10 * fine for part in parts))
        inside = (np.abs(self.inside) <= fine).all()
        return not self.sound and bool(telling.any() and inside)

    @property
    def evidence(self) -> tuple[str, str]:
        title, left = self.printed.title, np.abs(self.inside)
        return (
            f"rows of {title} must sum to 0, but sum to {listed(self.sums.ravel())} (rounding "
            f"excuses {self.allowed.max():.1g})",
            f"{title}: each row up to the diagonal does sum to 0 (off by {_small(left.max())} at "
            f"most, by {_small(left[:, 0].max())} in the first row, which sees one key): D is that "
            "of the masked output, P that of all keys",
        )

    @property
    def where(self) -> str:
        wrong = np.unique(np.nonzero(np.abs(self.sums) > self.allowed)[1])
        return f"{self.printed.title}, {rows_named([str(row) for row in wrong])}"


def rows_of(printed: Printed) -> Rows | None:
    """None where the print does not hold whole rows of dS."""
    if printed.kind != "dS" or not _whole(printed) or not np.isfinite(printed.values).all():
        return None
    return Rows(printed, printed.values.reshape(-1, *printed.values.shape[-2:]))


def _whole(p: Printed) -> bool:
    """Whether whole rows are printed, of the whole matrix."""
    return p.full and p.values.ndim > 1 and not PART_WORDS & set(p.words)


def identities(
    printed: Sequence[Printed], rows: dict[int, Rows], causal: bool | None, sides: dict[int, str]
) -> Iterator[Check]:
    """Identities of each side alone, as far as whole rows are printed; ``rows`` by ``start``."""
    for p in printed:
        side, own = sides[p.start], rows.get(p.start)
        # with other numbers in it only the name says P
        if p.kind == "P" and _whole(p) and ((p.values >= 0) & (p.values <= 1.01)).all():
            off = np.where(p.values.any(axis=-1), np.abs(p.values.sum(axis=-1) - 1), 0.0)
            allowed = 0.505 * p.units.sum(axis=-1) + 2.0**-7
            yield _worst(side, "I1", "rows of P sum to 1", p, off, allowed)
        if own is not None:
            yield _worst(side, "I2", "rows of dS sum to 0", p, np.abs(own.sums), own.allowed)
        square = own is not None and p.values.shape[-1] == p.values.shape[-2]
        if square and causal:
            beyond, unit = float(np.abs(np.triu(p.values, 1)).max()), float(p.units.max())
            verdict = "FAIL" if beyond > unit else "pass"
            yield Check(side, "mask", "dS is 0 above the diagonal", beyond, unit, verdict, p.title)


def _worst(side: str, name: str, text: str, p: Printed, off: Float64, allowed: Float64) -> Check:
    """Of the row that is off by most."""
    off, allowed = off.reshape(-1, off.shape[-1]), allowed.reshape(-1, off.shape[-1])
    at = np.unravel_index(int((off - allowed).argmax()), off.shape)
    verdict = ("pass" if off[at] <= allowed[at] else "FAIL") if p.values.any() else "vacuous"
    where = f"{p.title}, row {int(at[-1])}"
    return Check(side, name, text, float(off[at]), float(allowed[at]), verdict, where)


def listed(values: Float64 | list[float], digits: int = 4) -> str:
    return few([f"{value:z.{digits}f}" for value in values])


def _small(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.1g}"


def rows_named(labels: Sequence[str]) -> str:
    return f"row{'' if len(labels) == 1 else 's'} {few(labels)}"


def few(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more

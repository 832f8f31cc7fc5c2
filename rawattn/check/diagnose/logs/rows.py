"""What must hold on one side alone: whole rows of dS and of P, and the mask that a dS shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rawattn.check.diagnose.findings import Check
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Float64, Printed

PART_WORDS = frozenset({"tile", "block", "partial", "chunk", "slice", "sub"})
SHOWN = 12


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one printed dS, summed over all keys, and over those that a causal mask allows.

    allowed: what the digits and the dtype excuse. _size: sums of magnitudes.
    """

    printed: Printed
    sums: Float64
    allowed: Float64
    inside: Float64
    inside_allowed: Float64
    inside_size: Float64
    outside_size: Float64

    @property
    def sound(self) -> bool:
        return bool((np.abs(self.sums) <= self.allowed).all())

    @property
    def masked(self) -> bool:
        """Sound, square, of more than one row, with nothing above the diagonal."""
        square = self.printed.values.shape[-1] == self.printed.values.shape[-2] > 1
        zeros = not self.outside_size.any() and bool(self.inside_size.any())
        return self.sound and square and zeros

    @property
    def masked_delta(self) -> bool:
        """P of all keys with D of the masked output: rows sum to 0 over the causal keys alone."""
        least = 10 * self.inside_allowed
        telling = (self.inside_size > least) & (self.outside_size > least)
        inside = (np.abs(self.inside) <= self.inside_allowed).all()
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
    shape = (-1, *printed.values.shape[-2:])
    values, units = printed.values.reshape(shape), printed.units.reshape(shape)
    # who sees whom under a causal mask: the last query sees every key
    inside = np.arange(shape[2]) <= np.arange(shape[1])[:, None] + shape[2] - shape[1]
    size, digits = np.abs(values), 0.505 * units.sum(axis=2)
    largest = size.sum(axis=2).max()  # a row's own size may be a small difference, dP - D
    relative = SIXTEEN_BIT.get(printed.dtype, 2.0**-11)
    return Rows(
        printed,
        values.sum(axis=2),
        digits + 2.0**-6 * largest,
        np.where(inside, values, 0.0).sum(axis=2),
        digits + relative * largest,
        np.where(inside, size, 0.0).sum(axis=2),
        np.where(inside, 0.0, size).sum(axis=2),
    )


def _whole(p: Printed) -> bool:
    """Whether whole rows are printed, of the whole matrix."""
    return p.full and p.values.ndim > 1 and not PART_WORDS & set(p.words)


def identities(
    printed: Sequence[Printed], rows: dict[int, Rows], causal: bool | None, sides: dict[int, str]
) -> Iterator[Check]:
    """Identities of each side alone, as far as whole rows are printed; ``rows`` by ``start``."""
    for p in printed:
        side = sides[p.start]
        if p.kind == "P" and _whole(p):
            if ((p.values >= 0) & (p.values <= 1.01)).all():  # else only the name says P
                off = np.where(p.values.any(axis=-1), np.abs(p.values.sum(axis=-1) - 1), 0.0)
                allowed = 0.505 * p.units.sum(axis=-1) + 2.0**-7
                yield _worst(side, "I1", "rows of P sum to 1", p, off, allowed)
        if (own := rows.get(p.start)) is None:
            continue
        yield _worst(side, "I2", "rows of dS sum to 0", p, np.abs(own.sums), own.allowed)
        square = p.values.shape[-1] == p.values.shape[-2]
        if square and dict(p.settings).get("causal", str(causal)) == "True":
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

"""What must hold on one side alone: whole rows of dS and P, and the mask that the log tells of."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.findings import Check
from rawattn.check.diagnose.logs.pairs import Pair
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Flags, Float64, Printed
from rawattn.check.diagnose.logs.text import printed_shapes
from rawattn.check.diagnose.logs.words import listed, rows_named, small

PART_WORDS = frozenset({"tile", "block", "partial", "chunk", "slice", "sub"})
DTYPE_WORDS = {
    **{word: "bfloat16" for word in ("bf16", "bfloat16")},
    **{word: "float16" for word in ("fp16", "float16", "half")},
    **{word: "float32" for word in ("fp32", "float32")},
    **{word: "float64" for word in ("fp64", "float64", "double")},
}


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
        """Square, of more than one row, with nothing above the diagonal."""
        square = self.printed.values.shape[-1] == self.printed.values.shape[-2] > 1
        return square and not self.outside_size.any() and bool(self.inside_size.any())

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
            f"{title}: each row up to the diagonal does sum to 0 (off by {small(left.max())} at "
            f"most, by {small(left[:, 0].max())} in the first row, which sees one key): D is that "
            "of the masked output, P that of all keys",
        )

    @property
    def where(self) -> str:
        wrong = np.unique(np.nonzero(np.abs(self.sums) > self.allowed)[1])
        return f"{self.printed.title}, {rows_named([str(row) for row in wrong])}"


def rows_of(printed: Printed) -> Rows | None:
    """None where the print does not hold whole rows of dS."""
    if printed.kind != "dS" or not printed.full or printed.values.ndim < 2:
        return None
    if PART_WORDS & set(printed.words) or not np.isfinite(printed.values).all():
        return None
    shape = (-1, *printed.values.shape[-2:])
    values, units = printed.values.reshape(shape), printed.units.reshape(shape)
    inside, size = _visible(*shape[1:]), np.abs(values)
    digits = 0.505 * units.sum(axis=2)
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


def _visible(rows: int, columns: int) -> Flags:
    """Who sees whom under a causal mask: the last query sees every key."""
    return np.asarray(np.arange(columns) <= np.arange(rows)[:, None] + columns - rows)


def first_row(p: Printed) -> Float64 | None:
    """The first row of each printed sequence or head; None where it is not printed."""
    if p.values.ndim < 2 or p.places[-2][0] != 0:
        return None
    rows = p.values[..., 0, :]
    packed = p.kind == "dQ" and p.values.ndim == 3 and rows.any()
    return np.asarray(p.values[0] if packed else rows)


@dataclass(frozen=True)
class Log:
    """What holds for the whole log. rows: of printed dS, by ``start``. causal: None where the log
    does not say, or says both."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: frozenset[str]
    rows: dict[int, Rows]
    causal: bool | None

    @property
    def first_row_zero(self) -> bool:
        """Whether a dS proves that the first query sees one key."""
        return any(rows.masked and rows.sound for rows in self.rows.values())

    @property
    def fits(self) -> bool:
        """Whether the lengths add up to a size that the log prints, as far as it prints any."""
        return not self.shapes or any(sum(self.lengths) in shape for shape in self.shapes)


def what_holds(text: str, printed: Sequence[Printed], lengths: tuple[int, ...]) -> Log:
    rows = {p.start: rows for p in printed if (rows := rows_of(p)) is not None}
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    log = Log(
        lengths,
        tuple(shape for _, shape in printed_shapes(text)),
        frozenset(DTYPE_WORDS[word] for word in re.findall(r"\w+", text) if word in DTYPE_WORDS),
        rows,
        said == {"true"} if len(said) == 1 else None,
    )
    return replace(log, causal=True) if log.first_row_zero else log


def causal_of(pair: Pair, log: Log) -> bool | None:
    told = {value for p in (pair.a, pair.b) for key, value in p.settings if key == "causal"}
    return told == {"True"} if told else log.causal


def identities(
    printed: Sequence[Printed], pairs: Sequence[Pair], log: Log, sides: dict[int, str]
) -> Iterator[Check]:
    """Identities of each side alone, as far as whole rows are printed."""
    for p in printed:
        side = sides[id(p)]
        if p.kind == "P" and p.full and p.values.ndim > 1 and not PART_WORDS & set(p.words):
            if ((p.values >= 0) & (p.values <= 1.01)).all():  # else only the name says P
                off = np.where(p.values.any(axis=-1), np.abs(p.values.sum(axis=-1) - 1), 0.0)
                allowed = 0.505 * p.units.sum(axis=-1) + 2.0**-7
                yield _worst(side, "I1", "rows of P sum to 1", p, off, allowed)
        if (rows := log.rows.get(p.start)) is None:
            continue
        yield _worst(side, "I2", "rows of dS sum to 0", p, np.abs(rows.sums), rows.allowed)
        square = p.values.shape[-1] == p.values.shape[-2]
        if square and dict(p.settings).get("causal", str(log.causal)) == "True":
            beyond = np.where(_visible(*p.values.shape[-2:]), 0.0, np.abs(p.values)).max()
            verdict = "FAIL" if beyond > p.units.max() else "pass"
            text = "dS is 0 above the diagonal"
            yield Check(side, "mask", text, float(beyond), float(p.units.max()), verdict, p.title)
    for pair in pairs:
        for side, p in zip(pair.sides, (pair.a, pair.b), strict=True):
            first = first_row(p) if pair.kind == "dQ" and log.first_row_zero else None
            if first is not None:
                value = float(np.abs(first).max())
                limit = float(p.units.max() + 2.0**-7 * np.abs(p.values).max())
                verdict = "pass" if value <= limit else "FAIL"
                text = "dQ of the first causal row is 0"
                yield Check(side, "I3", text, value, limit, verdict, p.title)


def _worst(side: str, name: str, text: str, p: Printed, off: Float64, allowed: Float64) -> Check:
    """Of the row that is off by most."""
    at = np.unravel_index(int((off - allowed).argmax()), off.shape)
    verdict = ("pass" if off[at] <= allowed[at] else "FAIL") if p.values.any() else "vacuous"
    where = f"{p.title}, row {int(at[-1])}"
    return Check(side, name, text, float(off[at]), float(allowed[at]), verdict, where)

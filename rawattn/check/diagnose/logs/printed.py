"""Printed tensors: reading a log in torch's or NumPy's form, what the name of one tells, which two
are one quantity of two sides, and how one fits the other."""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

NUMBER = r"[-+]?(?:nan|inf|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
TOKEN = re.compile(rf"[\s,]*(\[|\]|\.\.\.|{NUMBER}(?![\w.]))", re.IGNORECASE)
# a bare list in one line may be prose where it has commas
START = re.compile(
    rf"\b(?:\w+\.)?(?P<form>tensor|array)\(\s*(?:(?P<factor>{NUMBER})\s*\*\s*)?(?=\[)"
    r"|(?<![\w\])(.'\"])(?=\[\s*\[|\[[^][,]+\s[^][,]+\])",
    re.IGNORECASE,
)
TRAILER = re.compile(r"[^()\[\]]*\)")  # the device, the dtype
# colours, and what test runners and launchers put before lines
CLUTTER = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r|^(?:E(?=[ \t]{2})|\[rank\d+\]:|>(?= ))", re.M)

KINDS = {
    **{f"d{letter}": f"d{letter.upper()}" for letter in "qkvosp"},
    **{letter: letter.upper() for letter in "qkvosp"},
    **{"query": "Q", "key": "K", "value": "V", "out": "O", "output": "O", "scores": "S"},
    **{"lse": "lse", "logsumexp": "lse", "probs": "P", "softmax": "P"},
}
CONSTANT = 0.02  # what a constant slope may leave, relative, beyond the printed digits
ROUNDING = 2.0**-8  # prints do not tell whether 16-bit tensors were cast for printing
DIGITS = 50  # units of the last printed place, from which on a logarithm can be taken
OF_NO_SIDE = {*KINDS, "grad", "gradient", "diff", "difference", "err", "error", "abs"}


@dataclass(frozen=True, eq=False)
class Printed:
    """One printed tensor, without the elided part and leading axes of length 1. unit: the step of
    the last printed digit, of the largest entries where it differs, 0 where the print is exact.
    fronts: how many entries of each axis stand before "...", all where nothing is elided."""

    name: str
    values: np.ndarray
    unit: float
    fronts: tuple[int, ...]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The name in lower-case words: dS_manual is ds, manual."""
        pattern = r"d[A-Z](?![a-z])|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
        return tuple(word.lower() for word in re.findall(pattern, self.name))

    @cached_property
    def kind(self) -> str:
        """dQ, dK, dV, dO, dS, dP, O, P, S or lse, as far as the name tells; "" else."""
        found = {KINDS[word] for word in self.words if word in KINDS}
        found = {kind for kind in found if len(kind) > 1} or found
        kind = found.pop() if len(found) == 1 else ""
        return f"d{kind}" if len(kind) == 1 and {"d", "grad", "gradient"} & {*self.words} else kind

    @property
    def whole(self) -> bool:
        """Whether nothing is elided."""
        return self.fronts == self.values.shape

    @property
    def of_softmax(self) -> bool:
        """Whether these are whole rows of dS or P, with numbers that a P may have."""
        x = self.values
        part = {"tile", "block", "partial", "chunk", "slice", "sub"} & set(self.words)
        if part or not self.whole or x.size == 0 or x.ndim < 2 or not np.isfinite(x).all():
            return False
        return self.kind == "dS" or (self.kind == "P" and bool(((x >= 0) & (x <= 1.01)).all()))


def read_log(text: str) -> list[Printed]:
    """Every tensor of real numbers, not integers, that is printed; ValueError if one is cut off."""
    text = CLUTTER.sub("", text)
    found, after = list[Printed](), 0
    for start in START.finditer(text):
        surely, begins = bool(start["form"]), start.end() >= after
        read = _read(text, start.end(), surely=surely) if begins else None
        if read is None:
            continue
        strings, elided, end = read
        name = _name(text[max(after, start.start() - 2000) : start.start()])
        trailer = TRAILER.match(text, end) if start["form"] else None
        after = trailer.end() if trailer else end
        if re.search(r"[.en]", "".join(strings.ravel()), re.IGNORECASE):
            name = name or f"tensor {len(found) + 1}"
            found.append(_printed(name, strings, elided, float(start["factor"] or 1)))
    return found


def _read(text: str, at: int, *, surely: bool) -> tuple[np.ndarray, dict[int, int], int] | None:
    """The numbers from ``at`` on as they are written, by axis how many stand before "...", and
    where they end; None for what may be prose, or a quoted program."""
    stack, elided, end = [list[Any]()], dict[int, int](), at
    while token := TOKEN.match(text, end):
        end = token.end()
        if token[1] == "[":
            stack.append([])
        elif token[1] == "]":
            stack[-2].append(stack.pop())
        elif token[1] == "...":
            if elided.setdefault(len(stack) - 2, len(stack[-1])) != len(stack[-1]):
                break
        else:
            stack[-1].append(token[1])
        if len(stack) == 1:
            with contextlib.suppress(ValueError):  # of rows of different lengths
                return np.array(stack[0][0], dtype=np.str_), elided, end
            break
    rest = text[end : end + 1000].strip(" ,\n") if len(stack) > 1 else "0"
    if rest and not (surely and re.match(r"[-+.]*\d", rest)):
        return None
    why = "it is cut off, has rows of different lengths, or numbers that are not real"
    line = text.count("\n", 0, at) + 1
    raise ValueError(f"the tensor printed at line {line} cannot be read: {why}")


def _printed(name: str, strings: np.ndarray, elided: dict[int, int], factor: float) -> Printed:
    values = strings.astype(np.float64) * factor
    fronts = tuple(elided.get(axis, n) for axis, n in enumerate(values.shape))
    # NumPy drops zeros at the end, so the longest tells
    written = [s.lower() for s in strings[np.isfinite(values)].tolist()]
    decimals = max((len(s.partition("e")[0].partition(".")[2]) for s in written), default=0)
    power = max((int(s.partition("e")[2] or 0) for s in written if float(s)), default=0)
    while values.ndim > 2 and len(values) == fronts[0] == 1:
        values, fronts = values[0], fronts[1:]
    return Printed(name, values, factor * 10.0 ** (power - decimals) if decimals else 0.0, fronts)


def _name(before: str) -> str:
    """The name that stands before a tensor, on its line or the nearest one above."""
    lines = before.split("\n")
    words = lines.pop().strip(" \t([{")
    if not words:
        words = next((line.strip() for line in lines[:-4:-1] if line.strip()), "")
        if not words.endswith((":", "=")) and len(words.split()) > 2:
            return ""
    words = re.sub(r"\([^()]*=[^()]*\)$", "", words.rstrip(" \t:=([{"))
    words = re.split(r"[:!?;,|>]\s+|\.\s+", words)[-1].strip(" \t'\"`*([{,")
    parts, named = words.split(), re.search("[A-Za-z]", words) is not None
    return (words if len(parts) <= 4 else parts[-1]) if named else ""


def factor(a: np.ndarray, b: np.ndarray, a_unit: float = 0.0, b_unit: float = 0.0) -> float | None:
    """a / b by least squares where that is a constant other than 1, but for what was printed."""
    if a.size < 4 or rms(a) <= 2 * a_unit or rms(b) <= 2 * b_unit:
        return None
    slope = float(a @ b) / float(b @ b)
    digits = (a_unit**2 + (slope * b_unit) ** 2) / 12
    constant = rms(a - slope * b) ** 2 - digits <= (CONSTANT * rms(a)) ** 2
    return slope if constant and abs(slope - 1) > CONSTANT else None


class Pair:
    """Two tensors of one quantity of which the same entries are printed. sides: whose they are.
    finite: entries that are numbers on both sides; the difference of others is 0. size: the larger
    side's root mean square. digits: how far two prints of one number may lie apart. alike: entries
    that are equal but for rounding, NaN and infinities too. agrees: all are."""

    def __init__(self, a: Printed, b: Printed, sides: tuple[str, str]) -> None:
        self.a, self.both, self.sides = a, (a, b), sides
        self.either = " or ".join(sides)
        self.title, self.kind = f"{a.name} / {b.name}", a.kind if a.kind == b.kind else ""
        self.finite = np.isfinite(a.values) & np.isfinite(b.values)
        x, y = (np.where(self.finite, p.values, 0.0) for p in self.both)
        self.difference = np.abs(x - y)
        self.size = max(rms(x), rms(y))
        self.digits = 0.5005 * (a.unit + b.unit)
        noise = ROUNDING * (1 if a.whole else 2)  # corners may be the small part of a tensor
        # where dP - D cancels, what is rounded is larger than what is printed
        largest = float(np.maximum(np.abs(x), np.abs(y)).max(initial=0.0))
        near = self.finite & (self.difference <= self.digits + 16 * noise * largest)
        self.alike = near | (a.values == b.values) | np.isnan(a.values) & np.isnan(b.values)
        spread = math.sqrt(max(0.0, rms(self.difference) ** 2 - self.digits**2))
        self.agrees = bool(self.alike.all()) and spread <= 8 * noise * self.size

    @property
    def factor(self) -> float | None:
        x, y = (p.values[self.finite] for p in self.both)
        return factor(x, y, *(p.unit for p in self.both))

    @property
    def power(self) -> float | None:
        """The factor of one side's scores: of the logarithms of P less their mean in each row."""
        if self.kind != "P" or self.a.values.ndim < 2:
            return None
        there = np.all([p.values > max(DIGITS * p.unit, 1e-6) for p in self.both], axis=0)
        count = np.maximum(there.sum(axis=-1, keepdims=True), 1)
        logs = [np.log(np.where(there, p.values, 1.0)) for p in self.both]
        x, y = ((z - z.sum(axis=-1, keepdims=True) / count)[there] for z in logs)
        found = factor(x, y)
        return found if found is not None and found > 0 else None


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def paired(found: Sequence[Printed]) -> list[Pair]:
    """Of two whose names differ in one word, the side, which one may lack if a kind is named."""
    told = {p: dict(_told(p)) for p in found}
    used: set[object] = set()  # tensors, and of the first of several sides those that have one
    pairs = []
    for a, b in combinations(found, 2):
        common = ((told[a][what], told[b][what]) for what in told[a] if what in told[b])
        sides = next((both for both in common if both[0] != both[1]), ("", ""))
        same = a.values.shape == b.values.shape and a.fronts == b.fronts and a.values.size
        if any(sides) and same and not {a, b, (a, sides[1])} & used:
            used |= {b, (a, sides[1])}
            pairs.append(Pair(a, b, (sides[0] or a.name, sides[1] or b.name)))
    return pairs


def _told(p: Printed) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of what it may be by its name, and whose."""
    if p.kind:
        yield p.words, ""
    for n, word in enumerate(p.words):
        if len(word) > 2 and word not in OF_NO_SIDE and not word.isdigit() and len(p.words) > 1:
            yield (*p.words[:n], *p.words[n + 1 :]), word

"""What a text log can prove: tensors and errors that somebody printed, read back and judged.

A print holds a few digits of a few corners, so little can be recomputed from it, but much can be
excluded. Three parts: ``tensors`` and ``numbers`` read; pairs are fitted on the entries that both
sides print; findings name what identities and ratios prove. Long because a log is read in one
place: nothing else of the package knows about printed digits.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.classes import CLASSES
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level

Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SIDE_WORDS = frozenset(
    "manual cuda triton varlen sdpa reference ref candidate expected actual golden gold torch "
    "pytorch naive flash ours theirs mine kernel numpy np cupy jax mlx math eager compiled fa fa2 "
    "fa3 fa4 gpu cpu test tested native dense packed padded cudnn cutlass numba rawattn baseline "
    "base new old got want wanted target truth custom hip metal vulkan c cpp rust".split()
)
SCORES = frozenset({"s", "score", "scores", "logits", "qk"})
PROBABILITIES = frozenset({"p", "prob", "probs", "probabilities", "softmax"})
PART_WORDS = frozenset({"tile", "block", "partial", "chunk", "slice", "sub"})
SIXTEEN_BIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPE_WORDS = {
    **{word: "bfloat16" for word in ("bf16", "bfloat16")},
    **{word: "float16" for word in ("fp16", "float16", "half")},
    **{word: "float32" for word in ("fp32", "float32")},
    **{word: "float64" for word in ("fp64", "float64", "double")},
}
SMALLEST_HALF = 2.0**-24  # the smallest float16 above 0
CONSTANT = 0.02  # what a constant slope may leave, relative, beyond the printed digits
UNIT_SCORES = math.exp(1 / 18)  # E[exp(s)] for s of variance 1/9: default torch.nn.Linear weights
CERTAIN = 3.0  # standard errors
LOG2_E = 1 / math.log(2)
SHRUNK = ("", "O", "dV")  # what zero keys in the denominator divide by nearly one number
RANKS = ("proved", "high", "medium", "low")
REPEATED = re.compile(r"repeat|rerun|run.to.run|bitwise|determin|same", re.IGNORECASE)
SIZES = re.compile(r"norm|magnitude|amax|max|mean|std|scale", re.IGNORECASE)

NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
TOKEN = re.compile(
    rf"\s*(?:(?P<open>\[)|(?P<close>\])|(?P<dots>\.\.\.)|(?P<comma>,)"
    rf"|(?P<number>(?:true|false|{NUMBER})(?![\w.])))",
    re.IGNORECASE,
)
START = re.compile(
    rf"(?:\b(?:tf|torch|np|numpy|jnp|cp|mx)\.)?\b(?:tensor|array|asarray)\s*\(\s*(?P<factor>{NUMBER}\s*\*\s*)?"
    rf"(?P<call>\[|{NUMBER}(?=[\s,)]))"
    r"|(?<![\w\])(.'\"])(?P<bare>\[)",
    re.IGNORECASE,
)
TRAILER = re.compile(
    r"(?:\s*,\s*\w+\s*=\s*(?:'[^']*'|<[^<>]*>|\([^()]*\)|[\w.]+(?:\([^()]*\)|\[[^\[\]]*\])?))*\s*\)?"
)
SIZE = re.compile(
    r"(?:(?P<name>[A-Za-z_][\w.]*?)(?:\.shape|\.size\(\))?[ \t]*[:=]?[ \t]*)?"
    r"(?:torch\.Size\(\[(?P<torch>[\d, ]*)\]\)|(?<=shape)[ \t]*[:=]?[ \t]*\((?P<numpy>[\d, ]*)\))"
)
FIGURE = re.compile(
    rf"(?P<label>[A-Za-z_|][^:=\[\]]*?)"
    rf"(?:\s*(?<![<>!=+*/-])[:=](?!=)\s*|(?<=err)\s+|(?<=error)\s+|(?<=diff)\s+|(?<=difference)\s+)"
    rf"(?:tensor\(\s*)?(?P<value>[\[(]\s*{NUMBER}[^\[\]()]*[\])]|{NUMBER}(?![\w.:]))"
    r"(?P<suffix>\s*(?:[mun]?s\b|%))?",
    re.IGNORECASE,
)


# ---- reading ----


@dataclass(frozen=True, eq=False)
class Printed:
    """One printed tensor: what stands in the log, without the elided part.

    start: where it begins in the log. values: the printed entries; nan where nan was printed.
    units: the step of the last printed digit of each, 0 where the print is exact. places: the
    indices along each axis of the printed entries; counted from the back, so negative, where they
    stand behind "...". sizes: the length of each axis, None where it is elided and nothing tells.
    dtype: "" where nothing tells. settings: (("causal", "False"),) of a name "dS (causal=False)".
    """

    name: str
    line: int
    start: int
    values: Float64
    units: Float64
    places: tuple[Integers, ...]
    sizes: tuple[int | None, ...]
    dtype: str = ""
    decimals: int = 0
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def full(self) -> bool:
        """Whether nothing is elided."""
        return self.values.size > 0 and self.sizes == self.values.shape

    @property
    def title(self) -> str:
        told = ", ".join(f"{key}={value}" for key, value in self.settings)
        return (self.name or f"tensor of line {self.line}") + (f" ({told})" if told else "")

    @property
    def floating(self) -> bool:
        return not self.dtype.startswith(("int", "uint", "bool", "long"))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The name in lower-case words: dS_manual is ds, manual."""
        pattern = r"d[A-Z](?![a-z])|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
        return tuple(word.lower() for word in re.findall(pattern, self.name))

    @property
    def kind(self) -> str:
        """dQ, dK, dV, dO, dS, dP, O, P, S or lse, as far as the name tells; "" else."""
        words = {word for word in self.words if word not in SIDE_WORDS}
        for gradient in ("dQ", "dK", "dV", "dO", "dS", "dP"):
            if gradient.lower() in words:
                return gradient
        if words & {"lse", "logsumexp"}:
            return "lse"
        found = [letter for letter in "qkvo" if letter in words]
        found += ["s"] * bool(words & SCORES) + ["p"] * bool(words & PROBABILITIES)
        found += ["o"] * bool(words & {"out", "output"})
        if len(found) != 1:
            return ""
        letter = found[0].upper()
        return f"d{letter}" if words & {"grad", "gradient", "d"} else letter


@dataclass(frozen=True)
class Number:
    """A printed figure: "max abs err (q,k,v): [1e-3, 2e-3, 0.0]" is three, of parts q, k and v.

    context: the headline above it. unit: the step of its last digit; 0 where it is exact.
    """

    label: str
    part: str
    value: float
    unit: float
    line: int
    context: str = ""

    @property
    def error(self) -> bool:
        """Whether it says how far two results are apart."""
        return bool(re.search(r"err|diff|residual", self.label, re.IGNORECASE))


def tensors(text: str) -> tuple[Printed, ...]:
    """Every tensor that ``text`` prints, in torch's or NumPy's form.

    Raises ValueError where one begins that cannot be read: cut off, ragged, not of real numbers.
    """
    text = _clean(text)
    return _with_sizes(text, _read(text))


def numbers(text: str) -> tuple[Number, ...]:
    """Every labelled figure outside of tensors; times and headlines are left out."""
    text = _clean(text)
    return _figures(text, _read(text))


def _figures(text: str, read: Iterable[tuple[Printed, int]]) -> tuple[Number, ...]:
    rest, last = [], 0
    for printed, end in read:
        if printed.values.ndim:
            rest += [text[last : printed.start], "\n" * text.count("\n", printed.start, end)]
            last = end
    found, context = [], ""
    for line, words in enumerate("".join([*rest, text[last:]]).split("\n"), 1):
        if re.match(r"\s*(==|--|##|\*\*)", words):
            context = words.strip(" =-#*")
            continue
        for match in FIGURE.finditer(words):
            if match["suffix"]:
                continue
            label = match["label"].strip(" ,;\t|")
            parts = re.search(r"\(([\w ,]+)\)$", label)
            names = [name.strip() for name in parts[1].split(",")] if parts else []
            values = re.findall(NUMBER, match["value"], re.IGNORECASE)
            if parts and len(names) == len(values):
                label = label[: parts.start()].strip()
            else:
                names = [str(i) for i in range(len(values))] if len(values) > 1 else [""]
            found += [
                Number(label, name, float(value), _figure_unit(value), line, context)
                for name, value in zip(names, values, strict=bool(values))
            ]
    return tuple(found)


def _clean(text: str) -> str:
    """Without colours, carriage returns, and what test runners and launchers put before lines."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r", "")
    text = re.sub(r"np\.float\d+\(([^()]*)\)", r"\1", text)
    text = text.replace("Parameter containing:", "")
    return re.sub(r"(?m)^(?:E(?=[ \t]{2})|\[rank\d+\]:|>(?= ))", "", text)


def _read(text: str) -> list[tuple[Printed, int]]:
    """Tensors, and where each ends."""
    found = []
    after, at, line, counted = 0, 0, 1, 0
    while start := START.search(text, at):
        opening = start.start("bare") if start["bare"] else start.start("call")
        line, counted = line + text.count("\n", counted, opening), opening
        at = opening + 1
        try:
            strings, layout, end = _data(text, opening)
        except _Unreadable as unreadable:
            if unreadable.fatal or (start["call"] and not unreadable.code):
                raise ValueError(f"the tensor printed at line {line}: {unreadable}") from None
            continue
        flat = len(layout) == 1 and ("," in text[opening:end] or len(strings) < 2)
        if start["bare"] and (not strings or flat):
            at = end
            continue
        trailer = ""
        if start["call"] and (match := TRAILER.match(text, end)):
            trailer, end = match[0], match.end()
        name, settings = _name(text[max(after, start.start() - 2000) : start.start()])
        factor = float(start["factor"].rstrip("* \t\n")) if start["factor"] else 1.0
        form = start[0].split("(")[0].strip().lower().rpartition(".")[2]
        printed = _printed(strings, layout, factor, form, trailer)
        placed = replace(printed, name=name, line=line, start=start.start(), settings=settings)
        found.append((placed, end))
        after = at = end
    return found


class _Unreadable(Exception):
    """fatal: whatever it is, it is no prose. code: names stand in it, as in a quoted program."""

    def __init__(self, reason: str, *, fatal: bool = False, code: bool = False) -> None:
        super().__init__(reason)
        self.fatal, self.code = fatal, code


Layout = tuple[tuple[int, int | None], ...]  # by axis: entries before "...", and after it


def _data(text: str, at: int) -> tuple[list[str], Layout, int]:
    """The numbers from ``at`` on as they are written, their layout, and where they end."""
    if text[at] != "[":
        match = re.compile(NUMBER, re.IGNORECASE).match(text, at)
        assert match is not None
        return [match[0]], (), match.end()
    stack: list[list[object]] = []
    read = 0
    while True:
        token = TOKEN.match(text, at)
        if token is None:
            rest = text[at : at + 1000].split()
            if rest:
                reason = f"{rest[0][:20]!r} is neither a real number nor a bracket"
                raise _Unreadable(reason, code=not re.match(r"[-+.\d]", rest[0]))
            raise _Unreadable("it ends within its brackets", fatal=read > 1 and len(stack) > 1)
        at = token.end()
        if token["open"]:
            stack.append([])
        elif token["number"]:
            read += 1
            stack[-1].append(token["number"])
        elif token["dots"]:
            stack[-1].append(...)
        elif token["close"]:
            done = stack.pop()
            if not stack:
                return *_flat(done), at
            stack[-1].append(done)


def _flat(node: list[object]) -> tuple[list[str], Layout]:
    """Nested lists as one list and the layout that all of a depth share."""
    count = node.count(...)
    if count > 1:
        raise _Unreadable("two elisions in one row")
    front = node.index(...) if count else len(node)
    items = [item for item in node if item is not ...]
    here: Layout = ((front, len(items) - front if count else None),)
    inner = [_flat(item) for item in items if isinstance(item, list)]
    if not inner:
        return [str(item) for item in items], here
    if len(inner) < len(items) or any(layout != inner[0][1] for _, layout in inner):
        raise _Unreadable("its rows are of different lengths")
    return [string for strings, _ in inner for string in strings], here + inner[0][1]


def _printed(strings: list[str], layout: Layout, factor: float, form: str, trailer: str) -> Printed:
    """Without name and place."""
    told = dict(re.findall(r"(\w+)\s*=\s*('[^']*'|\([^()]*\)|[\w.]+)", trailer))
    shape = tuple(front + (back or 0) for front, back in layout)
    given: str = told.get("size") or told.get("shape") or ""
    total = tuple(int(size) for size in re.findall(r"\d+", given))
    if len(total) >= len(layout) and 0 in total:
        shape, layout = total, tuple((size, None) for size in total)
    sizes = tuple(front if back is None else None for front, back in layout)
    if len(total) == len(sizes):
        sizes = total
    places = tuple(
        np.r_[np.arange(front), np.arange(-(back or 0), 0)].astype(np.int64)
        for front, back in layout
    )
    truth = {"true": "1", "false": "0"}
    values = np.array([float(truth.get(s.lower(), s)) for s in strings], np.float64).reshape(shape)
    decimals = max((_decimals(s) for s in strings), default=0)
    units = np.array([_unit(s, decimals) for s in strings], np.float64).reshape(shape)
    dtype = told.get("dtype", "").removeprefix("torch.").strip("'")
    if not dtype and any(re.search(r"[.en]", s) for s in strings):
        dtype = {"tensor": "float32", "array": "float64"}.get(form, "")
    elif not dtype:
        dtype = "bool" if any(s.lower() in truth for s in strings) else "int64"
    return Printed("", 0, 0, values * factor, units * factor, places, sizes, dtype, decimals)


def _decimals(string: str) -> int:
    mantissa = string.lower().split("e")[0]
    return len(mantissa.partition(".")[2])


def _unit(string: str, decimals: int) -> float:
    """The step of the last digit. NumPy drops zeros at the end, so it is that of the longest."""
    if decimals == 0 or not re.search(r"\d", string):
        return 0.0
    exponent = string.lower().partition("e")[2]
    return float(f"1e{int(exponent or 0) - decimals}")


def _figure_unit(string: str) -> float:
    """Like ``_unit``; but "0.0" is how Python writes a zero, 0.0000e+00 is one too, and whole
    numbers are counts."""
    zero = not any(digit in string for digit in "123456789")
    if zero and ("e" in string.lower() or _decimals(string) == 1):
        return 0.0
    return _unit(string, _decimals(string)) or 1.0


def _name(before: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The name that stands before a tensor, on its line or the nearest one above."""
    lines = before.split("\n")
    words = lines.pop().strip(" \t([{")
    if not words:
        words = next((line.strip() for line in lines[:-4:-1] if line.strip()), "")
        if not words.endswith((":", "=")) and len(words.split()) > 2:
            return "", ()
    words = words.rstrip(" \t:=([{")
    told = re.search(r"\(([^()]*=[^()]*)\)$", words)
    settings: tuple[tuple[str, str], ...] = ()
    if told:
        words = words[: told.start()].rstrip()
        settings = tuple(re.findall(r"(\w+)\s*=\s*([\w.+-]+)", told[1]))
    words = re.split(r"[:!?;,|>]\s+|\.\s+", words)[-1].strip(" \t'\"`*([{,")
    if not re.search("[A-Za-z]", words):
        return "", settings
    parts = words.split()
    return (words if len(parts) <= 4 else parts[-1]), settings


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Printed sizes, with the name before each, "" where there is none."""
    found = []
    for match in SIZE.finditer(text):
        digits = match["torch"] or match["numpy"] or ""
        name = (match["name"] or "").removesuffix(".shape").removesuffix(".size")
        found.append((name, tuple(int(size) for size in re.findall(r"\d+", digits))))
    return found


def _with_sizes(text: str, read: Iterable[tuple[Printed, int]]) -> tuple[Printed, ...]:
    """Elided axes get their length where the log prints the size of that name."""
    told = {name: shape for name, shape in _shapes(text) if name}
    whole = []
    for printed, _ in read:
        shape = told.get(printed.name, ())
        fits = len(shape) == len(printed.sizes) and all(
            size == known if known is not None else size >= shown
            for size, known, shown in zip(shape, printed.sizes, printed.values.shape, strict=True)
        )
        whole.append(replace(printed, sizes=shape) if fits and shape else printed)
    return tuple(whole)


# ---- pairs and fits ----


@dataclass(frozen=True)
class _Fit:
    """a = slope * b by least squares. error: one standard error of the slope. residual: relative;
    ``beyond``: the same less what the printed digits explain."""

    slope: float
    error: float
    residual: float
    beyond: float
    count: int

    @property
    def constant(self) -> bool:
        return self.count >= 4 and self.beyond <= CONSTANT


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two tensors of one quantity, cut to the entries that both print."""

    a: Printed
    b: Printed
    sides: tuple[str, str]
    kind: str
    quantity: tuple[str, ...]
    causal: bool | None = None

    @property
    def title(self) -> str:
        return f"{self.a.title} / {self.b.title}"

    @cached_property
    def finite(self) -> Flags:
        return np.asarray(np.isfinite(self.a.values) & np.isfinite(self.b.values))

    @cached_property
    def difference(self) -> Float64:
        return np.asarray(np.where(self.finite, np.abs(self.a.values - self.b.values), 0.0))

    @cached_property
    def digits(self) -> Float64:
        """How far two prints of one number may lie apart."""
        size = np.maximum(np.abs(self.a.values), np.abs(self.b.values))
        return np.asarray(0.5005 * (self.a.units + self.b.units) + 2.0**-23 * size)

    @cached_property
    def size(self) -> float:
        """The larger side's root mean square."""
        if not self.finite.any():
            return 0.0
        return max(_rms(side.values[self.finite]) for side in (self.a, self.b))

    @cached_property
    def noise(self) -> float:
        """What rounding on the way may do, relative to ``size``. Prints of float32 do not tell
        whether 16-bit tensors were cast for printing; corners may be the small part of a tensor."""
        dtypes = {self.a.dtype, self.b.dtype}
        if dtypes == {"float64"}:
            return 2.0**-20
        half = "float16" in dtypes and "bfloat16" not in dtypes
        return (2.0**-10 if half else 2.0**-8) * (1 if self.a.full else 2)

    def within(self, allowed: Float64 | float) -> Flags:
        """Entries that are equal but for ``allowed``, NaN and infinities among them."""
        same = np.isnan(self.a.values) & np.isnan(self.b.values)
        same |= self.a.values == self.b.values
        return np.asarray(same | (self.finite & (self.difference <= self.digits + allowed)))

    @cached_property
    def scale(self) -> Float64:
        """What an error of 1 means for each entry: its own size and that of the tensor."""
        entry = np.maximum(np.abs(self.a.values), np.abs(self.b.values))
        return np.asarray(self.size + np.where(self.finite, entry, 0.0))

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        spread = math.sqrt(max(0.0, _rms(self.difference) ** 2 - _rms(self.digits) ** 2))
        if self.kind in ("", "dS", "dQ", "dK"):  # dP - D goes in, and cancels where D is rounded
            alike = self.within(16 * self.noise * (self.scale.max(initial=0.0) - self.size))
            return bool(alike.all()) and spread <= 8 * self.noise * self.size
        alike = self.within(6 * self.noise * self.scale)
        return bool(alike.all()) and spread <= 4 * self.noise * self.size

    def fit(self, where: Flags | tuple[int, ...] = ()) -> _Fit | None:
        """None where one side is zero or little more than the last printed digit."""
        chosen = self.finite[where]
        a, b = self.a.values[where][chosen], self.b.values[where][chosen]
        return _fit(a, b, self.a.units[where][chosen], self.b.units[where][chosen])

    @cached_property
    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """Label and index of every printed row; none of a single number or a line of numbers."""
        axes = self.a.values.shape[:-1]
        if not axes:
            return []
        long = [axis for axis, size in enumerate(axes) if size > 1] or [len(axes) - 1]
        labels = []
        for index in product(*map(range, axes)):
            at = [str(self.a.places[axis][index[axis]]) for axis in long]
            labels.append((at[0] if len(at) == 1 else f"[{', '.join(at)}]", index))
        return labels


def _rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _fit(a: Float64, b: Float64, a_units: Float64, b_units: Float64) -> _Fit | None:
    if a.size < 2 or _rms(a) <= 2 * _rms(a_units) or _rms(b) <= 2 * _rms(b_units):
        return None
    squares = float(b @ b)
    slope = float(a @ b) / squares
    left = _rms(a - slope * b) ** 2
    digits = float(np.mean(a_units**2 + (slope * b_units) ** 2)) / 12
    error = math.sqrt(max(left, digits) * a.size / (a.size - 1) / squares)
    clear = (np.abs(a) > 20 * a_units) & (np.abs(b) > 20 * b_units)
    if clear.sum() >= 4:  # the more cautious of two estimates: entries are not independent
        ratios = a[clear] / b[clear]
        error = max(error, float(ratios.std(ddof=1)) / math.sqrt(ratios.size))
    size = _rms(a)
    beyond = math.sqrt(max(0.0, left - digits)) / size
    return _Fit(slope, error, math.sqrt(left) / size, beyond, a.size)


def _side(printed: Printed) -> str:
    return "_".join(word for word in printed.words if word in SIDE_WORDS)


def _paired(found: Sequence[Printed], names: tuple[str, str] | None) -> list[_Pair]:
    """Pairs by name: one quantity, two sides; by order where a name is printed more than once."""
    if names is not None:
        labelled = list(_by_given_names(found, names))
    else:
        labelled = [
            (p, _side(p), tuple(word for word in p.words if word not in SIDE_WORDS))
            for p in found
            if p.name
        ]
    pairs = []
    for quantity in dict.fromkeys(quantity for _, _, quantity in labelled):
        members = [(p, side) for p, side, other in labelled if other == quantity]
        found_sides = list(dict.fromkeys(side for _, side in members))
        sides = [side for side in names or found_sides if side in found_sides]
        for other in sides[1:]:
            first = [p for p, side in members if side == sides[0]]
            pairs += _matched(first, [p for p, side in members if side == other], quantity)
    if names is None:
        used = {id(p) for pair in pairs for p in pair[:2]}
        pairs += _one_word_apart([p for p in found if p.name and id(p) not in used])
    if not pairs and len(found) == 2 and len({p.kind for p in found} - {""}) < 2:
        pairs += _matched([found[0]], [found[1]], ())
    result = []
    for a, b, quantity in pairs:
        cut = _common(a, b)
        if cut is None:
            continue
        if names is not None:
            sides_of = names
        else:
            sides_of = (_side(a) or a.title, _side(b) or b.title)
        if sides_of[0] == sides_of[1]:
            sides_of = (a.title, b.title)
        kinds = {a.kind, b.kind} - {""}
        result.append(_Pair(*cut, sides_of, kinds.pop() if len(kinds) == 1 else "", quantity))
    return result


Labelled = tuple[Printed, str, tuple[str, ...]]
Match = tuple[Printed, Printed, tuple[str, ...]]


def _by_given_names(found: Sequence[Printed], names: tuple[str, str]) -> Iterator[Labelled]:
    for name in names:
        if not any(name in p.name for p in found):
            shown = ", ".join(sorted({p.name for p in found if p.name})) or "none"
            raise ValueError(f"no printed tensor has {name!r} in its name; there are: {shown}")
    longest_first = sorted(names, key=len, reverse=True)
    for p in found:
        for name in longest_first:
            if name in p.name:
                rest = replace(p, name=p.name.replace(name, " ", 1))
                yield p, name, rest.words
                break


def _matched(
    first: Sequence[Printed], second: Sequence[Printed], quantity: tuple[str, ...]
) -> list[Match]:
    """One to one, in order; equal settings first, then such that do not contradict."""
    pairs: list[Match] = []
    used: set[int] = set()
    for strict in (True, False):
        for a in first:
            if id(a) in used:
                continue
            for b in second:
                settings = dict(b.settings)
                equal = a.settings == b.settings if strict else True
                equal &= all(settings.get(key, value) == value for key, value in a.settings)
                if equal and id(b) not in used and _common(a, b) is not None:
                    used |= {id(a), id(b)}
                    pairs.append((a, b, quantity))
                    break
    return sorted(pairs, key=lambda pair: pair[0].start)


def _one_word_apart(found: Sequence[Printed]) -> list[Match]:
    """Names of unknown sides: foo_grad and bar_grad, where neither word is a quantity."""
    pairs: list[Match] = []
    used: set[int] = set()
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if len(a.words) != len(b.words) or len(a.words) < 2 or {id(a), id(b)} & used:
                continue
            unlike = [pair for pair in zip(a.words, b.words, strict=True) if pair[0] != pair[1]]
            if len(unlike) != 1 or any(len(w) < 3 or w.isdigit() or w == "lse" for w in unlike[0]):
                continue
            if a.kind == b.kind and _common(a, b) is not None:
                used |= {id(a), id(b)}
                pairs.append((a, b, tuple(w for w in a.words if w not in unlike[0])))
    return pairs


def _common(a: Printed, b: Printed) -> tuple[Printed, Printed] | None:
    """Both cut to the entries that both print; None where the shapes differ."""
    a, b = _thin(a, b.values.ndim), _thin(b, a.values.ndim)
    if a.values.ndim != b.values.ndim or not (a.floating and b.floating):
        return None
    cuts_a, cuts_b, sizes = [], [], []
    for axis, (size_a, size_b) in enumerate(zip(a.sizes, b.sizes, strict=True)):
        if size_a is not None and size_b is not None and size_a != size_b:
            return None
        size = size_a if size_a is not None else size_b
        if size is not None and max(a.values.shape[axis], b.values.shape[axis]) > size:
            return None
        at_a, at_b = (_absolute(p.places[axis], size) for p in (a, b))
        _, cut_a, cut_b = np.intersect1d(at_a, at_b, return_indices=True)
        order = np.argsort(cut_a)
        cuts_a.append(cut_a[order])
        cuts_b.append(cut_b[order])
        sizes.append(size)
    if any(not cut.size for cut in cuts_a):
        return None
    return _cut(a, cuts_a, tuple(sizes)), _cut(b, cuts_b, tuple(sizes))


def _absolute(places: Integers, size: int | None) -> Integers:
    return places if size is None else np.where(places < 0, places + size, places)


def _cut(printed: Printed, cuts: Sequence[Integers], sizes: tuple[int | None, ...]) -> Printed:
    grid = np.ix_(*cuts) if cuts else ()
    places = tuple(
        _absolute(at[cut], size) for at, cut, size in zip(printed.places, cuts, sizes, strict=True)
    )
    values, units = np.asarray(printed.values[grid]), np.asarray(printed.units[grid])
    return replace(printed, values=values, units=units, places=places, sizes=sizes)


def _thin(printed: Printed, dimensions: int) -> Printed:
    """Without leading axes of length 1, as far as the other side has none."""
    while printed.values.ndim > dimensions and printed.sizes[0] == 1:
        values, units = printed.values[0], printed.units[0]
        printed = replace(
            printed, values=values, units=units, places=printed.places[1:], sizes=printed.sizes[1:]
        )
    return printed


# ---- one side alone ----


@dataclass(frozen=True, eq=False)
class _Rows:
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
            f"rows of {title} must sum to 0 and sum to {_listed(self.sums.ravel())} (rounding "
            f"excuses {self.allowed.max():.1g})",
            f"{title}: each row up to the diagonal does sum to 0 (off by {_small(left.max())} at "
            f"most, by {_small(left[:, 0].max())} in the first row, which sees one key): D is that "
            "of the masked output, P that of all keys",
        )

    @property
    def where(self) -> str:
        wrong = np.unique(np.nonzero(np.abs(self.sums) > self.allowed)[1])
        return f"{self.printed.title}, rows {_few([str(row) for row in wrong])}"


def _rows(printed: Printed) -> _Rows | None:
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
    return _Rows(
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


@dataclass(frozen=True)
class _Log:
    """What holds for the whole log. rows: of printed dS, by ``start``. causal: None where the log
    does not say, or says both."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: frozenset[str]
    rows: dict[int, _Rows]
    causal: bool | None

    @property
    def first_row_zero(self) -> bool:
        """Whether a dS proves that the first query sees one key."""
        return any(rows.masked and rows.sound for rows in self.rows.values())

    @property
    def fits(self) -> bool:
        """Whether the lengths add up to a size that the log prints, as far as it prints any."""
        return not self.shapes or any(sum(self.lengths) in shape for shape in self.shapes)


def _checks(
    printed: Sequence[Printed], pairs: Sequence[_Pair], log: _Log, sides: dict[int, str]
) -> Iterator[Check]:
    """Identities of each side alone, as far as whole rows are printed."""
    for p in printed:
        side = sides[id(p)]
        if p.kind == "P" and p.full and p.values.ndim > 1 and not PART_WORDS & set(p.words):
            yield from _check_probabilities(p, side)
        if (rows := log.rows.get(p.start)) is None:
            continue
        over = np.abs(rows.sums) - rows.allowed
        at = np.unravel_index(int(over.argmax()), over.shape)
        verdict = ("pass" if rows.sound else "FAIL") if p.values.any() else "vacuous"
        where = f"{p.title}, row {at[1]}"
        value, allowed = abs(float(rows.sums[at])), float(rows.allowed[at])
        yield Check(side, "I2", "rows of dS sum to 0", value, allowed, verdict, where)
        square = p.values.shape[-1] == p.values.shape[-2]
        if square and dict(p.settings).get("causal", str(log.causal)) == "True":
            beyond = np.where(_visible(*p.values.shape[-2:]), 0.0, np.abs(p.values)).max()
            verdict = "FAIL" if beyond > p.units.max() else "pass"
            text = "dS is 0 above the diagonal"
            yield Check(side, "mask", text, float(beyond), float(p.units.max()), verdict, p.title)
    for pair in pairs:
        for side, p in zip(pair.sides, (pair.a, pair.b), strict=True):
            first = _first_row(p) if pair.kind == "dQ" and log.first_row_zero else None
            if first is not None:
                value = float(np.abs(first).max())
                allowed = float(p.units.max() + 2.0**-7 * np.abs(p.values).max())
                verdict = "pass" if value <= allowed else "FAIL"
                text = "dQ of the first causal row is 0"
                yield Check(side, "I3", text, value, allowed, verdict, p.title)


def _check_probabilities(p: Printed, side: str) -> Iterator[Check]:
    if not ((p.values >= 0) & (p.values <= 1.01)).all():
        return  # named like probabilities, and something else
    off = np.where(p.values.any(axis=-1), np.abs(p.values.sum(axis=-1) - 1), 0.0)
    allowed = 0.505 * p.units.sum(axis=-1) + 2.0**-7
    at = np.unravel_index(int((off - allowed).argmax()), off.shape)
    verdict = ("pass" if off[at] <= allowed[at] else "FAIL") if p.values.any() else "vacuous"
    where = f"{p.title}, row {int(at[-1])}"
    value, limit = float(off[at]), float(allowed[at])
    yield Check(side, "I1", "rows of P sum to 1", value, limit, verdict, where)


def _first_row(p: Printed) -> Float64 | None:
    """The first row of each printed sequence or head; None where it is not printed."""
    if p.values.ndim < 2 or p.places[-2][0] != 0:
        return None
    rows = p.values[..., 0, :]
    packed = p.kind == "dQ" and p.values.ndim == 3 and rows.any()
    return np.asarray(p.values[0] if packed else rows)


# ---- what can be said ----


def explain_log(
    text: str,
    *,
    lengths: tuple[int, ...] | None = None,
    names: tuple[str, str] | None = None,
) -> Diagnosis:
    """What the tensors and errors that ``text`` prints prove.

    lengths: of the sequences, where they are known. names: two words, each in the names of one
    side's tensors; found without them where the log uses common ones. Raises ValueError where
    there is nothing to read, or what there is cannot be read.
    """
    text = _clean(text)
    read = _read(text)
    printed, figures = _with_sizes(text, read), _figures(text, read)
    if not printed and not figures:
        raise ValueError(
            "the log prints no tensor and no labelled number; expected such as "
            "'dq_reference: tensor([[...]])' or 'max abs err: 1.2e-3'"
        )
    if names is not None and len(set(names)) != 2:
        raise ValueError(f"names must be two different words, were {names}")
    pairs = _paired(printed, names)
    log = _what_holds(text, printed, _lengths(lengths, printed, figures))
    pairs = [replace(pair, causal=_causal_of(pair, log)) for pair in pairs]
    sides = {id(p): _side(p) or p.title for p in printed}
    if names is not None:
        sides |= {id(p): name for p, name, _ in _by_given_names(printed, names)}
    checks = tuple(_checks(printed, pairs, log, sides))
    findings, facts = _judged(pairs, log)
    findings += _unpaired(printed, pairs, log, sides)
    compared = any(pair.agrees and pair.size > 0 for pair in pairs)
    for finding, fact in _vacuous(figures, log, compared):
        findings += [finding] if finding else []
        facts += [fact] if fact else []
    findings = _merged(findings)
    blamed = {side for f in findings for side in f.side.split(" or ")}
    findings += [_failed(c) for c in checks if c.verdict == "FAIL" and c.side not in blamed]
    if not findings and not pairs and all(check.verdict != "pass" for check in checks):
        findings += _nothing(printed, figures, facts)
    alone = [p.title for p in printed if p.start not in _compared(pairs)]
    counts = f"{len(printed)} printed tensors, {len(figures)} numbers; {len(pairs)} pairs compared"
    facts = [counts, *facts]
    if alone:
        facts.append("without a partner to compare with: " + ", ".join(dict.fromkeys(alone)))
    if log.lengths:
        fits = "" if log.fits else "; they do not add up to any size in the log"
        size = f"{sum(log.lengths)} tokens, the longest {max(log.lengths)}"
        facts.append(f"{len(log.lengths)} sequences, {size}{fits}")
    levels = tuple(level for pair in pairs for level in _levels(pair))
    return Diagnosis("what the log proves", tuple(findings), checks, levels, facts=tuple(facts))


def _compared(pairs: Iterable[_Pair]) -> set[int]:
    return {p.start for pair in pairs for p in (pair.a, pair.b)}


def _lengths(
    given: tuple[int, ...] | None, printed: Sequence[Printed], figures: Sequence[Number]
) -> tuple[int, ...]:
    """The caller's, or those that the log prints; () where neither."""
    if given is not None:
        if not given or any(n < 0 for n in given) or max(given) == 0:
            raise ValueError(f"lengths must be counts of tokens, not all of them 0; were {given}")
        return tuple(int(n) for n in given)
    found: list[float] = []
    for p in printed:
        if {"cu", "seqlens"} <= set(p.words) and p.values.ndim == 1 and p.full:
            found = found or list(np.diff(p.values))
    told = [f for f in figures if f.part and re.search(r"len(gth)?s\b", f.label, re.IGNORECASE)]
    found = found or [f.value for f in told if f.line == told[0].line]
    whole = all(n >= 0 and n == int(n) for n in found) and any(found)
    return tuple(int(n) for n in found) if whole else ()


def _what_holds(text: str, printed: Sequence[Printed], lengths: tuple[int, ...]) -> _Log:
    rows = {p.start: rows for p in printed if (rows := _rows(p)) is not None}
    said = {word.lower() for word in re.findall(r"causal\s*[=:]\s*(True|False)", text, re.I)}
    log = _Log(
        lengths,
        tuple(shape for _, shape in _shapes(text)),
        frozenset(DTYPE_WORDS[word] for word in re.findall(r"\w+", text) if word in DTYPE_WORDS),
        rows,
        said == {"true"} if len(said) == 1 else None,
    )
    return replace(log, causal=True) if log.first_row_zero else log


def _causal_of(pair: _Pair, log: _Log) -> bool | None:
    told = {value for p in (pair.a, pair.b) for key, value in p.settings if key == "causal"}
    return told == {"True"} if told else log.causal


def _levels(pair: _Pair) -> Iterator[Level]:
    """Slopes of the first side over the second, of all and of every printed row."""
    parts: list[tuple[str, str, tuple[int, ...]]] = [("all", "printed entries", ())]
    if len(pair.rows) <= 64:
        parts += [("row", label, index) for label, index in pair.rows]
    for level, key, index in parts:
        fit = pair.fit(index)
        slope, residual = (fit.slope, fit.residual) if fit else (math.nan, math.nan)
        error = float(pair.difference[index].max(initial=0.0))
        yield Level(pair.title, level, key, slope, residual, error)


def _judged(pairs: Sequence[_Pair], log: _Log) -> tuple[list[Finding], list[str]]:
    facts = []
    sequences = _by_sequence(pairs, log)
    findings = [sequences] if sequences else []
    empty = [pair for pair in pairs if not pair.a.values.any() and not pair.b.values.any()]
    for pair in pairs:
        size = f"{pair.a.values.size} entries are printed on both sides"
        if pair in empty:
            facts.append(f"{pair.title}: {size}, and all of them are 0: nothing is compared")
        elif pair.agrees:
            facts.append(_agreement(pair, size))
        elif not (sequences and pair.kind in SHRUNK):
            findings.append(_differs(pair, log))
    if empty and len(empty) == len(pairs):
        where = ", ".join(pair.title for pair in pairs)
        exact = all(pair.a.full and not pair.digits.any() for pair in pairs)
        evidence = ("every printed entry of both sides is 0",)
        findings.append(_finding("both", "vacuous", where, "high" if exact else "medium", evidence))
    return findings, facts


def _unpaired(
    printed: Sequence[Printed], pairs: Sequence[_Pair], log: _Log, sides: dict[int, str]
) -> Iterator[Finding]:
    """A dS on its own proves what needs no other side."""
    for p in printed:
        rows = log.rows.get(p.start)
        if rows is not None and rows.masked_delta and p.start not in _compared(pairs):
            bug = "mask-missing-in-backward"
            yield _finding(sides[id(p)], bug, rows.where, "proved", rows.evidence)


def _agreement(pair: _Pair, size: str) -> str:
    if (pair.difference <= pair.digits).all():
        return f"{pair.title}: {size}, and agree in every printed digit"
    off = float(pair.difference.max()) / pair.size
    words = f"{pair.title}: {size}, and differ by at most {off:.1%} of their size"
    if pair.a.dtype in SIXTEEN_BIT or pair.b.dtype in SIXTEEN_BIT:
        return f"{words}, as rounding to 16 bits does"
    return f"{words}: more than sums in float32 do, no more than rounding to 16 bits on the way"


def _finding(
    side: str,
    bug: str,
    where: str,
    confidence: str,
    evidence: Iterable[str],
    alternatives: tuple[str, ...] = (),
    *,
    title: str = "",
    look_at: str = "",
) -> Finding:
    known = CLASSES[bug]
    title, look_at = title or known.title, look_at or known.look_at
    return Finding(side, bug, title, where, confidence, tuple(evidence), look_at, alternatives)


def _differs(pair: _Pair, log: _Log) -> Finding:
    """The first that applies; the order is from proofs to descriptions."""
    fit = pair.fit()
    found = _not_finite(pair) or _unmasked(pair, log) or _wrong_delta(pair, log)
    if found is None and fit and fit.constant and abs(fit.slope - 1) > CONSTANT:
        found = _constant(pair, fit, log)
    return found or _transposed(pair) or _row_factors(pair) or _structure(pair, fit, log)


def _not_finite(pair: _Pair) -> Finding | None:
    broken = [~np.isfinite(p.values) for p in (pair.a, pair.b)]
    if (broken[0] == broken[1]).all():
        return None
    worse = int(broken[1].sum() > broken[0].sum())
    title = (pair.a, pair.b)[worse].title
    rows = [label for label, index in pair.rows if broken[worse][index].any()]
    where = f"{title}, rows {_few(rows)}" if rows else title
    count = f"{broken[worse].sum()} printed entries of {title} are NaN or infinite"
    return _finding(
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


# ---- dS ----


def _unmasked(pair: _Pair, log: _Log) -> Finding | None:
    """One side masks dS (or P), the other one does not."""
    inside = _visible_places(pair)
    if pair.kind not in ("dS", "P") or pair.causal is False or inside is None:
        return None
    outside = [float(np.abs(p.values[~inside]).max(initial=0.0)) for p in (pair.a, pair.b)]
    bad = int(outside[1] > outside[0])
    p, other = (pair.b, pair.a) if bad else (pair.a, pair.b)
    if outside[1 - bad] > 2 * other.units.max() or outside[bad] <= 2 * p.units.max():
        return None
    side, own, right = pair.sides[bad], log.rows.get(p.start), log.rows.get(other.start)
    shares, about_shares = _shares(pair, inside, bad)
    evidence = [
        f"{p.title} above the diagonal: up to {outside[bad]:.3g}, where masked keys must give 0; "
        f"{other.title}: 0",
        *about_shares,
    ]
    bug = "mask-missing-in-backward"
    if own is not None and own.masked_delta:
        evidence = [*own.evidence, *evidence]
        evidence += _right_side(right) if right is not None and right.sound else []
        return _finding(side, bug, own.where, "proved", evidence)
    if own is not None and not own.sound:
        return _finding(side, bug, own.where, "medium", (own.evidence[0], *evidence))
    if own is None and pair.kind == "dS" and shares:
        evidence.append("rows are elided: their sums cannot be taken")
        return _finding(side, bug, p.title, "high", evidence, ("causal-dropped",))
    if own is not None:
        evidence.append(f"rows of {p.title} sum to 0 over all keys: its P and D agree")
    at = np.nonzero(~inside.reshape(-1, *inside.shape[-2:])[0])
    shown = np.abs(p.values).reshape(-1, *p.values.shape[-2:])[:, at[0], at[1]].max(axis=0) > 0
    next_to = at[1] - at[0] == (at[1] - at[0]).min()
    look_at = "which of the two is meant: one side masks where the other one does not"
    if np.array_equal(shown, next_to) and not next_to.all():
        evidence.append("beyond the diagonal only the next key has weight")
        return _finding(side, "causal-off-by-one", p.title, "medium", evidence, look_at=look_at)
    if shown.mean() > 0.9:
        same = ("causal-off-by-one",) if next_to.all() else ()
        return _finding(side, "causal-dropped", p.title, "medium", evidence, same, look_at=look_at)
    evidence.append(f"{shown.sum()} of {shown.size} places above the diagonal are not 0")
    return _finding(
        side,
        "unknown",
        p.title,
        "medium",
        evidence,
        ("causal-dropped", "causal-off-by-one", "neighbour-leak"),
        title="keys are seen that the other side masks",
        look_at=look_at,
    )


def _visible_places(pair: _Pair) -> Flags | None:
    """Which printed entries a causal mask allows; matrices elided alike are taken as square."""
    if pair.a.values.ndim < 2:
        return None
    rows, columns = pair.a.places[-2:]
    size_rows, size_columns = pair.a.sizes[-2:]
    if size_rows is not None and size_columns is not None:
        shown = columns <= rows[:, None] + size_columns - size_rows
    elif size_rows is None and size_columns is None and np.array_equal(rows, columns):
        order = np.arange(rows.size)
        shown = order <= order[:, None]
    else:
        return None
    return np.asarray(np.broadcast_to(shown, pair.a.values.shape))


def _shares(pair: _Pair, inside: Flags, bad: int) -> tuple[bool, list[str]]:
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
    words = f"{names} on the visible entries is constant in each row: {_listed(ratios, 3)}"
    if all(abs(ratio - 1) <= CONSTANT for ratio in ratios):
        return True, [f"{words}: P = exp(S - lse) with the masked lse, but without the mask"]
    if max(ratios) <= 1 + CONSTANT and abs(ratios[-1] - 1) <= CONSTANT:
        return True, [
            f"{words}: the share of an unmasked softmax that falls on visible keys; the last row "
            "sees every key, so it agrees"
        ]
    return False, [words]


def _right_side(rows: _Rows) -> Iterator[str]:
    title = rows.printed.title
    yield f"{title} is right: its rows sum to {_listed(rows.sums.ravel())}, and it is masked"
    first = _first_row(rows.printed)
    if rows.masked and first is not None and not first.any():
        yield (
            f"the zero first row of {title} is right: with one visible key P is 1 whatever the "
            "score, so dS of that row is 0, and dQ with it"
        )


def _wrong_delta(pair: _Pair, log: _Log) -> Finding | None:
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
        return _finding(side, "delta-omitted", title, "medium", evidence, other)
    return _finding(
        side,
        "unknown",
        title,
        "medium",
        evidence,
        ("softmax-backward-without-p", "delta-of-another-out", "mask-missing-in-backward"),
        title="dS is not the gradient of any softmax: its rows do not sum to 0",
        look_at="P and D = dout . out: they must be of one softmax; print both for one row",
    )


# ---- constant slopes ----


def _constant(pair: _Pair, fit: _Fit, log: _Log) -> Finding:
    larger = int(abs(fit.slope) < 1)  # the side with the larger values
    ratio = 1 / fit.slope if larger else fit.slope
    error = fit.error * ratio**2 if larger else fit.error
    measured = (
        f"{pair.title} = {fit.slope:.4g} +- {fit.error:.1g} on the {fit.count} entries that both "
        f"print (residual {fit.residual:.1%}), so a constant"
    )

    def near(value: float) -> bool:
        return abs(ratio - value) <= max(CERTAIN * error, 1e-3 * value)

    if pair.kind == "lse" and near(LOG2_E):
        evidence = [measured, f"log2(e) = {LOG2_E:.4f}"]
        return _finding(pair.sides[larger], "lse-base-2", pair.title, "high", evidence)
    head_dim = (pair.a.sizes[-1] if pair.a.sizes else None) or 1
    if pair.kind in ("dQ", "dK") and head_dim > 1 and near(math.sqrt(head_dim)):
        words = f"sqrt(head_dim) = sqrt({head_dim}): {pair.sides[larger]} lacks softmax_scale there"
        evidence = [measured, f"{words}, or {pair.sides[1 - larger]} applies it twice"]
        return _finding(pair.sides[larger], "output-scale", pair.title, "medium", evidence)
    shrunk = pair.causal is not True and ratio > 1 and pair.kind in SHRUNK
    padded = _padded(pair, pair.sides[1 - larger], ratio, error, log) if shrunk else None
    if padded is not None:
        return replace(padded, evidence=(measured, *padded.evidence))
    return _finding(
        " or ".join(pair.sides),
        "unknown",
        pair.title,
        "medium",
        (measured, *(_padding_in_sizes(ratio, log) if shrunk else ())),
        ("padded-keys", "padded-grad-out") if shrunk else (),
        title=f"the two sides differ by a constant factor of {ratio:.4g}",
        look_at="the same ratio for a sequence of another length decides: padding in the softmax "
        "gives r(n) = 1 + (longest - n) / (n m), so 1 for the longest sequence; a forgotten factor "
        "gives one number everywhere. Or say how long the sequences are"
        if shrunk
        else "where the result is scaled: softmax_scale, a mean in place of a sum, a head count",
    )


def _shrinkage(n: int, longest: int, m: float) -> float:
    """What ``longest - n`` zero keys divide the weights by; m: the mean of exp(score) of the n."""
    return 1 + (longest - n) / (n * m)


def _curve(lengths: Iterable[int], m: float) -> str:
    sizes = [n for n in dict.fromkeys(lengths) if n]
    curve = ", ".join(f"{n}: {_shrinkage(n, max(sizes), m):.2f}" for n in sizes)
    return f"the ratio predicted by the length of a sequence: {curve}"


def _padded(pair: _Pair, side: str, ratio: float, error: float, log: _Log) -> Finding | None:
    """Zero keys up to the longest sequence in the denominator, of which sequence?"""
    longest = max(log.lengths, default=0)
    rows = {size for size in pair.a.sizes[:-1] if size in log.lengths}
    tried = sorted({n for n in log.lengths if 0 < n < longest and (not rows or n in rows)})
    expected = {n: _shrinkage(n, longest, UNIT_SCORES) for n in tried}
    implied = {n: (longest - n) / (n * (ratio - 1)) for n in tried}
    hits = [n for n in tried if abs(expected[n] - ratio) <= CERTAIN * error]
    possible = hits if len(hits) == 1 else [n for n in tried if 0.98 <= implied[n] <= 1.7]
    if not possible:
        return None
    n, plain = possible[0], float(max(round(ratio), 2))
    gap, rest = abs(ratio - plain) / error, abs(ratio - longest / n) / error
    alternatives = ("padded-grad-out",) if rest <= CERTAIN else ()
    only = len(possible) == 1
    sure = bool(hits) and log.fits and min(gap, rest) > CERTAIN
    index = [str(i) for i, length in enumerate(log.lengths) if length == n]
    which = f"the sequence of {n} tokens (index {_few(index)})" if only else "one of the sequences"
    evidence = [
        f"zero keys up to the longest sequence ({longest}) add a weight of e^0 = 1 each to the "
        f"denominator: r(n) = 1 + ({longest} - n) / (n m), m the mean of exp(score)",
        f"r({n}) = {expected[n]:.4g} with m = exp(1/18) = {UNIT_SCORES:.4g}, of scores of variance "
        f"1/9: {abs(expected[n] - ratio) / error:.1f} standard errors from the measured "
        f"{ratio:.4g}, which asks for m = {implied[n]:.4g}",
        f"{plain:.0f}, such as a count of heads or sequences, lies {gap:.1f} standard errors away; "
        f"{longest}/{n} = {longest / n:.4g}, as of a cotangent on rows of padding, {rest:.0f}",
        _curve(log.lengths, UNIT_SCORES if hits else implied[n]),
        f"{side} has the smaller values: it is the side that attends to padding",
    ]
    if not only:
        fitting = ", ".join(map(str, possible))
        evidence.append(f"sequences of {fitting} tokens would all fit, with an m from 1 to 1.7")
    confidence = ("high" if sure else "medium") if only else "low"
    where = f"{pair.title}, {which}"
    return _finding(side, "padded-keys", where, confidence, evidence, alternatives)


def _by_sequence(pairs: Sequence[_Pair], log: _Log) -> Finding | None:
    """Pairs that are numbered by sequence, one ratio each: one m must explain them all."""
    slopes: dict[int, float] = {}
    numbered = []
    for pair in pairs:
        digits = [int(word) for word in pair.quantity if word.isdigit()]
        fit = pair.fit()
        if digits and digits[-1] < len(log.lengths) and fit and fit.constant and not pair.causal:
            slopes[digits[-1]] = fit.slope
            numbered.append(pair)
    if len(slopes) < len(numbered) or len(slopes) < 3:
        return None
    larger = int(np.mean(list(slopes.values())) < 1)
    ratios = [(log.lengths[i], 1 / s if larger else s) for i, s in slopes.items()]
    longest = max(log.lengths)
    means = [(longest - n) / (n * (r - 1)) for n, r in ratios if 0 < n < longest and r > 1]
    m = float(np.median(means)) if means else math.nan
    fits = all(n and abs(_shrinkage(n, longest, m) / r - 1) <= 2 * CONSTANT for n, r in ratios)
    if len({n for n, _ in ratios}) < 3 or not 0.98 <= m <= 1.7 or not fits:
        return None
    side = numbered[0].sides[1 - larger]
    measured = ", ".join(f"{n}: {r:.3f}" for n, r in ratios)
    evidence = (
        f"one ratio for each sequence, by the number of its tokens: {measured}",
        f"r(n) = 1 + ({longest} - n) / (n m) gives all of them with m = {m:.3f}: zero keys up to "
        "the longest sequence add a weight of e^0 = 1 each to the denominator",
        _curve(log.lengths, m),
        f"{side} has the smaller values: it is the side that attends to padding",
    )
    where = f"{numbered[0].title} and on: all but the longest sequence"
    return _finding(side, "padded-keys", where, "high", evidence)


def _padding_in_sizes(ratio: float, log: _Log) -> Iterator[str]:
    """What printed sizes say where the lengths are not known: is there padding, and for which n."""
    packed = [shape for shape in log.shapes if len(shape) == 3]
    padded = [shape for shape in log.shapes if len(shape) == 4]
    for (total, *_), (batch, one, two, _) in product(packed, padded):
        longest = max(one, two)
        if batch * longest > total > longest and not log.lengths:
            n = longest / (1 + UNIT_SCORES * (ratio - 1))
            yield (
                f"{batch} sequences padded to {longest} hold {total} tokens, so there is padding; "
                f"a sequence of about {n:.0f} would show this ratio (with m = exp(1/18))"
            )
            return


# ---- other relations ----


def _transposed(pair: _Pair) -> Finding | None:
    a, b, places = pair.a.values, pair.b.values, pair.a.places
    slack = float(pair.digits.max()) + 8 * pair.noise * pair.size
    for one, other in [(-1, -2), (-2, -3)][: max(0, a.ndim - 1)]:
        turned = np.swapaxes(b, one, other)
        alike = a.shape == turned.shape and np.array_equal(places[one], places[other])
        if alike and a.shape[one] > 1 and (np.abs(a - turned) <= slack).all():
            evidence = (f"{pair.title}: equal once axes {one} and {other} are exchanged",)
            side = " or ".join(pair.sides)
            return _finding(side, "transposed", pair.title, "medium", evidence)
    return None


def _row_factors(pair: _Pair) -> Finding | None:
    """Every row has its own factor: the denominators of the softmax differ."""
    fits = [(label, fit) for label, index in pair.rows if (fit := pair.fit(index)) is not None]
    slopes = np.array([fit.slope for _, fit in fits])
    if len(fits) < 3 or not all(fit.constant for _, fit in fits) or (slopes <= 0).any():
        return None
    if np.abs(slopes - 1).max() <= 2 * CONSTANT:
        return None
    evidence = [
        f"{pair.title} is constant within each row: "
        + _few([f"{label}: {fit.slope:.3f}" for label, fit in fits])
    ]
    side = " or ".join(pair.sides)
    if (slopes > 1 - CONSTANT).all() or (slopes < 1 + CONSTANT).all():
        side = pair.sides[int(slopes.mean() > 1)]
        evidence.append(f"{side} has the smaller values in every row that differs")
    return _finding(
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


def _structure(pair: _Pair, fit: _Fit | None, log: _Log) -> Finding:
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
        evidence.append(f"rows that agree: {_few(equal)}; that do not: {_few(unlike)}")
    elif fit is not None:
        evidence.append(f"no constant factor: a slope of {fit.slope:.3g} leaves {fit.residual:.0%}")
    firsts = [_first_row(p) for p in (pair.a, pair.b)]
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
    return _finding(
        side,
        "unknown",
        f"{pair.title}, rows {_few(unlike)}" if unlike else pair.title,
        "low",
        evidence,
        alternatives,
        title="the two sides differ, in no way that these entries explain",
        look_at="print more: whole rows of a small case, dS and P beside the gradients, or save "
        "the arrays and compare those",
    )


# ---- printed errors ----


def _vacuous(
    figures: Sequence[Number], log: _Log, compared: bool
) -> Iterator[tuple[Finding | None, str]]:
    """Errors of exactly 0 between two implementations: what two zeros would give.

    compared: whether tensors in the log show that values are not 0.
    """
    for context in dict.fromkeys(f.context for f in figures):
        block = [f for f in figures if f.context == context]
        errors = [f for f in block if f.error and not REPEATED.search(f"{context} {f.label}")]
        lines = dict.fromkeys((f.line, f.label) for f in errors if f.value or f.unit)
        zero = [f for f in errors if (f.line, f.label) not in lines]
        rest = [f for f in errors if f.value or f.unit]
        if not zero:
            continue
        named = ", ".join(dict.fromkeys(f.label for f in zero))
        tiny = [f for f in rest if log.dtypes <= {"float16"} and _halves(f.value)]
        stated = any(SIZES.search(f.label) and f.value for f in block if not f.error)
        if stated or compared or len(tiny) < len(rest):
            yield None, f"exactly 0: {named}; the rest of the log shows that values are not 0"
            continue
        sixteen = bool(log.dtypes) and log.dtypes <= set(SIXTEEN_BIT)
        sure = sixteen and len({(f.line, f.label) for f in zero} | {*lines}) > 1
        against = re.search(r"(\S+)\s+(?:vs\.?|versus|against)\s+(\S+)", context)
        two = f"{against[1]} and {against[2]}" if against else "two implementations"
        yield (
            _finding(
                "both",
                "vacuous",
                f"{context or 'printed errors'}: {named}",
                "high" if sure else "medium",
                [
                    f"{named}: exactly 0 between {two}{' in 16 bits' if sixteen else ''}. Sums in "
                    "another order differ in the last bit somewhere, unless all results are 0, or "
                    "one code ran twice: either way nothing is compared",
                    *(_subnormal(tiny) if tiny else ()),
                    "the log prints errors without the size of what was compared",
                ],
                look_at="print max |reference| beside every error; make values of unit size, by a "
                "random cotangent and a sum in place of a mean, or take float32; then multiply one "
                "side by 0 and see that the comparison fails",
            ),
            "",
        )


def _halves(value: float) -> int:
    """k where value is k * 2**-24, and below float16's normal numbers; 0 where it is not."""
    count = value / SMALLEST_HALF
    return round(count) if count <= 1024 and abs(count - round(count)) < 1e-3 else 0


def _subnormal(tiny: Sequence[Number]) -> Iterator[str]:
    worst = max(f.value for f in tiny)
    step = 2.0 ** (math.floor(math.log2(worst)) + 1)
    shown = dict.fromkeys(f"{f.value:.3g} = {_halves(f.value)} * 2**-24" for f in tiny)
    yield (
        f"{tiny[0].label}: {', '.join(shown)}; 2**-24 is the smallest float16 above 0, so the "
        "differences are a few of the smallest steps there are"
    )
    yield (
        f"float16 numbers from {1024 * step:.1e} on have steps of {step:.1e}, more than the "
        "largest difference: the values that differ are smaller, at the edge of float16's range, "
        "and what is below 2**-25, such as products of two of them, becomes 0"
    )


# ---- together ----


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for a side and bug; what is unknown joins the proof that explains its side."""
    known: dict[tuple[str, str], Finding] = {}
    for finding in (f for f in findings if f.bug != "unknown"):
        before = known.setdefault((finding.side, finding.bug), finding)
        if before is not finding:
            known[finding.side, finding.bug] = replace(
                before,
                evidence=tuple(dict.fromkeys(before.evidence + finding.evidence)),
                where="; ".join(dict.fromkeys((before.where, finding.where))),
                confidence=min(before.confidence, finding.confidence, key=RANKS.index),
            )
    unknown = [f for f in findings if f.bug == "unknown"]
    result = []
    for finding in known.values():
        if finding.confidence == "proved":
            joined = [f for f in unknown if finding.side in f.side.split(" or ")]
            unknown = [f for f in unknown if f not in joined]
            more = tuple(line for f in joined for line in f.evidence)
            finding = replace(finding, evidence=finding.evidence + more)
        result.append(finding)
    return sorted([*result, *unknown], key=lambda finding: RANKS.index(finding.confidence))


def _failed(check: Check) -> Finding:
    """An identity fails on a side of which nothing else is known."""
    return _finding(
        check.side,
        "unknown",
        check.where,
        "medium",
        [f"{check.text} (rounding excuses {check.allowed:.1g}): off by {check.value:.3g}"],
        {
            "I1": ("padded-keys", "neighbour-leak", "not-normalised"),
            "I2": ("delta-omitted", "delta-of-another-out", "softmax-backward-without-p"),
        }.get(check.name, ("mask-missing-in-backward", "causal-dropped")),
        title=f"an identity fails: {check.text}",
        look_at="P, lse and D of one row: they must be of one softmax, with one mask",
    )


def _nothing(
    printed: Sequence[Printed], figures: Sequence[Number], facts: list[str]
) -> Iterator[Finding]:
    """No pair, no identity: errors alone say nothing without a size, unless they are small."""
    errors = [f for f in figures if f.error]
    large = [f for f in errors if not abs(f.value) <= 1e-2]
    if errors and not large:
        facts.append("the errors are small, but nothing says how large the values are")
        return
    evidence = [f"{f.label} {f.part}".strip() + f": {f.value:.3g}" for f in large]
    evidence = evidence or [f"{p.title}: printed once" for p in printed] or ["no error is printed"]
    yield _finding(
        "unknown",
        "unknown",
        "the whole log",
        "low",
        evidence[:8],
        title="nothing can be compared: no tensor is printed by both sides",
        look_at="print one tensor of both sides, with the side in its name (dq_reference, "
        "dq_candidate), or say which two words name the sides",
    )


def _listed(values: Iterable[float], digits: int = 4) -> str:
    return _few([f"{value:z.{digits}f}" for value in values])


def _small(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.1g}"


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")

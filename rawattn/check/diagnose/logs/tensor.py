"""One printed tensor and one printed figure: what they hold, and what their names tell."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FAR = 2**40  # how long an axis is that is elided, where nothing tells
KINDS = {
    **{f"d{letter}": f"d{letter.upper()}" for letter in "qkvosp"},
    **{letter: letter.upper() for letter in "qkvosp"},
    **dict.fromkeys(("lse", "logsumexp"), "lse"),
    **dict.fromkeys(("out", "output"), "O"),
    **dict.fromkeys(("score", "scores", "logits", "qk"), "S"),
    **dict.fromkeys(("prob", "probs", "probabilities", "softmax"), "P"),
}
OF_GRADIENTS = {"grad", "gradient", "d"}
PARTS = {"tile", "block", "partial", "chunk", "slice", "sub"}
SIXTEEN_BIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True, eq=False)
class Printed:
    """One printed tensor: what stands in the log, without the elided part.

    start: where it begins in the log. values: the printed entries; nan where nan was printed.
    units: the step of the last printed digit of each, 0 where the print is exact. places: the
    indices along each axis of the printed entries; counted from the back, so negative, where they
    stand behind "...". sizes: the length of each axis. dtype: "" where nothing tells.
    """

    name: str
    line: int
    start: int
    values: Float64
    units: Float64
    places: tuple[Integers, ...]
    sizes: tuple[int, ...]
    dtype: str = ""

    @property
    def title(self) -> str:
        return self.name or f"tensor of line {self.line}"

    @property
    def floating(self) -> bool:
        return not self.dtype.startswith(("int", "uint", "bool", "long"))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The name in lower-case words: dS_manual is ds, manual."""
        pattern = r"d[A-Z](?![a-z])|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
        return tuple(word.lower() for word in re.findall(pattern, self.name))

    @property
    def side(self) -> tuple[str, ...]:
        """The words of the name that say no quantity: whose it is."""
        told = KINDS.keys() | OF_GRADIENTS - {"d"}
        return tuple(word for word in self.words if word not in told and not word.isdigit())

    @property
    def kind(self) -> str:
        """dQ, dK, dV, dO, dS, dP, O, P, S or lse, as far as the name tells; "" else."""
        found = [KINDS[word] for word in self.words if word in KINDS]
        longer = [kind for kind in found if len(kind) > 1]
        if longer or len(set(found)) != 1:
            return longer[0] if longer else ""
        return f"d{found[0]}" if OF_GRADIENTS & set(self.words) else found[0]

    @property
    def full(self) -> bool:
        """Whether nothing is elided."""
        return self.values.size > 0 and self.sizes == self.values.shape

    @property
    def whole(self) -> bool:
        """Whether whole rows are printed, of the whole matrix, of numbers."""
        parts = self.values.ndim < 2 or not PARTS.isdisjoint(self.words)
        return self.full and not parts and bool(np.isfinite(self.values).all())

    @cached_property
    def causal(self) -> Flags:
        """Who sees whom of the last two axes under a causal mask: the last query sees every key."""
        both = zip(self.places[-2:], self.sizes[-2:], strict=True)
        rows, keys = (np.where(at < 0, at, at - size) for at, size in both)  # from the last one
        return np.asarray(keys <= rows[:, None])

    def largest(self, chosen: Flags) -> float:
        """The largest of the entries that ``chosen`` of the last two axes are."""
        return float(np.abs(self.values[..., chosen]).max(initial=0.0))


class Number(NamedTuple):
    """A printed figure; of several in brackets each is one, with its index in the label. context:
    the headline above it. unit: the step of its last digit, 1 of a count; 0 where it is exact:
    "0.0" is how Python writes a zero, and 0.0000e+00 is one too.
    """

    label: str
    value: float
    unit: float
    context: str = ""

    @property
    def error(self) -> bool:
        """Whether it says how far two results are apart."""
        return bool(re.search(r"err|diff|residual", self.label, re.IGNORECASE))

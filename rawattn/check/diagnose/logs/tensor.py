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

SCORES = frozenset({"s", "score", "scores", "logits", "qk"})
PROBABILITIES = frozenset({"p", "prob", "probs", "probabilities", "softmax"})
GRADIENTS = ("dQ", "dK", "dV", "dO", "dS", "dP")
QUANTITIES = frozenset(
    {*"qkvod", "lse", "logsumexp", "out", "output", "grad", "gradient"}
    | {name.lower() for name in GRADIENTS}
    | SCORES
    | PROBABILITIES
)
SIXTEEN_BIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True, eq=False)
class Printed:
    """One printed tensor: what stands in the log, without the elided part.

    start: where it begins in the log. values: the printed entries; nan where nan was printed.
    units: the step of the last printed digit of each, 0 where the print is exact. places: the
    indices along each axis of the printed entries; counted from the back, so negative, where they
    stand behind "...". sizes: the length of each axis, None where it is elided and nothing tells.
    dtype: "" where nothing tells.
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

    @property
    def full(self) -> bool:
        """Whether nothing is elided."""
        return self.values.size > 0 and self.sizes == self.values.shape

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
        return tuple(word for word in self.words if word not in QUANTITIES and not word.isdigit())

    @property
    def quantity(self) -> tuple[str, ...]:
        """What it is, with numbers in its name; () where that does not tell."""
        return (self.kind, *filter(str.isdigit, self.words)) if self.kind else ()

    @property
    def kind(self) -> str:
        """dQ, dK, dV, dO, dS, dP, O, P, S or lse, as far as the name tells; "" else."""
        words = set(self.words)
        for gradient in GRADIENTS:
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


class Number(NamedTuple):
    """A printed figure: "max abs err (q,k,v): [1e-3, 2e-3, 0.0]" is three, of labels that end in q,
    k and v. context: the headline above it. unit: the step of its last digit, 1 of a count; 0 where
    it is exact: "0.0" is how Python writes a zero, and 0.0000e+00 is one too.
    """

    label: str
    value: float
    unit: float
    context: str = ""

    @property
    def error(self) -> bool:
        """Whether it says how far two results are apart."""
        return bool(re.search(r"err|diff|residual", self.label, re.IGNORECASE))

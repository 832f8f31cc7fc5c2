"""One printed tensor: what it holds, and what its name tells."""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FAR = 2**40  # how long an axis is that is elided
KINDS = {
    **{f"d{letter}": f"d{letter.upper()}" for letter in "qkvosp"},
    **{letter: letter.upper() for letter in "qkvosp"},
    **{"query": "Q", "key": "K", "value": "V", "lse": "lse", "logsumexp": "lse"},
    **dict.fromkeys(("out", "output"), "O"),
    **dict.fromkeys(("score", "scores", "logits", "qk"), "S"),
    **dict.fromkeys(("prob", "probs", "probabilities", "softmax"), "P"),
}
OF_GRADIENTS = {"grad", "gradient"}
PARTS = {"tile", "block", "partial", "chunk", "slice", "sub"}


@dataclass(frozen=True, eq=False)
class Printed:
    """One printed tensor: what stands in the log, without the elided part and without leading axes
    of length 1 in front of its rows.

    values: the printed entries; nan where nan was printed. unit: the step of the last printed
    digit, of the largest entries where it differs, 0 where the print is exact. places: the indices
    along each axis of the printed entries; counted from the back, so negative, where they stand
    behind "...". sizes: the length of each axis, FAR where that is not known.
    """

    name: str
    values: Float64
    unit: float
    places: tuple[Integers, ...]
    sizes: tuple[int, ...]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The name in lower-case words: dS_manual is ds, manual."""
        return words_of(self.name)

    @cached_property
    def kind(self) -> str:
        """dQ, dK, dV, dO, dS, dP, O, P, S or lse, as far as the name tells; "" else."""
        found = {KINDS[word] for word in self.words if word in KINDS}
        longer = {kind for kind in found if len(kind) > 1}
        if len(longer or found) != 1:
            return ""
        (kind,) = longer or found
        return kind if longer or not {"d", *OF_GRADIENTS} & set(self.words) else f"d{kind}"

    @property
    def of_softmax(self) -> bool:
        """Whether whole rows of a whole dS or P are printed; with numbers in it that no P has only
        the name says P."""
        x = self.values
        whole = x.size > 0 and x.shape == self.sizes and x.ndim > 1 and PARTS.isdisjoint(self.words)
        weights = self.kind == "P" and bool(((x >= 0) & (x <= 1.01)).all())
        return whole and (weights or self.kind == "dS") and bool(np.isfinite(x).all())

    @cached_property
    def causal(self) -> Flags:
        """Who sees whom of the last two axes under a causal mask: the last query sees every key."""
        both = zip(self.places[-2:], self.sizes[-2:], strict=True)
        rows, keys = (np.where(at < 0, at, at - size) for at, size in both)  # from the last one
        return np.asarray(keys <= rows[:, None])

    @property
    def unmasked(self) -> float:
        """The largest entry where a causal mask would give 0; 0 where that is what is printed."""
        largest = float(np.abs(self.values[..., ~self.causal]).max(initial=0.0))
        return largest if largest > 2 * self.unit else 0.0


def words_of(name: str) -> tuple[str, ...]:
    pattern = r"d[A-Z](?![a-z])|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
    return tuple(word.lower() for word in re.findall(pattern, name))

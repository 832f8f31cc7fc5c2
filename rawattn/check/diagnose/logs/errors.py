"""Printed errors of exactly 0: what two all-zero results would give as well."""

import math
import re
from collections.abc import Iterator, Sequence

from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.logs.rows import Log
from rawattn.check.diagnose.logs.tensor import SIXTEEN_BIT, Number
from rawattn.check.diagnose.logs.words import finding_of

SMALLEST_HALF = 2.0**-24  # the smallest float16 above 0
REPEATED = re.compile(r"repeat|rerun|run.to.run|bitwise|determin|same", re.IGNORECASE)
SIZES = re.compile(r"norm|magnitude|amax|max|mean|std|scale", re.IGNORECASE)


def vacuous_errors(
    figures: Sequence[Number], log: Log, compared: bool
) -> tuple[list[Finding], list[str]]:
    """Findings about errors of exactly 0 between two implementations, and facts that excuse them.

    compared: whether tensors in the log show that values are not 0.
    """
    findings, facts = [], []
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
            facts.append(f"exactly 0: {named}; the rest of the log shows that values are not 0")
            continue
        sixteen = bool(log.dtypes) and log.dtypes <= set(SIXTEEN_BIT)
        sure = sixteen and len({(f.line, f.label) for f in zero} | {*lines}) > 1
        against = re.search(r"(\S+)\s+(?:vs\.?|versus|against)\s+(\S+)", context)
        two = f"{against[1]} and {against[2]}" if against else "two implementations"
        findings.append(
            finding_of(
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
            )
        )
    return findings, facts


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

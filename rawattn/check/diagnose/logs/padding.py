"""One constant factor between two sides: which factor it is, and whether padding explains it.

Zero keys up to the longest sequence add a weight of e^0 = 1 each to the denominator of a softmax.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.logs.pairs import CONSTANT, Fit, Pair
from rawattn.check.diagnose.logs.rows import Log
from rawattn.check.diagnose.logs.words import few, finding_of

UNIT_SCORES = math.exp(1 / 18)  # E[exp(s)] for s of variance 1/9: default torch.nn.Linear weights
CERTAIN = 3.0  # standard errors
LOG2_E = 1 / math.log(2)
SHRUNK = ("", "O", "dV")  # what zero keys in the denominator divide by nearly one number


def constant_factor(pair: Pair, fit: Fit, log: Log) -> Finding:
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
        return finding_of(pair.sides[larger], "lse-base-2", pair.title, "high", evidence)
    head_dim = (pair.a.sizes[-1] if pair.a.sizes else None) or 1
    if pair.kind in ("dQ", "dK") and head_dim > 1 and near(math.sqrt(head_dim)):
        words = f"sqrt(head_dim) = sqrt({head_dim}): {pair.sides[larger]} lacks softmax_scale there"
        evidence = [measured, f"{words}, or {pair.sides[1 - larger]} applies it twice"]
        return finding_of(pair.sides[larger], "output-scale", pair.title, "medium", evidence)
    shrunk = pair.causal is not True and ratio > 1 and pair.kind in SHRUNK
    padded = _padded(pair, pair.sides[1 - larger], ratio, error, log) if shrunk else None
    if padded is not None:
        return replace(padded, evidence=(measured, *padded.evidence))
    return finding_of(
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


def _padded(pair: Pair, side: str, ratio: float, error: float, log: Log) -> Finding | None:
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
    which = f"the sequence of {n} tokens (index {few(index)})" if only else "one of the sequences"
    evidence = [
        f"zero keys up to the longest sequence ({longest}) add a weight of e^0 = 1 each to the "
        f"denominator: r(n) = 1 + ({longest} - n) / (n m), m the mean of exp(score)",
        f"r({n}) = {expected[n]:.4g} with m = exp(1/18) = {UNIT_SCORES:.4g}, of scores of variance "
        f"1/9: {abs(expected[n] - ratio) / error:.1f} standard errors from the measured "
        f"{ratio:.4g}, which asks for m = {implied[n]:.4g}",
        f"{plain:.0f}, such as a count of heads or sequences, lies {gap:.1f} standard errors away; "
        f"{longest}/{n} = {longest / n:.4g}, as a cotangent on rows of padding gives, {rest:.0f}",
        _curve(log.lengths, UNIT_SCORES if hits else implied[n]),
        f"{side} has the smaller values: it is the side that attends to padding",
    ]
    if not only:
        fitting = ", ".join(map(str, possible))
        evidence.append(f"sequences of {fitting} tokens would all fit, with an m from 1 to 1.7")
    confidence = ("high" if sure else "medium") if only else "low"
    where = f"{pair.title}, {which}"
    return finding_of(side, "padded-keys", where, confidence, evidence, alternatives)


def _shrinkage(n: int, longest: int, m: float) -> float:
    """What ``longest - n`` zero keys divide the weights by; m: the mean of exp(score) of the n."""
    return 1 + (longest - n) / (n * m)


def _curve(lengths: Iterable[int], m: float) -> str:
    sizes = [n for n in dict.fromkeys(lengths) if n]
    curve = ", ".join(f"{n}: {_shrinkage(n, max(sizes), m):.2f}" for n in sizes)
    return f"the ratio predicted by the length of a sequence: {curve}"


def by_sequence(pairs: Sequence[Pair], log: Log) -> Finding | None:
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
    return finding_of(side, "padded-keys", where, "high", evidence)


def _padding_in_sizes(ratio: float, log: Log) -> Iterator[str]:
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

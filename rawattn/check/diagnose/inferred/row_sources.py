"""What a kernel may have taken for the D or the lse of a row: other rows' numbers, parts of sums.

Every source is an array (num_heads_q, total_q) of what each row would have got; that a row out of
the array gets is 0, as from memory that nobody wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.attention import LOG2_E, Context, Floats
from rawattn.check.diagnose.engine.question import Question

Ints = np.ndarray
SHIFTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Source:
    """``values`` (num_heads_q, total_q) that would be a bug of class ``bug``, ``words`` for it."""

    bug: str
    words: str
    values: Floats


@dataclass(frozen=True)
class _Place:
    """Another place (heads, tokens) for the number of every row; -1 for none."""

    words: str
    heads: Ints
    tokens: Ints

    def of(self, x: Floats) -> Floats:
        """``x`` (num_heads_q, total_q, ...) as read there."""
        heads, tokens = np.broadcast_arrays(self.heads, self.tokens)
        inside = (tokens >= 0) & (tokens < x.shape[1]) & (heads >= 0) & (heads < x.shape[0])
        found = x[np.where(inside, heads, 0), np.where(inside, tokens, 0)]
        return np.asarray(np.where(inside.reshape(inside.shape + (1,) * (x.ndim - 2)), found, 0.0))


def of_delta(question: Question, contexts: Sequence[Context]) -> Iterator[Source]:
    """What D = dout . out - dlse may have been."""
    dout, out = (_by_head(question, x) for x in (question.dout, contexts[0].given[0]))
    dlse = np.zeros(question.q.shape[1::-1])
    if question.dlse is not None:
        dlse = np.asarray(question.dlse, dtype=np.float64)
    product = (dout * out).sum(axis=-1)
    another, misplaced = "delta-of-another-out", "statistics-misplaced"
    if question.dlse is not None:
        yield Source("delta-omitted", "D = -dlse", -dlse)
        yield Source("lse-gradient-dropped", "dlse is left out", product)
        yield Source("lse-gradient-sign", "D = dout . out + dlse", product + dlse)
    yield Source("delta-omitted", "D = 0", np.zeros_like(product))
    for words, part in _columns(question.v.shape[2]):
        yield Source(another, f"D is the sum over {words}", (dout * out)[..., part].sum(-1) - dlse)
    for words, other in _other_operands(question, dout, out).items():
        yield Source(another, f"D = {words}", other - dlse)
    top = rows_of(question, contexts, lambda c: c.S.max(axis=-1))
    sums = np.exp(rows_of(question, contexts, lambda c: c.L) - np.where(np.isneginf(top), 0.0, top))
    yield Source(
        another, "D = dout . out before the division by the row sum", sums * product - dlse
    )
    if question.dlse is not None:
        for words, factor in _factors(question).items():
            yield Source(
                "lse-gradient-sign", f"D = dout . out - {words} dlse", product - factor * dlse
            )
    for place in _places(question):
        yield Source(misplaced, f"D {place.words}", place.of(product - dlse))
        other = (dout * place.of(out)).sum(axis=-1) - dlse
        yield Source(another, f"D of the out {place.words}", other)
        other = (place.of(dout) * out).sum(axis=-1) - dlse
        yield Source(another, f"D of the dout {place.words}", other)
        if question.dlse is not None:
            yield Source("input-layout", f"dlse {place.words}", product - place.of(dlse))
            yield Source(misplaced, f"dout . out {place.words}", place.of(product) - dlse)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = (product - dlse).astype(dtype).astype(np.float64)
        yield Source("accumulates-in-16-bit", f"D in {np.dtype(dtype).name}", narrow)
    sums = rows_of(question, contexts, lambda c: np.where(c.W > 0, c.dP, 0.0).sum(axis=-1))
    count = rows_of(question, contexts, lambda c: (c.W > 0).sum(axis=-1) + 0 * c.D)
    yield Source(another, "D is the sum of dP, without P", sums - dlse)
    yield Source(another, "D is the mean of dP, without P", sums / np.maximum(count, 1) - dlse)


def of_lse(question: Question, contexts: Sequence[Context]) -> Iterator[Source]:
    """What the lse of exp(S - lse) may have been."""
    lse = rows_of(question, contexts, lambda c: np.where(np.isneginf(c.L), 0.0, c.L))
    top = rows_of(question, contexts, lambda c: c.S.max(axis=-1))
    top = np.where(np.isneginf(top), 0.0, top)
    wrong = "statistics-misplaced"
    yield Source(wrong, "an lse of 0, as if it were not written", np.zeros_like(lse))
    yield Source("lse-base-2", "lse times log2(e)", lse * LOG2_E)
    yield Source("lse-base-2", "lse times ln 2", lse / LOG2_E)
    yield Source("lse-without-max", "lse without the maximum", lse - top)
    yield Source("lse-without-max", "the maximum alone", top)
    yield Source("lse-without-max", "the maximum not scaled", lse - top + top / question.scale)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = lse.astype(dtype).astype(np.float64)
        yield Source("accumulates-in-16-bit", f"lse in {np.dtype(dtype).name}", narrow)
    for place in _places(question):
        yield Source(wrong, f"lse {place.words}", place.of(lse))


def of_number(right: Floats, name: str, question: Question) -> Iterator[Source]:
    """What another row term may have been: ``right`` read elsewhere."""
    yield Source("statistics-misplaced", f"a {name} of 0", np.zeros_like(right))
    for place in _places(question):
        yield Source("statistics-misplaced", f"{name} {place.words}", place.of(right))


def rows_of(
    question: Question, contexts: Sequence[Context], of: Callable[[Context], Floats]
) -> Floats:
    """A number of every row, from all contexts: (num_heads_q, total_q)."""
    found = np.zeros(question.q.shape[1::-1])
    for c in contexts:
        found[c.view.heads[:, None], c.view.rows] = of(c)
    return found


def _factors(question: Question) -> dict[str, float]:
    """What dlse may have been multiplied by."""
    s, group = question.scale, question.group
    found = {"2": 2.0, "1/2": 0.5, "log2(e)": LOG2_E, "ln 2": 1 / LOG2_E, "s": s, "1/s": 1 / s}
    return found | ({"group": float(group), "1/group": 1 / group} if group > 1 else {})


# ---- other numbers ----------------------------------------------------------------------------


def _by_head(question: Question, x: Floats | None) -> Floats:
    """(num_heads_q, total_q, columns), 0 outside of sequences."""
    inside = question.sequence_of("q") >= 0
    found = np.where(inside[:, None, None], np.asarray(x, dtype=np.float64), 0.0)
    return np.asarray(found.swapaxes(0, 1))


def _columns(width: int) -> Iterator[tuple[str, slice]]:
    for step in range(8, width, 8):
        yield f"the first {step} of {width} columns", slice(0, step)
        yield f"the last {width - step} of {width} columns", slice(step, None)
    for step in (2, 4):
        for first in range(step):
            yield f"every {step}th column from {first} on", slice(first, None, step)


def _other_operands(question: Question, dout: Floats, out: Floats) -> dict[str, Floats]:
    found = {"out . out": (out * out).sum(axis=-1), "dout . dout": (dout * dout).sum(axis=-1)}
    widths = question.q.shape[2], question.v.shape[2]
    residuals = {"q": question.q} if widths[0] == widths[1] else {}
    if question.k.shape[0] == question.q.shape[0]:
        per = np.arange(question.num_heads_q) // question.group
        residuals["v"] = np.asarray(question.v)[:, per]
        if widths[0] == widths[1]:
            residuals["k"] = np.asarray(question.k)[:, per]
    for name, x in residuals.items():
        other = np.nan_to_num(_by_head(question, x))
        found[f"dout . {name}"] = (dout * other).sum(axis=-1)
        found[f"dout . (out + {name})"] = (dout * (out + other)).sum(axis=-1)
    found["dout . (out + dout)"] = (dout * (out + dout)).sum(axis=-1)
    return found


# ---- other places -----------------------------------------------------------------------------


def _places(question: Question) -> Iterator[_Place]:
    """Where else the number of a row may have been read."""
    total, heads = len(question.q), np.arange(question.num_heads_q)[:, None]
    tokens = np.arange(total)
    sequence = question.sequence_of("q")
    starts_q, starts_k = (
        np.asarray(x)[:-1] for x in (question.cu_seqlens_q, question.cu_seqlens_k)
    )
    lengths = np.asarray(question.lengths_q)
    start = np.where(sequence >= 0, starts_q[sequence], 0)
    length = np.where(sequence >= 0, lengths[sequence], 0)
    i = tokens - start

    def at(words: str, there: Ints) -> _Place:
        return _Place(words, heads, np.where(sequence >= 0, there, -1)[None])

    for by in SHIFTS:
        yield at(f"of the row {by} further", tokens + by)
        yield at(f"of the row {by} before", tokens - by)
        yield at(f"of row i xor {by}", start + (i ^ by))
    for tile in (2, 4, 8, 16, 32, 64, 128):
        yield at(f"of row i // {tile} * {tile}", start + i // tile * tile)
        yield at(f"of row i % {tile}", start + i % tile)
    if question.batch > 1:
        following = np.append(starts_q[1:], total)[sequence]
        before = np.append(starts_q[:1], starts_q[:-1])[sequence]
        yield at("of the same row of the first sequence", starts_q[0] + i)
        yield at("of the same row of the next sequence", following + i)
        yield at("of the same row of the sequence before", before + i)
        yield at("at the offset of the keys", starts_k[sequence] + i)
    yield at("of the rows of the sequence reversed", start + length - 1 - i)
    if question.num_heads_q > 1:
        count, group = question.num_heads_q, question.group
        others = {
            "of the next head": (heads + 1) % count,
            "of the head before": (heads - 1) % count,
            "of the first head": 0 * heads,
            "of the last head": 0 * heads + count - 1,
            "of the heads reversed": count - 1 - heads,
        }
        if group > 1:
            others["of head h // group"] = heads // group
            others["of head h % num_heads_kv"] = heads % question.num_heads_kv
            others["of the first head of the group"] = heads // group * group
            others["of the last head of the group"] = heads // group * group + group - 1
        for words, there in others.items():
            yield _Place(words, there, tokens[None])
    yield from _layouts(question, heads, tokens, start, length, i, sequence)


def _layouts(
    question: Question,
    heads: Ints,
    tokens: Ints,
    start: Ints,
    length: Ints,
    i: Ints,
    sequence: Ints,
) -> Iterator[_Place]:
    """Where an array (heads, tokens) has what another layout's index means."""
    total, count = len(question.q), question.num_heads_q
    longest = max(question.lengths_q, default=0)

    def flat(words: str, index: Ints) -> _Place:
        inside = (index >= 0) & (index < total * count)
        return _Place(words, np.where(inside, index // total, -1), index % total)

    if count > 1:
        yield flat("read as (tokens, heads)", tokens[None] * count + heads)
        index = heads * total + tokens[None]  # stored as (tokens, heads)
        yield _Place("stored as (tokens, heads)", index % count, index // count)
        yield flat("read by sequences of (heads, tokens)", count * start + heads * length + i)
        yield flat("read with a stride of the longest sequence", heads * longest + tokens)
        yield flat("read with a stride of the sequence", heads * length + tokens)
    yield flat("read as (batch, heads, longest)", (sequence * count + heads) * longest + i)

"""Where one side differs from the other: the pattern of the wrong rows, and of intermediates, each
(num_heads_q, seqlen_q, seqlen_k), the first wrong step. E, tP, tdS: tangents of S, P and dS."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import contexts, views_of
from rawattn.check.diagnose.engine.question import OF_KEYS, OF_SLOTS, Answers, Question, side_of
from rawattn.check.diagnose.evidence.places import TILES, Features, of_tiles
from rawattn.check.diagnose.evidence.precision import finite, residual
from rawattn.check.diagnose.evidence.rules import Shown, rules_of

Array = np.ndarray
MATRICES = {"forward": ("S", "P"), "backward": ("dP", "dS"), "second": ("E", "tP", "tdS")}
MADE = {  # by what, and where to look
    "S": "q k^T, softmax_scale, a softcap",
    "P": "the mask, the exponential, and the row sums or lse",
    "dP": "dout v^T",
    "dS": "P o (dP - D), and D",
    "E": "softmax_scale (tq k^T + q tk^T)",
    "tP": "P o (E - e), and e",
    "tdS": "tP o (dP - D) + P o (dout tv^T - W), and W",
}
SHARE, FEW = 2.0**-6, 10  # of a row's size, of what is off; rows that tell columns apart
BEFORE_THE_MASK = ("S", "dP", "E")  # of pairs that are not seen they may hold anything
NEAR = {8: 1e-9, 4: 1e-4, 2: 0.03}  # of the size, by the bytes of a number of q


def named(what: str, indices: Any) -> str:
    """ "sequence 1", "sequences 1, 3", "heads 2 to 7"."""
    numbers = np.array([*indices], dtype=int)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    short = ([f"{x[0]} to {x[-1]}"] if len(x) > 2 else map(str, x) for x in runs)
    pieces = [piece for run in short for piece in run]
    pieces[6:] = [f"... ({len(numbers)} of them)"] * (len(pieces) > 6)
    return f"{what}{'s' * bool(what and len(numbers) > 1)} {', '.join(pieces)}".strip()


def where(question: Question, tensor: str, bad: Array, among: Array | bool = True) -> Iterator[str]:
    """Where the ``bad`` rows (tokens, heads) lie, told from all of ``among``, in sentences."""
    within = question.sequence_of(tensor)
    there, row = within >= 0, "key" if side_of(tensor) == "k" else "row"
    head = "kv head" if tensor in OF_KEYS else "selection head" if tensor in OF_SLOTS else "head"
    bad, heads = bad & there[:, None], bad.shape[1]
    if not bad.any():
        return
    if bad[there].all():
        yield f"every {row}"
        return
    of_heads, of_sequences = np.flatnonzero(bad.any(axis=0)), np.unique(within[bad.any(axis=1)])
    if len(of_heads) < heads:
        yield f"only {named(head, of_heads)} of {heads}"
    if len(of_sequences) < (sequences := len(np.unique(within[there]))):
        yield f"only {named('sequence', of_sequences)} of {sequences}"
    places = _Rows(question, tensor, heads)
    whole = np.broadcast_to(there[:, None] & among, bad.shape)
    touched = np.isin(within, of_sequences)[:, None] & np.isin(np.arange(heads), of_heads)[None]
    for domain, words in ((whole, ""), (touched & whole, "of these, ")):
        rule = next(rules_of(Shown(places, domain.T, bad.T)), None)
        if rule is not None and rule.spans:
            yield f"{words}the {row}s with {rule}"
            return
    every = bool((bad == touched).all())
    yield f"every {row} of these" if every else f"{bad.sum()} of {touched.sum()} {row}s"


def columns(found: Array, due: Array, bad: Array) -> Iterator[str]:
    """What tells columns of ``bad`` rows (tokens, heads) apart, if anything: those that are wrong,
    or two kinds, each of which is times one number in a row."""
    x, y = found[bad], due[bad]
    size = np.abs(y).max(axis=1, initial=0.0, keepdims=True)
    wrong, width = (np.abs(x - y) > SHARE * size).any(axis=0), x.shape[1]
    if 0 < wrong.sum() < width:
        yield f"{named('column', np.flatnonzero(wrong))} of {width} alone are wrong"
    if not wrong.all() or len(x) < FEW:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(np.abs(y) > SHARE * size, x / y, np.nan)

    def alike(c: int) -> Array:
        off = np.abs(times - times[:, [c]]) > SHARE * np.abs(times[:, [c]])
        return np.asarray(off.mean(axis=0) < 1 / FEW)

    one = alike(0)
    two = alike(int(one.argmin()))
    if one.any() and (one ^ two).all() and min(one.sum(), two.sum()) > 1:
        kinds = (named("column", np.flatnonzero(x)) for x in (one, two))
        yield f"each row is times one number in {', and times another in '.join(kinds)}"


class _Rows:
    """Rows of a tensor of so many heads, like ``Places``; features (1, rows) or (heads, rows)."""

    def __init__(self, question: Question, tensor: str, heads: int) -> None:
        q, side, h = question, side_of(tensor), np.arange(heads)[:, None]
        sequence, i = q.sequence_of(side), q.place_of(side)[None]
        count = np.zeros(q.q.shape[:2], dtype=np.int64)  # keys that queries see
        seen = np.zeros(q.k.shape[:2], dtype=bool)  # by any query
        for view in views_of(q):
            weight = np.broadcast_to(view.weight > 0, (len(view.heads), *view.weight.shape[1:]))
            count[np.ix_(view.rows, view.heads)] = weight.sum(axis=2).T
            seen[view.keys, view.head_kv] = weight.any(axis=(0, 1))
        of_q, of_k = (np.asarray(x)[sequence][None] for x in (q.lengths_q, q.lengths_k))
        n, at, size = np.diff(q.offsets(side))[sequence], "ij"[side == "k"], f"seqlen_{side}"
        self.j = np.repeat(i, heads, axis=0)
        made = {at: i, f"{size} - 1 - {at}": n - 1 - i}
        if side == "k":
            made["whether a query sees it"] = seen.T.astype(int)
        elif heads == q.num_heads_q:
            made["keys seen"] = count.T
        made |= {"seqlen_q": of_q, "seqlen_k": of_k, "seqlen_k - seqlen_q": of_k - of_q}
        made["the sequence"] = sequence[None]
        if heads == q.num_heads_q and q.group > 1:
            made[f"h % {q.group}"] = h % q.group
        self.features: Features = {name: partial(np.asarray, x) for name, x in made.items()}
        for t in TILES:
            self.features |= of_tiles(at, i, size, n, t)
        self.loops = Features()

    def feature(self, name: str) -> Array:
        return self.features[name]()


def intermediates(question: Question, answers: Answers, sequence: int) -> Answers:
    """The right ones of a sequence, by the out and lse that ``answers`` say. Raises ValueError."""
    if not 0 <= sequence < question.batch:
        raise ValueError(f"sequence {sequence} of {question.batch} sequences, counted from 0 on")
    lengths = question.lengths_q[sequence], question.lengths_k[sequence]
    found: Answers = {}
    for stage in (stage for stage in MATRICES if stage in question.stages):
        names = MATRICES[stage]
        found |= {name: np.zeros((question.num_heads_q, *lengths)) for name in names}
        given = None if stage == "forward" else question.given_to_backward(answers)
        first_q, first_k = (question.offsets(of)[sequence] for of in "qk")
        for c in contexts(question, stage, given):
            if c.view.sequence == sequence:
                at = np.ix_(c.view.heads, c.view.rows - first_q, c.view.keys - first_k)
                for name in names:
                    found[name][at] = getattr(c, name)
    return found


class Parting(NamedTuple):
    """The first ``step`` that is wrong, "" for none; those that ``agree``; how many pairs are."""

    step: str
    text: str
    agree: tuple[str, ...]
    pairs: int = 0


def parting(question: Question, answers: Answers, matrices: Answers) -> Parting | None:
    """Where a side's ``matrices`` part from those of the sequence that they fit best, if any."""
    judged = [
        _judged(question, answers, matrices, b)
        for b, lengths in enumerate(zip(question.lengths_q, question.lengths_k, strict=True))
        if any(x.shape[1:] == lengths for x in matrices.values())
    ]
    return max(judged, key=lambda one: (len(one.agree), -one.pairs), default=None)


def _judged(question: Question, answers: Answers, matrices: Answers, sequence: int) -> Parting:
    right, agree, said = intermediates(question, answers, sequence), list[str](), ""
    for name, wanted in right.items():
        if name not in matrices or matrices[name].shape != wanted.shape:
            continue
        x = np.asarray(matrices[name], np.float64)
        looked = right["P"] > (0 if name in BEFORE_THE_MASK else -1)
        off = np.where(looked, np.abs(residual(x, wanted, slice(None))), 0.0)
        size = np.abs(finite(wanted[looked])).max(initial=0.0)
        wrong = np.nonzero(off > NEAR[min(question.dtype.itemsize, 8)] * size)
        if len(wrong[0]):
            at = np.unravel_index(off.argmax(), off.shape)
            axes = zip(("heads", "queries", "keys"), wrong, at, strict=True)
            spans = (f"{what} {of.min()} to {of.max()}, most at {most}" for what, of, most in axes)
            text = f"{said}sequence {sequence}: {name} parts first, in {len(wrong[0])} of "
            text += f"{looked.sum()} pairs: {'; '.join(spans)}"
            text += f": expected {wanted[at]:.4g}, got {x[at]:.4g}"
            return Parting(name, text, tuple(agree), len(wrong[0]))
        agree.append(name)
        said = f"{', '.join(agree)} right; "
    return Parting("", said.removesuffix("; "), tuple(agree))

"""Random problems on which a planted bug shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count as counted
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Question
from tests.diagnose.plain import BFLOAT16, FLOAT32, FLOAT64, OPEN, Array, Planted, answers

Span = tuple[int, int]  # the least and the most
DTYPES = (FLOAT64, FLOAT32, BFLOAT16)
OPTIONS = ("softcap", "sinks", "seqused")


@dataclass(frozen=True)
class Needs:
    """What a problem must be like for a bug to show, and to be no other bug as well."""

    masks: tuple[str, ...] = ("open", "causal", "window", "causal window", "left", "right")
    lengths_k: tuple[str, ...] = ("equal", "equal", "more", "any")
    lengths: Span = (1, 90)
    over: int = 0  # one sequence at least is longer than this
    batch: Span = (2, 5)
    groups: tuple[int, ...] = (1, 2, 3, 4)
    heads_kv: tuple[int, ...] = (1, 2, 3)
    head_dims: tuple[int, ...] = (16, 24, 32, 48, 64)
    head_dims_v: tuple[int, ...] = (16, 24, 32, 48, 64)
    same_dims: float = 0.7  # how often head_dim_v is head_dim
    scaled: float = 0.3  # how often softmax_scale is given
    dlse: float = 0.4
    past_end: float = 0.3
    large: bool = False  # scores past the range of float32's exp
    dtypes: tuple[np.dtype[Any], ...] = DTYPES
    given: bool = True  # every other problem has the right out and lse
    dout: float | None = 1.0  # size of it; None for none, in forward stages
    moved: float | None = None  # there is a direction; how often it is one of two inputs alone
    blocks: Mapping[str, bool] | None = None  # of lists; what is not there is drawn
    options: Mapping[str, float] | None = None  # how often there are softcap, sinks, seqused_k
    least: float = 1e-3  # by how much of its norm a result changes
    shows: float = 8.0  # and in 16 bits, in units of the dtype's eps


_SMALL = {"lengths": (1, 24), "batch": (2, 3), "groups": (1, 2, 3), "head_dims": (4, 6)}
_FEW = Needs(**_SMALL, head_dims_v=(4, 8), moved=0.2)
KINDS = {
    "dense": _FEW,
    "options": replace(_FEW, dlse=1.0, moved=0.0, options=dict.fromkeys(OPTIONS, 0.5)),
    "sparse": replace(_FEW, lengths=(1, 60), blocks={}),
    "gate": replace(_FEW, lengths=(1, 60), blocks={"gate": True}),
}


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows: dtypes in turn, out and lse given or not."""
    found, needs = 0, planted.needs
    for attempt in counted():
        if found == count:
            return
        if attempt >= 30 * (found + 4):
            raise RuntimeError(f"{planted.bug}, {planted.variant}: shows on no problem")
        name = f"{planted.bug}, {planted.variant}"
        rng = np.random.default_rng((seed, crc32(name.encode()), attempt))
        turn, place = divmod(found, len(needs.dtypes))
        given = needs.given and (seed + turn + place) % 2 == 1
        question = draw(needs, rng, needs.dtypes[place], given=given)
        if not planted.bug or shows(planted, question):
            found += 1
            yield question


def shows(planted: Planted, question: Question) -> bool:
    """Whether the bug changes a result of its own stages by more than rounding does."""
    right = answers(replace(planted, stages=()), question)
    wrong, needs = answers(planted, question), planted.needs
    names = {name for stage in planted.stages for name in STAGES[stage]} | {"dsinks", "gsinks"}
    eps = float(ml_dtypes.finfo(question.dtype).eps)
    bound = max(needs.least, needs.shows * eps if question.dtype.itemsize == 2 else 0.0)
    return any(difference(wrong[name], right[name]) > bound for name in names & right.keys())


def difference(wrong: Array, right: Array) -> float:
    """Norm of the difference over the norm of ``right``; inf where shapes, NaN or inf differ."""
    if wrong.shape != right.shape:
        return float("inf")
    wrong, right = wrong.astype(FLOAT64), right.astype(FLOAT64)
    finite = np.isfinite(right)
    same = np.array_equal(wrong[~finite], right[~finite], equal_nan=True)
    if not same or not np.isfinite(wrong[finite]).all():
        return float("inf")
    error, size = (np.linalg.norm(a) for a in (wrong[finite] - right[finite], right[finite]))
    return float(error / size) if size > 0 else float(error > 0)


def draw(
    needs: Needs, rng: np.random.Generator, dtype: np.dtype[Any], *, given: bool = False
) -> Question:
    """A random problem. ``given``: the backward passes are given the right out and lse."""
    lengths_q, lengths_k = _lengths(needs, rng)
    heads_kv = int(rng.choice(needs.heads_kv))
    heads_q = heads_kv * int(rng.choice(needs.groups))
    dim = int(rng.choice(needs.head_dims))
    dim_v = dim if rng.random() < needs.same_dims else int(rng.choice(needs.head_dims_v))
    past_q, past_k = rng.integers(1, 8, 2) * (rng.random() < needs.past_end)
    rows_q, rows_k = sum(lengths_q) + int(past_q), sum(lengths_k) + int(past_k)
    q, k = (rng.standard_normal(s) for s in ((rows_q, heads_q, dim), (rows_k, heads_kv, dim)))
    softmax_scale = round(rng.uniform(0.1, 0.4), 3) if rng.random() < needs.scaled else None
    if needs.large:
        _enlarge(rng, q, k, dim**-0.5 if softmax_scale is None else softmax_scale)
    mask, left, right = rng.choice(needs.masks), int(rng.integers(2, 20)), int(rng.integers(2, 10))
    windows = {"window": (left, right), "left": (left, -1), "right": (-1, right)}
    windows["causal window"] = windows["left"]
    question = Question(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=normal(rng, (rows_k, heads_kv, dim_v), dtype),
        cu_seqlens_q=np.cumsum([0, *lengths_q], dtype=np.int32),
        cu_seqlens_k=np.cumsum([0, *lengths_k], dtype=np.int32),
        causal="causal" in mask,
        window=windows.get(mask, OPEN),
        softmax_scale=softmax_scale,
    )
    if needs.dout is not None:
        dout = (needs.dout * rng.standard_normal((rows_q, heads_q, dim_v))).astype(dtype)
        dlse = normal(rng, (heads_q, rows_q), wide_of(dtype)) if rng.random() < needs.dlse else None
        question = replace(question, dout=dout, dlse=dlse)
    if needs.moved is not None:
        gone = "qkv"[rng.integers(3)] if rng.random() < needs.moved else ""
        moved = [name for name in "qkv" if name != gone]
        new = {f"t{n}": normal(rng, getattr(question, n).shape, dtype) for n in moved}
        question = replace(question, **new)
    if needs.blocks is not None:
        question = replace(question, **_blocks(question, needs, rng))
    if needs.options is not None:
        question = replace(question, **_options(question, needs.options, rng))
    if not given:
        return question
    right = answers(None, replace(question, dout=None, tq=None, tk=None, tv=None))
    return replace(question, out=right["out"], lse=right["lse"])


def packed(
    lengths: tuple[int, ...] = (20, 30, 46),
    dtype: Any = FLOAT32,
    *,
    lengths_k: tuple[int, ...] = (),
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    dim_v: int = 0,
    seed: int = 0,
    dlse: bool = False,
    moved: bool = False,
    **options: Any,
) -> Question:
    """Of these lengths; causal, if it is not said that it is not."""
    rng, sides = np.random.default_rng(seed), (lengths, lengths_k or lengths)
    shapes = [(sum(side), h, dim) for side, h in zip(sides, heads, strict=True)]
    of_v = [(*shape[:2], dim_v or dim) for shape in shapes[::-1]]
    q, k, v, dout = (normal(rng, shape, dtype) for shape in (*shapes, *of_v))
    offsets = [np.cumsum([0, *side], dtype=np.int32) for side in sides]
    given = {"causal": True, "dout": dout, **options}
    if dlse:
        given["dlse"] = normal(rng, shapes[0][1::-1], wide_of(dtype))
    for name, x in {"tq": q, "tk": k, "tv": v}.items() if moved else ():
        given[name] = normal(rng, x.shape, dtype)
    return Question(q, k, v, *offsets, **given)


def _lengths(needs: Needs, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Of queries and of keys."""
    batch = int(rng.integers(needs.batch[0], needs.batch[1] + 1))
    queries = rng.integers(needs.lengths[0], needs.lengths[1] + 1, batch)
    one = rng.integers(batch)
    if queries.max() <= needs.over:
        queries[one] = needs.over + rng.integers(1, 30)
    kind = str(rng.choice(needs.lengths_k))
    if kind == "more":
        keys = queries + rng.integers(2, 30, batch)
    elif kind == "fewer":
        keys = np.maximum(queries - rng.integers(2, 30, batch), 1)
    elif kind == "any":
        keys = rng.integers(needs.lengths[0], needs.lengths[1] + 1, batch)
        keys[one] = max(keys[one], queries[one]) if needs.over else keys[one]
    else:
        keys = queries
    return [int(n) for n in queries], [int(n) for n in keys]


def _enlarge(rng: np.random.Generator, q: Array, k: Array, scale: float) -> None:
    """Some rows of q, and all keys, get a common direction: scores around 130, and around -130."""
    direction = rng.standard_normal(q.shape[2])
    direction /= np.linalg.norm(direction)
    k += 4 * direction
    rows = rng.random(q.shape[:2]) < 0.2
    signs = rng.choice((-1, 1), int(rows.sum()))
    q[rows] += 130 / (4 * scale) * signs[:, None] * direction


def wide_of(dtype: Any) -> np.dtype[Any]:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def _blocks(question: Question, needs: Needs, rng: np.random.Generator) -> dict[str, Any]:
    """Which blocks every token selects. Of ``needs.blocks``, per_head: every query head selects for
    itself; duplicates: a block may be named twice; padding: some slots are -1 or past the end."""

    def drawn(option: str, chance: float) -> bool:
        return (needs.blocks or {}).get(option, bool(rng.random() < chance))

    size, slots = int(rng.choice([16, 16, 32])), int(rng.integers(1, 5))
    selecting = question.num_heads_q if drawn("per_head", 0.3) else question.num_heads_kv
    shape = (len(question.q), selecting, slots)
    repeats, padded = drawn("duplicates", 0.3), drawn("padding", 0.4)
    indices = np.full(shape, -1, np.int32)
    for b, seqlen_k in enumerate(question.lengths_k):
        blocks = -(-seqlen_k // size)
        of_b = slice(*question.cu_seqlens_q[b : b + 2])
        for row in indices[of_b].reshape(-1, slots):
            twice = repeats and blocks > 0
            named = rng.integers(blocks, size=slots) if twice else rng.permutation(blocks)[:slots]
            row[: len(named)] = named
            if padded:
                row[rng.random(slots) < 0.3] = rng.choice([-1, -1, blocks])
    wide = wide_of(question.dtype)
    counts, gates = rng.integers(0, slots + 1, shape[:2], np.int32), rng.uniform(0.3, 1.8, shape)
    gated = drawn("gate", 0.3)
    return {
        "window": OPEN,
        "causal": drawn("causal", 0.6),
        "block_indices": indices,
        "block_counts": counts if drawn("counts", 0.3) else None,
        "block_scale": gates.astype(wide) if gated else None,
        "tblock_scale": normal(rng, shape, wide) if gated and needs.moved is not None else None,
        "block_size": size,
        "own": drawn("own", 0.7),
        "sliding": (size - 1, 0) if drawn("sliding", 0.3) else None,
    }


def _options(
    question: Question, options: Mapping[str, float], rng: np.random.Generator
) -> dict[str, Any]:
    there = {name: rng.random() < chance for name, chance in options.items()}
    sinks, tsinks = normal(rng, (2, question.num_heads_q), wide_of(question.dtype))
    unused = rng.integers(2, 7, question.batch)
    return {
        "softcap": float(rng.uniform(0.8, 3.0)) if there["softcap"] else None,
        "sinks": sinks if there["sinks"] else None,
        "tsinks": tsinks if there["sinks"] else None,
        "seqused_k": np.array(question.lengths_k) - unused if there["seqused"] else None,
    }

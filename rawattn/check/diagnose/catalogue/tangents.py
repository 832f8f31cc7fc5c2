"""More bugs of the second derivatives and of forward mode: what their products read, and tiles.

``second_order`` has the terms that are left out, held constant or scaled. Here an operand is
another array than it should be, or the right one read elsewhere (``MOVES``: another head, row or
layout, as the array that one would have to read rightly); or a loop over tiles goes wrong.

Long by the tables.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from rawattn.check.diagnose.catalogue.heads import by_map
from rawattn.check.diagnose.catalogue.reading import delta_of
from rawattn.check.diagnose.catalogue.second_order import (
    SECOND,
    at,
    in_both,
    of,
    with_values,
)
from rawattn.check.diagnose.engine.attention import (
    STEPS,
    TILES,
    Bug,
    Context,
    Floats,
    Step,
    Store,
    solve,
)
from rawattn.check.diagnose.engine.question import Answers, Question

OPERANDS = {"q": "tQ", "k": "tK", "v": "tV"}  # of directions
ARRAYS = {"tQ": "tq", "tK": "tk", "tV": "tv", "Q": "q", "K": "k", "V": "v", "dO": "dout"}
WORDS = {"tQ": "~q", "tK": "~k", "tV": "~v", "Q": "q", "K": "k", "V": "v", "dO": "dout"}
WORDS |= {"tO": "ddout", "O": "out", "P": "P", "tP": "P'", "dY": "dS", "tdY": "dS'"}
WORDS |= {"D": "D", "w": "W"}
EVERYWHERE = ("E", "ddout", "W", "dout ddv^T", "gq", "gk")  # where directions are read
READS = (  # operands of one side, and the sites that may read them elsewhere
    *((x, EVERYWHERE) for x in ("tQ", "tK", "tV", "tK tV", "tQ tK tV")),
    *(("tQ", ("gk",)), ("tQ", ("E",)), ("Q", ("gk",))),
    *(("dO", ("gv",)), ("dO", ("dout ddv^T",)), ("dO", ("W",))),
    *(("tK", ("gq",)), ("tK", ("E",)), ("tV", ("ddout", "W")), ("tV", ("dout ddv^T",))),
)
Move = Callable[[Question, np.ndarray], np.ndarray]


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _elsewhere(question)
    yield from _swapped(question)
    if question.dout is not None:
        yield from _operands(question)
        yield from _row_terms(question)
        yield from _tiles(question)


def _given(question: Question) -> set[str]:
    """Operands that are there."""
    return {x for x, array in ARRAYS.items() if getattr(question, array) is not None}


# ---- arrays that are read elsewhere -------------------------------------------------------------


def read(operand: str, array: str = "", move: Move | None = None) -> Step:
    """An operand of a view from the array ``array``, its own by default, after a move; of keys with
    as many heads as queries have that of the view's query head."""

    def value(c: Context) -> Floats:
        question, view = c.question, c.view
        x = getattr(question, array or ARRAYS[operand])
        if x is None:
            return np.zeros_like(getattr(c, operand))
        x = x if move is None else move(question, x)
        if operand in ("tQ", "Q", "dO"):
            return np.asarray(x[view.rows[None], view.heads[:, None]], dtype=np.float64)
        head = view.head_kv if x.shape[1] == question.num_heads_kv else view.heads[0]
        seen = (view.weight > 0).any(axis=(0, 1)) & (view.keys >= 0)
        found = np.zeros((len(view.keys), x.shape[2]))
        found[seen] = x[view.keys[seen], head]
        return found

    return value


def _elsewhere(question: Question) -> Iterator[Bug]:
    """A direction wherever it is read, or an operand of one product alone."""
    given, heads_q = _given(question), np.arange(question.num_heads_q)
    own = heads_q // question.group
    for names, sites in READS:
        operands = names.split()
        if not set(operands) <= given:
            continue
        of_keys = operands[0] in ("tK", "tV")
        where = "" if sites == EVERYWHERE else f" in {sites[0]}"
        text = f"{' and '.join(WORDS[x] for x in operands)}{{}}{where}"
        heads = _other_heads_kv(question) if of_keys else other_heads(question)
        for how, of_head in heads.items() if len(operands) < 3 else ():
            steps = at(sites, **{x: read(x, move=_of_heads(of_head)) for x in operands})
            see = by_map(own) if of_keys else None
            yield from in_both("gqa-head-map", text.format(f" of {how}"), steps, see)
        for how, move in MOVES.items() if not where else ():
            if (
                question.batch
                if "offset" in how
                else getattr(question, ARRAYS[operands[0]]).shape[1]
            ) > 1:
                steps = at(sites, **{x: read(x, move=move) for x in operands})
                yield from in_both("input-layout", text.format(f", {how}"), steps)
    if question.group > 1 and question.num_heads_kv > 1:
        right = _of_heads(own)
        steps = {"Y": _setting({x: read(x, move=right) for x in ("K", "V", "tK", "tV")})}
        see = by_map(heads_q % question.num_heads_kv)
        yield Bug("gqa-reduction-map", "h % num_heads_kv", SECOND, see, steps)


def other_heads(question: Question) -> dict[str, np.ndarray]:
    """Of every query head another one."""
    heads, group, heads_kv = np.arange(question.num_heads_q), question.group, question.num_heads_kv
    found: dict[bytes, tuple[str, np.ndarray]] = {heads.tobytes(): ("", heads)}
    for text, of_head in {
        "the first head of the group": heads // group * group,
        "head h // group": heads // group,
        "head h % num_heads_kv": heads % heads_kv,
        "the last head of the group": heads // group * group + group - 1,
    }.items():
        found.setdefault(of_head.tobytes(), (text, of_head))
    return {text: of_head for text, of_head in found.values() if text and group > 1}


def _other_heads_kv(question: Question) -> dict[str, np.ndarray]:
    """Of every query head another one of keys."""
    heads, heads_kv = np.arange(question.num_heads_q), question.num_heads_kv
    if question.group == 1 or heads_kv == 1:
        return {}
    return {"head h % num_heads_kv": heads % heads_kv, "head 0": 0 * heads}


def _of_heads(of_head: np.ndarray) -> Move:
    return lambda question, x: x[:, of_head]


def _setting(values: Mapping[str, Step]) -> Step:
    """Other arrays from the first step on."""

    def Y(c: Context) -> Floats:
        for name, x in {name: value(c) for name, value in values.items()}.items():
            setattr(c, name, x)
        return np.asarray(STEPS["Y"](c))

    return Y


def _local(question: Question, x: np.ndarray) -> np.ndarray:
    """For every row of a packed array its number in its sequence."""
    side = "q" if x.shape[:2] == question.q.shape[:2] else "k"
    sequence = question.sequence_of(side)
    starts = np.asarray(question.cu_seqlens_q if side == "q" else question.cu_seqlens_k)[sequence]
    return np.where(sequence < 0, 0, np.arange(len(sequence)) - starts)


MOVES: dict[str, Move] = {
    "without the sequence's offset": lambda question, x: x[_local(question, x)],
    "(H, T, D) as (T, H, D)": lambda question, x: x.swapaxes(0, 1).reshape(x.shape),
    "(T, H, D) as (H, T, D)": lambda question, x: (
        np.ascontiguousarray(x).reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1)
    ),
}


# ---- arrays in each other's place -------------------------------------------------------------

ROTATIONS = (("qk", "kq"), ("kv", "vk"), ("qv", "vq"), ("qkv", "kvq"), ("qkv", "vqk"))


def _swapped(question: Question) -> Iterator[Bug]:
    name = "arguments-swapped"
    given = {x for x, operand in OPERANDS.items() if operand in _given(question)}
    shapes = {"q": question.q.shape, "k": question.k.shape, "v": question.v.shape}
    for to, order in ROTATIONS:
        if len({shapes[x] for x in to}) > 1 or not set(to) & given:
            continue
        values = {OPERANDS[x]: read(OPERANDS[x], f"t{y}") for x, y in zip(to, order, strict=True)}
        text = " read for ".join(" and ".join(f"~{x}" for x in names) for names in (order, to))
        yield from in_both(name, text, at(EVERYWHERE, **values))
        if len(to) == 2:
            stored = _exchanged(f"g{to[0]}", f"g{to[1]}")
            yield Bug(name, f"g{to[0]} and g{to[1]}", SECOND, store=stored)
    for x in sorted(given):
        own, moved = x.upper(), OPERANDS[x]
        steps = {"Y": _setting({own: _value(moved), moved: _value(own)})}
        yield from in_both(name, f"{x} and ~{x}", steps)


def _value(name: str) -> Step:
    return lambda c: getattr(c, name)


def _exchanged(one: str, other: str) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        return {**answers, one: answers[other], other: answers[one]}

    return store


# ---- operands of products ---------------------------------------------------------------------

OTHERS = {  # what a product of a site may have in it for which operand, one of them or both
    "dout ddv^T": (("tO", "dO"), ("V", "tV")),
    "gv": (("tO", "dO"), ("P", "tP")),
    "W": (("O", "tO"), ("O", "dO")),
    "dS'": (("w", "D"), ("D", "w")),
    "gq": (("K", "tK"), ("tK", "K"), ("tdY", "dY")),
    "gk": (("Q", "tQ"), ("tQ", "Q"), ("tdY", "dY")),
}
NEEDS = {"dout ddv^T": "tV", "gq": "tK", "gk": "tQ"}  # without which the product is nothing


def _operands(question: Question) -> Iterator[Bug]:
    """One product of the second derivatives with another array in it, or that one added to it."""
    given = _given(question)
    for site, others in OTHERS.items():
        if site in NEEDS and NEEDS[site] not in given:
            continue
        for some in (*((one,) for one in others), others[:2]):
            steps = at([site], **{operand: _value(other) for other, operand in some})
            new, right = (" and ".join(WORDS[x[i]] for x in some) for i in (0, 1))
            text = f"{new} for {right} in {site}".replace("~", "dd")
            yield Bug("arguments-swapped", text, SECOND, steps=steps)
            for step in steps if site in ("dout ddv^T", "gv") else ():
                added = {step: _sum(STEPS[step], steps[step])}
                yield Bug("arguments-swapped", f"{text}, added", SECOND, steps=added)


def _sum(one: Step, other: Step) -> Step:
    return lambda c: c.r(one(c) + other(c))


# ---- row terms at other places ----------------------------------------------------------------

MISREAD: dict[str, Move] = {  # of (num_heads_q, total_q)
    "(H, T) as (T, H)": lambda question, x: x.reshape(x.shape[::-1]).T,
    "(T, H) as (H, T)": lambda question, x: x.T.reshape(x.shape),
    "without the sequence's offset": lambda question, x: x[:, _local(question, question.q)],
}


def _row_terms(question: Question) -> Iterator[Bug]:
    for text, move in MISREAD.items():
        if (question.batch if "offset" in text else question.num_heads_q) == 1:
            continue
        w, D, e, L = (_misread(name, move) for name in ("w", "D", "e", "L"))
        taken: dict[str, Mapping[str, Step]] = {
            "W": {"w": w},
            "D": {"D": D},
            "D and W": {"w": w, "D": D},
            "e": at(["dS'", "gv"], tP=with_values("tP", e=e)),
            "lse": {"bP": with_values("bP", L=L)},
        }
        variants = {f"{name}, {text}": steps for name, steps in taken.items()}
        yield from of("statistics-misplaced", SECOND, variants)


def _misread(name: str, move: Move) -> Step:
    def step(c: Context) -> Floats:
        right = solve(c.question, "second", given=c.given)
        if name == "w":
            x = (np.asarray(c.question.dout, dtype=np.float64) * right["ddout"]).sum(axis=2).T
        else:
            x = {"e": right["ddlse"], "L": c.given[1]}[name] if name in "eL" else delta_of(c)
        return np.asarray(move(c.question, x)[c.view.heads[:, None], c.view.rows], dtype=np.float64)

    return step


# ---- tiles ------------------------------------------------------------------------------------


def _tiles(question: Question) -> Iterator[Bug]:
    """A gradient holds one tile alone, which the loop stores and does not add to; or lacks tiles on
    the diagonal, which the pass over keys, or that over queries, does not come to."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    tiles = [question.block_size] if question.sparse else [t for t in TILES if 8 < t < longest]
    for tile, which in ((tile, which) for tile in tiles for which in ("last", "first")):
        for tensors in ("gQ", "gK gV", "gK", "gV"):
            loop, axis = ("key", 2) if tensors == "gQ" else ("query", 1)
            part = _one_tile(tile, which == "last", axis)
            steps = {name: _but_for(name, part) for name in tensors.split()}
            text = f"{tensors.lower()}: the {which} {loop} tile alone, tile of {tile}"
            yield Bug("tile-overwrites", text, SECOND, steps=steps)
    if question.sparse or question.mask_window[1] != 0:
        return
    sizes = [tile for tile in TILES if 8 < tile < 2 * max((*question.lengths_q, 0))]
    for rows, keys in ((rows, keys) for rows in sizes for keys in sizes if keys <= rows):
        for tensors in ("gK gV", "gQ gK gV"):
            steps = {name: _but_for(name, _behind(rows, keys)) for name in tensors.split()}
            text = f"{tensors.lower()}, on the diagonal, {rows} queries by {keys} keys"
            yield Bug("pairs-dropped", text, SECOND, steps=steps)


def _one_tile(tile: int, last: bool, axis: int) -> Step:
    """The last, or first, tile of keys that a tile of queries sees, or the other way round."""

    def part(c: Context) -> np.ndarray:
        n, m = c.P.shape[1:]
        seen = np.broadcast_to(c.W > 0, c.P.shape)
        for along, size in ((1, n), (2, m)):
            seen = np.logical_or.reduceat(seen, np.arange(0, size, tile), axis=along)
        number = np.arange(seen.shape[axis]).reshape((-1, 1) if axis == 1 else (1, -1))
        ends = np.where(seen, number if last else -number, -seen.size).max(axis, keepdims=True)
        kept = seen & (number == abs(ends))
        return np.asarray(kept[:, np.arange(n)[:, None] // tile, np.arange(m) // tile])

    return part


def _behind(rows: int, keys: int) -> Step:
    """All but queries before the first tile that starts at or after a tile of keys; of equal tiles,
    behind its start."""

    def part(c: Context) -> np.ndarray:
        n, m = c.P.shape[1:]
        start = np.arange(m) // keys * keys - (m - n)
        first = start // rows * rows + rows if rows == keys else -(-start // rows) * rows
        return np.asarray(np.arange(n)[:, None] >= np.maximum(first, 0))

    return part


def _but_for(name: str, part: Step) -> Step:
    def weighed(operand: str) -> Step:
        return lambda c: getattr(c, operand) * part(c)

    return with_values(name, **{operand: weighed(operand) for operand in ("tdY", "dY", "tP")})

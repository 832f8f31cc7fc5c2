"""Bugs of what is read: arrays in each other's place, misread layouts, misplaced row statistics."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.maps import Geometry, Map, geometry
from rawattn.check.diagnose.catalogue.second_order import multiple, of_one_pass, with_values
from rawattn.check.diagnose.engine.attention import TILES, Bug, Same, Store, deltas, solve
from rawattn.check.diagnose.engine.question import BY_ROW, STAGES, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step

# the names of contexts for those of arrays
OPERANDS = dict(q="Q", k="K", v="V", dout="dO", out="O", lse="L", dlse="dL", delta="other_D")
OPERANDS |= dict(tq="tQ", tk="tK", tv="tV")
Way = Callable[[Map, Geometry, Floats, float], Floats]
ARRAYS = {operand: name for name, operand in OPERANDS.items()}
OF_KEYS = ("k", "v", "tk", "tv")
# Arrays that are read alike, in any stage and in those that go backward.
TOGETHER = (("q",), ("k",), ("v",), ("k", "v"), ("q", "k", "v"))
GOING_BACK = (
    *(("delta",), ("lse",), ("lse", "delta"), ("dlse",), ("lse", "dlse"), ("dout",), ("out",)),
    *(("q", "k", "v", "dout"), ("q", "dout"), ("q", "dout", "lse", "delta")),
)
DIRECTIONS = (("tq",), ("tk",), ("tv",), ("tk", "tv"), ("tq", "tk", "tv"))
# Results that an array says nothing of; it has a part in all others.
OF_D = {"dv", "gv", "tout", "ddout", "tlse", "ddlse"}
SQUARES = {"dQ": "dY", "dK": "dY", "dV": "P", "gQ": "tdY", "gK": "tdY", "gV": "tP"}
APART = {
    **{"out": OF_D, "delta": OF_D, "dlse": OF_D, "dout": {"ddout", "ddlse"}},
    "v": {"lse", "dv", "gv", "jvp lse", "tlse", "ddlse"},
    **{name: {"jvp out", "jvp lse"} for name in ("tq", "tk")},
    "tv": {"jvp out", "jvp lse", "gv", "tlse", "ddlse"},
}
OF_FIRST_PASS = {"ddout", "ddlse"}
OF_QUERIES = {"backward": "dq", "second": "gq"}  # gradients with a kernel of their own
PRODUCTS = {  # a product: its name, its operands, and the results that it has a part in
    "Y": ("Q K^T", ("K", "Q"), {"out", "lse", "dq", "dk", "dv", *OF_FIRST_PASS, "gq", "gk", "gv"}),
    "O": ("P V", ("V", "P"), {"out"}),
    "dP": ("dO V^T", ("V", "dO"), {"dq", "dk", "gq", "gk"}),
    "dQ": ("dS K", ("K", "dY"), {"dq"}),
    "dK": ("dS^T Q", ("dY", "Q"), {"dk"}),
    "dV": ("P^T dO", ("P", "dO"), {"dv"}),
    "D": ("dO . O", ("dO", "O"), {"dq", "dk", "gq", "gk"}),
    "tY": ("E", ("tQ", "K", "Q", "tK"), {"tout", "tlse", "ddout", "ddlse", "gq", "gk", "gv"}),
    "tO": ("the product with V", ("V", "tV", "tP", "P"), {"tout", "ddout", "gq", "gk"}),
    "tdP": ("dO ddv^T", ("dO", "tV"), {"gq", "gk"}),
    "w": ("dO . ddout", ("dO", "tO"), {"gq", "gk"}),
    "tdS": ("dS'", ("D", "w", "tP", "P", "dP", "tdP"), {"gq", "gk"}),
    "gQ": ("gq", ("K", "tK", "tdY", "dY"), {"gq"}),
    "gK": ("gk", ("Q", "tQ", "tdY", "dY"), {"gk"}),
    "gV": ("gv", ("tP", "dO"), {"gv"}),
}
ALIKE: dict[str, str] = {  # operands of the same shape, of a stage
    "forward": "K V",
    "backward": "K V, Q dO O, P dY dP",
    "second": "K tK, V tV, Q tQ, dO O tO, P tP, dY tdY, dP tdP, D w",
}
OF_ROWS = {"O": "P", "dQ": "dY", "tO": "tP P", "tdS": "tP P dP tdP"}  # have rows of the results
NAMES = ARRAYS | {"tK": "ddk", "tV": "ddv", "tQ": "ddq", "tO": "ddout"}
NAMES |= {"P": "P", "dY": "dS", "tP": "P'", "tdY": "dS'", "D": "D", "w": "W"}
NUMBERS = {"D": "delta", "w": "w"}
Names = set[str]
Bugs = Iterator[Bug]


def reading(moved: Mapping[str, str], by: Map | None = None) -> dict[str, Step]:
    """``moved``: which array is read for which, each by a map. With out, dout is read so for D
    too; without it D was made before, and is right."""

    def Y(c: Context) -> Floats:
        for to, of in moved.items():
            setattr(c, OPERANDS[to], _elsewhere(to, of, by, c))
        return np.asarray(STEPS["Y"](c))

    def D(c: Context) -> Floats:
        if "delta" in moved:
            return np.asarray(c.other_D)
        before = "dout" in moved and "out" not in moved
        return of_view(c, "delta", deltas(c.question, c.given)) if before else STEPS["D"](c)

    return {"Y": Y, "D": D}


@lru_cache(maxsize=16)
def whole(question: Question, given: Same | None, to: str, of: str, by: Map | None) -> Floats:
    x = array_of(question, given, of)
    return x if by is None else by.moved(geometry(question, to), x)


def array_of(question: Question, given: Same | None, name: str) -> Floats:
    if name == "delta":
        return deltas(question, given)
    if name in ("e", "w"):  # what a double backward keeps of its first pass
        first = solve(question, "second", given=given)
        inside, w = question.sequence_of("q") >= 0, np.zeros_like(first["ddlse"])
        w[:, inside] = (np.asarray(question.dout)[inside] * first["ddout"][inside]).sum(axis=-1).T
        return first["ddlse"] if name == "e" else w
    found = {} if given is None else dict(zip(("out", "lse"), given, strict=True))
    return np.asarray(found[name] if name in found else getattr(question, name))


def of_view(c: Context, name: str, x: Floats) -> Floats:
    """A view's part of an array that is read as ``name``."""
    view, heads = c.view, c.view.heads[:, None]
    if name in maps.STATISTICS:
        return np.asarray(x[heads, view.rows], dtype=np.float64)
    if name not in OF_KEYS:
        return np.asarray(c.r(x[view.rows, heads].astype(np.float64)))
    of_key = x.shape[1] == c.question.num_heads_kv  # else of each query head
    found = x[view.keys, view.head_kv if of_key else heads].astype(np.float64)
    unseen = ~(view.weight > 0).any(axis=(0, 1)) | (view.keys < 0)  # may hold anything
    return np.asarray(c.r(np.where(unseen[:, None], 0.0, found)))


def taken(x: Floats, places: np.ndarray, axis: int, nothing: float = 0.0) -> Floats:
    """What is at these places of an axis; ``nothing`` where there are none."""
    inside = (places >= 0) & (places < x.shape[axis])
    found = np.moveaxis(x, axis, 0)[np.where(inside, places, 0)]
    found[~inside] = nothing
    return np.moveaxis(found, 0, axis)


def stored(by: Map, names: Collection[str] = (), rest: float = 0.0, way: Way = Map.moved) -> Store:
    """Results, or some of them, as a map has them in one of its ways; ``rest`` elsewhere."""
    return lambda question, answers: {
        name: way(by, geometry(question, name), x, rest) if not names or name in names else x
        for name, x in answers.items()
    }


def candidates(
    question: Question, stage: str, wrong: Collection[str], right: Collection[str], b: int
) -> Iterator[Bug]:
    """All of a stage that change something ``wrong``, and nothing that is ``right``; of a double
    backward those too that its second pass may have alone. To be tried on sequence ``b`` first."""
    right, wrong, said = set(right), set(wrong), set()
    for bug in _candidates(question, stage, wrong, right, b):
        said.add(bug.variant)
        yield bug
    if stage == "second" and right >= OF_FIRST_PASS:
        more = _candidates(question, stage, wrong, right - OF_FIRST_PASS, b)
        yield from (of_one_pass(bug) for bug in more if bug.variant not in said)


def _candidates(question: Question, stage: str, wrong: Names, right: Names, b: int) -> Bugs:
    if stage in OF_QUERIES and len({name == OF_QUERIES[stage] for name in wrong}) == 1:
        own = {OF_QUERIES[stage]}  # of another kernel
        right -= {"dk", "dv", "gk", "gv"} if own & wrong else own
    if not {"out", "dv", "gv", "tout"} & right:
        yield from _permuted(question, stage)
    yield from _read(question, stage, wrong, right, b)
    if stage != "jvp":
        yield from _operands(question, stage, wrong, right, b)


def _read(question: Question, stage: str, wrong: Names, right: Names, b: int) -> Bugs:
    """Arrays that are read by a map, all of a stage: alone, or with others of their layout."""
    by_kind = {kind: maps.families(question, kind) for kind in (False, True)}
    sets = [*TOGETHER, *(GOING_BACK if stage in ("backward", "second") else ())]
    sets += DIRECTIONS if stage in ("second", "jvp") else ()
    for names in (names for names in sets if _given(question, names)):
        apart = set.intersection(*(APART.get(name, set()) for name in names))
        if right - apart - {"delta"} or not wrong - apart:
            continue
        numbers = set(names) <= set(maps.STATISTICS)
        least = {("k", "v"): 1} | dict.fromkeys(DIRECTIONS[:3], TILES[0])
        of_tiles = maps.rows(question, least[names]) if names in least else ()
        of_keys = maps.heads_of_keys(question) if {*names} <= {*OF_KEYS} else ()
        strides = () if numbers or len(names) > 1 else maps.strides(question)
        for by in [*by_kind[numbers], *of_tiles, *of_keys, *strides]:
            if by.family == "heads" and len(names) > 1 and not numbers:
                continue
            kind, steps = _kind(names, by), reading({name: name for name in names}, by)
            text = f"{', '.join(word(OPERANDS[name], stage) for name in names)}: {by.words}"
            alike = (names, *(by.in_sequence(geometry(question, name), b) for name in names))
            yield Bug(kind, text, (stage,), steps=steps, alike=alike)


def _operands(question: Question, stage: str, wrong: Names, right: Names, b: int) -> Bugs:
    """One product that takes an operand by a map, or another one."""
    beyond = stage in ("second", "jvp")
    of_rows = list(maps.rows(question, TILES[0] if beyond else 1))
    of_arrays = [*maps.heads(question), *maps.sequences(question)]
    alike = [some.split() for some in ALIKE[stage].split(", ")]
    if not beyond and question.q.shape[2] != question.v.shape[2]:
        alike = alike[2:]
    for step, (product, operands, results) in PRODUCTS.items():
        if results & right or not results & wrong:
            continue
        for operand in (x for x in operands if x not in OF_ROWS.get(step, "").split()):
            text, of = f"{word(operand, stage)} in {product}", (ARRAYS | NUMBERS).get(operand, "")
            of_keys = maps.heads_of_keys(question) if of in OF_KEYS else ()
            found = [*of_rows, *of_keys, *(of_arrays if of else ())]
            if not _given(question, [of]):
                continue
            for by in maps.families(question, True) if of in maps.STATISTICS else found:
                inside = of not in maps.STATISTICS and by.family == "rows"
                take = partial(_moved, operand, by) if inside else partial(_elsewhere, of, of, by)
                steps = {step: with_values(step, **{operand: take})}
                kind = "delta-of-another-out" if step == "D" else _kind([of], by)
                key = text, inside, by.in_sequence(geometry(question, of or "q"), b)
                yield Bug(kind, f"{text}: {by.words}", (stage,), steps=steps, alike=key)
        for operand, other in (pair for some in alike for pair in itertools.permutations(some, 2)):
            if operand in operands:
                own, of = word(operand, stage), word(other, stage)
                ways = {f"{of} for {own} in {product}": {operand: multiple(other, 1.0)}}
                if own == "P":  # from a buffer of scaled ones
                    scaled = lambda c, x=other: c.s * getattr(c, x)  # noqa: E731
                    ways[f"s {of} for P in {product}"] = {operand: scaled}
                if other in operands and operand < other:
                    values = {operand: multiple(other, 1.0), other: multiple(operand, 1.0)}
                    ways[f"{own} and {of} in {product}, exchanged"] = values
                for text, values in ways.items():
                    steps = {step: with_values(step, **values)}
                    yield Bug("arguments-swapped", text, (stage,), steps=steps)
        for size in TILES if step in SQUARES else ():
            for words, all_ in ((", with zeros past the end", True), (" that are whole", False)):
                square = {SQUARES[step]: partial(_transposed, SQUARES[step], size, all_)}
                text = f"{word(SQUARES[step], stage)} in {product}: squares of {size}{words}"
                steps = {step: with_values(step, **square)}
                yield Bug("stale-tile", f"{text}, transposed", (stage,), steps=steps)


def _transposed(operand: str, size: int, all_: bool, c: Context) -> Floats:
    """Pairs (heads, n, m) with every square of a tile transposed, or those that are whole."""
    x: Floats = getattr(c, operand)
    n, m = x.shape[1:]
    i, j = np.ogrid[:n, :m]
    full = (i // size < n // size) & (j // size < m // size)
    rows, keys = i - i % size + j % size, j - j % size + i % size
    if not all_:
        return x[:, np.where(full, rows, i), np.where(full, keys, j)]
    there = (rows < n) & (keys < m)
    return np.where(there, x[:, np.minimum(rows, n - 1), np.minimum(keys, m - 1)], 0.0)


def word(operand: str, stage: str) -> str:
    name = NAMES.get(operand, operand)
    return name.replace("dd", "t") if stage == "jvp" else name


def _kind(names: Collection[str], by: Map) -> str:
    if {*names} <= {*maps.STATISTICS} - {"dlse"}:
        return "statistics-misplaced"
    kinds = {"rows": "stale-tile", "sequences": "offsets-shifted", "heads of keys": "gqa-head-map"}
    kinds |= {"heads": "gqa-head-map"} if {*names} <= {*OF_KEYS} else {}
    return "delta-of-another-out" if {*names} == {"out"} else kinds.get(by.family, "input-layout")


def _elsewhere(to: str, of: str, by: Map | None, c: Context) -> Floats:
    return of_view(c, to, whole(c.question, c.given, to, of, by))


def _moved(operand: str, by: Map, c: Context) -> Floats:
    """Rows of a view's operand (..., rows, columns) by a map; 0 where it has none."""
    name = ARRAYS.get(operand, "q")
    rows = c.view.keys if name in OF_KEYS else c.view.rows
    at = by.of(geometry(c.question, name)).t[rows, 0, 0] - rows[:1]
    return taken(getattr(c, operand), at, -2)


def rearranged(question: Question, names: Sequence[str]) -> Iterator[Bug]:
    """Results, all of one side, in another layout, at other rows, or added up where others are."""
    stages = tuple(stage for stage in STAGES if names[0] in STAGES[stage])
    of_numbers, whose = names[0] in BY_ROW, ", ".join(names)
    families = (by for by in maps.families(question, of_numbers) if by.family != "stored")
    for by in [*families, *maps.overrun(question)]:
        kind = "transposed" if by.family in ("layouts", "heads") else "offsets-shifted"
        ways: dict[str, tuple[Map, Way]] = {"": (by, Map.moved)}
        if by.family == "sequences":
            ways = {" is stored at other rows": (by.stored, Map.moved)}
            if not of_numbers:
                ways[": rows of sequences that overlap in memory are added up"] = by, Map.shared
        for nothing in (0.0, -np.inf) if names[0] in ("lse", "jvp lse") else (0.0,):
            for how, (of, way) in ways.items():
                text = f"{whose}{how}: {by.words.replace('read', 'stored')}"
                yield Bug(kind, text, stages, store=stored(of, names, nothing, way))


def _given(question: Question, names: Iterable[str]) -> bool:
    """Whether a question has all of these that it may lack."""
    return all(getattr(question, n) is not None for n in names if n in ("dlse", *DIRECTIONS[-1]))


def _permuted(question: Question, stage: str) -> Iterator[Bug]:
    """Two or three arrays for each other; of one shape, in which rows past the end do not count."""
    shapes: dict[str, tuple[object, ...]] = {}
    for name in ("q", "k", "v"):
        lengths = question.lengths_q if name == "q" else question.lengths_k
        shapes[name] = shapes[f"t{name}"] = (lengths, *getattr(question, name).shape[1:])
    shapes |= dict.fromkeys(("dout", "out"), (*shapes["q"][:2], question.v.shape[2]))
    sets = [("q", "k", "v", *(("dout", "out") if stage in ("backward", "second") else ()))]
    sets += DIRECTIONS[-1:] if stage in ("second", "jvp") else ()
    for names, order in ((x, y) for x in sets for y in itertools.permutations(x)):
        moved = {to: of for to, of in zip(names, order, strict=True) if to != of}
        alike = all(shapes[to] == shapes[of] for to, of in moved.items())
        if 1 < len(moved) < 4 and alike and _given(question, moved.values()):
            text = ", ".join(f"{of} for {to}" for to, of in moved.items())
            yield Bug("arguments-swapped", text, (stage,), steps=reading(moved))

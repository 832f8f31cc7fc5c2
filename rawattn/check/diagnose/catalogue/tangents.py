"""More bugs of the second derivatives and of forward mode: what their products read, and tiles.

``second_order`` has the terms that are left out, held constant or scaled. Here a direction, a row
term or an operand is another than it should be, or a loop over tiles goes wrong. Names of steps
are those of ``engine``; a context is a copy, so that a step may put another array in its place for
the steps behind it.

Long by the catalogue.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import by_given_out, of, with_values
from rawattn.check.diagnose.engine.attention import (
    STEPS,
    TILES,
    Bug,
    Context,
    Floats,
    Step,
    Store,
    View,
    changed,
    solve,
    times,
)
from rawattn.check.diagnose.engine.question import Answers, Question

SECOND, JVP = ("second",), ("jvp",)
DIRECTIONS = {"q": "tQ", "k": "tK", "v": "tV"}  # names in a context
Arrays = Mapping[str, Floats]
Operands = Callable[[Context], Arrays]


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _no_rescale(question)
    yield from _head_maps(question)
    yield from _offsets(question)
    yield from _layouts(question)
    yield from _swapped(question)
    yield from _products_of_other_heads(question)
    if question.dout is not None:
        yield from _overwritten(question)
        yield from _operands(question)
        yield from _scaled_terms(question)
        yield from _row_terms(question)
        yield from _pairs(question)


def _given(question: Question) -> list[str]:
    return [name for name in DIRECTIONS if getattr(question, f"t{name}") is not None]


def _named(names: Sequence[str], stage: str) -> str:
    prefix = "dd" if stage == "second" else "t"
    return " and ".join(f"{prefix}{name}" for name in names)


def reading(arrays: Operands, step: str = "tY") -> dict[str, Step]:
    """Other arrays from ``step`` on, by default from the first that takes a direction."""

    def first(c: Context) -> Floats:
        for name, x in arrays(c).items():
            setattr(c, name, x)
        return np.asarray(STEPS[step](c))

    return {step: first}


def _of_rows(c: Context, x: np.ndarray, rows: np.ndarray) -> Floats:
    return np.asarray(x[rows[None, :], c.view.heads[:, None]], dtype=np.float64)


def _of_keys(c: Context, x: np.ndarray, keys: np.ndarray, head_kv: int) -> Floats:
    """Rows of keys that somebody sees, as the engine has them."""
    seen = (c.view.weight > 0).any(axis=(0, 1)) & (c.view.keys >= 0)
    found = np.zeros((len(keys), x.shape[2]))
    found[seen] = x[keys[seen], head_kv]
    return found


# ---- tiles ------------------------------------------------------------------------------------


def _no_rescale(question: Question) -> Iterator[Bug]:
    """Sums with E in them keep the maximum of the tile at which they were added."""
    name, longest = "no-rescale", max(question.lengths_k, default=0)
    sizes = [question.block_size] if question.sparse else [t for t in TILES if 8 < t < longest]
    for tile in sizes:
        for text, backwards in (("", False), (", from the last", True)):
            at = f"tile of {tile}{text}"
            grown = _grown(tile, backwards)
            e, tO = {"e": _sum(grown)}, {"tO": _tangent_of_out(grown)}
            of_sum = e | {"tO": by_given_out}
            yield Bug(name, f"row sum of P o E, {at}", JVP + SECOND, steps=of_sum)
            yield Bug(name, f"accumulator of tout, {at}", JVP, steps=tO)
            yield Bug(name, f"both of them, {at}", JVP, steps=e | tO)


def _overwritten(question: Question) -> Iterator[Bug]:
    """A gradient that the loop stores and does not add to: it holds one tile alone."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [question.block_size] if question.sparse else [t for t in TILES if 8 < t < longest]
    loops = {
        "gq": ("key", ("gQ",)),
        "gk and gv": ("query", ("gK", "gV")),
        "gk": ("query", ("gK",)),
        "gv": ("query", ("gV",)),
    }
    for tile in sizes:
        for tensor, (loop, steps_of) in loops.items():
            for which, last in (("last", True), ("first", False)):
                kept = _one_tile(tile, last, loop == "key")
                steps = {name: _but_for(name, kept) for name in steps_of}
                verb = "hold" if "and" in tensor else "holds"
                text = f"{tensor} {verb} the {which} {loop} tile alone, tile of {tile}"
                yield Bug("tile-overwrites", text, SECOND, steps=steps)


def _one_tile(tile: int, last: bool, of_keys: bool) -> Step:
    """The last, or first, tile of keys that a tile of queries sees, or the other way round."""

    def part(c: Context) -> Floats:
        n, m = c.P.shape[1:]
        seen = np.broadcast_to(c.W > 0, c.P.shape)
        i, j = np.arange(n)[:, None] // tile, np.arange(m) // tile
        pairs = np.zeros((len(seen), -(-n // tile), -(-m // tile)), dtype=bool)
        head, row, key = np.nonzero(seen)
        pairs[head, row // tile, key // tile] = True
        axis = 2 if of_keys else 1
        number = np.arange(pairs.shape[axis])
        number = number if of_keys else number[:, None]
        ends = np.where(pairs, number, -1).max(axis=axis, keepdims=True, initial=-1)
        if not last:
            far = pairs.shape[axis]
            ends = np.where(pairs, number, far).min(axis=axis, keepdims=True, initial=far)
        return np.asarray((pairs & (number == ends))[:, i, j])

    return part


def _grown(tile: int, backwards: bool) -> Step:
    """exp(final maximum - maximum after a tile), for each key of the tile."""

    def factor(c: Context) -> Floats:
        m = c.S.shape[2]
        tops = np.stack([c.S[..., j : j + tile].max(axis=-1) for j in range(0, m, tile)], axis=-1)
        if backwards:
            running = np.maximum.accumulate(tops[..., ::-1], axis=-1)[..., ::-1]
        else:
            running = np.maximum.accumulate(tops, axis=-1)
        top = tops.max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            left = np.where(np.isneginf(running), 0.0, top - running)
        return np.asarray(np.exp(np.repeat(left, tile, axis=-1)[..., :m]))

    return factor


def _sum(grown: Step) -> Step:
    def e(c: Context) -> Floats:
        return np.asarray((grown(c) * c.P * np.where(c.W > 0, c.E, 0.0)).sum(axis=-1))

    return e


def _tangent_of_out(grown: Step) -> Step:
    def tO(c: Context) -> Floats:
        P = grown(c) * c.P
        PE = P * np.where(c.W > 0, c.E, 0.0)
        return np.asarray(c.r(times(c.o(PE), c.V) + times(c.o(P), c.tV) - c.e[..., None] * c.O))

    return tO


# ---- heads ------------------------------------------------------------------------------------


def _head_maps(question: Question) -> Iterator[Bug]:
    heads, heads_kv = np.arange(question.num_heads_q), question.num_heads_kv
    if heads_kv == 1 or question.group == 1:
        return
    maps = {"h % num_heads_kv": heads % heads_kv, "0": 0 * heads}
    given = [name for name in _given(question) if name != "q"]
    for text, of_head in maps.items():
        for names in ([name] for name in given) if len(given) < 2 else (["k"], ["v"], ["k", "v"]):
            steps = reading(_of_other_heads(tuple(names), of_head))
            for stages in (SECOND, JVP):
                variant = f"{_named(names, stages[0])} of head {text}"
                yield Bug("gqa-head-map", variant, stages, _each_head, steps)
    steps = reading(_right_heads, "Y")
    yield Bug("gqa-reduction-map", "h % num_heads_kv", SECOND, _sums_of_others, steps)


def _products_of_other_heads(question: Question) -> Iterator[Bug]:
    """One product alone, or all, read a direction, or another array, of another head."""
    name, group, heads_kv = "gqa-head-map", question.group, question.num_heads_kv
    heads, given = np.arange(question.num_heads_q), _given(question)
    if group == 1:
        return
    different: dict[bytes, str] = {heads.tobytes(): ""}
    for text, of_head in {
        "the first head of the group": heads // group * group,
        "head h // group": heads // group,
        "head h % num_heads_kv": heads % heads_kv,
        "the last head of the group": heads // group * group + group - 1,
    }.items():
        if different.setdefault(of_head.tobytes(), text) != text:
            continue
        for array, (step, where) in OF_QUERIES:
            if not array.startswith("t") or "q" in given:
                other = _other_rows_of_queries(array, step, of_head)
                read = {"tQ": "ddq", "Q": "q", "dO": "dout"}[array]
                yield Bug(name, f"{read} of {text} in {where}", SECOND, steps={step: other})
        if "q" in given:
            steps = {step: _other_rows_of_queries("tQ", step, of_head) for step in ("tY", "gK")}
            yield Bug(name, f"ddq of {text}", SECOND, steps=steps)
            yield Bug(name, f"tq of {text}", JVP, steps={"tY": steps["tY"]})
    if heads_kv == 1:
        return
    for text, of_head in {"h % num_heads_kv": heads % heads_kv, "0": 0 * heads}.items():
        for direction, step, where in OF_KEYS_IN:
            if direction in given:
                step_of = _with_other_keys(direction, step, of_head)
                variant = f"dd{direction} of head {text} in {where}"
                yield Bug(name, variant, SECOND, _each_head, {step: step_of})
                if step in ("tY", "tO"):
                    text_of = f"t{direction} of head {text} in {where}"
                    yield Bug(name, text_of, JVP, _each_head, {step: step_of})


OF_QUERIES = (  # arrays of queries, and where they are read
    ("tQ", ("gK", "dS^T ddq of gk")),
    ("tQ", ("tY", "E")),
    ("Q", ("gK", "dS'^T q of gk")),
    ("dO", ("gV", "gv")),
    ("dO", ("tdP", "dout ddv^T")),
    ("dO", ("w", "W")),
)
OF_KEYS_IN = (
    ("k", "gQ", "dS ddk of gq"),
    ("k", "tY", "E"),
    ("v", "tO", "ddout"),
    ("v", "tdP", "dout ddv^T"),
)


def _other_rows_of_queries(name: str, step: str, of_head: np.ndarray) -> Step:
    def other(c: Context) -> Floats:
        x = {"tQ": c.question.tq, "Q": c.question.q, "dO": c.question.dout}[name]
        found = x[c.view.rows[None], of_head[c.view.heads][:, None]].astype(np.float64)
        return np.asarray(STEPS[step](changed(c, **{name: found})))

    return other


def _with_other_keys(direction: str, step: str, of_head: np.ndarray) -> Step:
    arrays = _of_other_heads((direction,), of_head)
    return lambda c: STEPS[step](changed(c, **arrays(c)))


def _each_head(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """The same views, one for each query head."""
    return [
        replace(
            view,
            heads=view.heads[i : i + 1],
            weight=view.weight[i : i + 1] if len(view.weight) > 1 else view.weight,
            slot=None if view.slot is None else view.slot[i : i + 1],
            selections=None if view.selections is None else view.selections[i : i + 1],
        )
        for view in views
        for i in range(len(view.heads))
    ]


def _sums_of_others(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Gradients of keys go to another head than that which was read."""
    return [
        replace(view, head_kv=int(view.heads[0]) % question.num_heads_kv)
        for view in _each_head(question, views)
    ]


def _right_heads(c: Context) -> Arrays:
    question, head = c.question, int(c.view.heads[0]) // c.question.group
    arrays = {"K": question.k, "V": question.v, "tK": question.tk, "tV": question.tv}
    return {name: _of_keys(c, x, c.view.keys, head) for name, x in arrays.items() if x is not None}


def _of_other_heads(names: tuple[str, ...], of_head: np.ndarray) -> Operands:
    def arrays(c: Context) -> Arrays:
        head = int(of_head[c.view.heads[0]])
        return {
            DIRECTIONS[name]: _of_keys(c, getattr(c.question, f"t{name}"), c.view.keys, head)
            for name in names
        }

    return arrays


# ---- where directions are read ----------------------------------------------------------------


def _offsets(question: Question) -> Iterator[Bug]:
    """The rows of the first sequence in place of those of a later one."""
    if question.batch < 2:
        return
    given = _given(question)
    some = [[name] for name in given]
    some += [names for names in (["k", "v"], ["q", "k", "v"]) if set(names) <= set(given)]
    for names in some:
        for stages in (SECOND, JVP):
            text = f"{_named(names, stages[0])} without the sequence's offset"
            steps = reading(_first_rows(tuple(names)))
            yield Bug("input-layout", text, stages, steps=steps)


def _first_rows(names: tuple[str, ...]) -> Operands:
    def arrays(c: Context) -> Arrays:
        question, view = c.question, c.view
        rows = view.rows - question.cu_seqlens_q[view.sequence]
        keys = np.where(view.keys < 0, 0, view.keys - question.cu_seqlens_k[view.sequence])
        return {
            DIRECTIONS[name]: _of_rows(c, question.tq, rows)
            if name == "q"
            else _of_keys(c, getattr(question, f"t{name}"), keys, view.head_kv)
            for name in names
        }

    return arrays


def _layouts(question: Question) -> Iterator[Bug]:
    """(heads, tokens, columns) for (tokens, heads, columns), and the other way round."""
    for name in _given(question):
        if getattr(question, f"t{name}").shape[1] == 1:
            continue
        for text, misread in LAYOUTS.items():
            steps = reading(_in_layout(name, misread))
            for stages in (SECOND, JVP):
                variant = f"{_named([name], stages[0])}, {text}"
                yield Bug("input-layout", variant, stages, steps=steps)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "(H, T, D) as (T, H, D)": lambda x: x.swapaxes(0, 1).reshape(x.shape),
    "(T, H, D) as (H, T, D)": lambda x: x.reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1),
}


def _in_layout(name: str, misread: Callable[[np.ndarray], np.ndarray]) -> Operands:
    def arrays(c: Context) -> Arrays:
        x = misread(np.ascontiguousarray(getattr(c.question, f"t{name}")))
        if name == "q":
            return {"tQ": _of_rows(c, x, c.view.rows)}
        return {DIRECTIONS[name]: _of_keys(c, x, c.view.keys, c.view.head_kv)}

    return arrays


# ---- arrays in each other's place -------------------------------------------------------------

ROTATIONS = {  # what is read in place of each direction
    "q and k": {"q": "k", "k": "q"},
    "k and v": {"k": "v", "v": "k"},
    "q and v": {"q": "v", "v": "q"},
    "q, k and v in turn": {"q": "k", "k": "v", "v": "q"},
    "v, q and k in turn": {"q": "v", "v": "k", "k": "q"},
}


def _swapped(question: Question) -> Iterator[Bug]:
    name, given = "arguments-swapped", _given(question)
    shapes = {"q": question.q.shape, "k": question.k.shape, "v": question.v.shape}
    for order in ROTATIONS.values():
        if len({shapes[one] for one in order}) > 1 or not set(order) & set(given):
            continue
        for stages in (SECOND, JVP):
            variant = f"{_named(list(order.values()), stages[0])} read for "
            variant += _named(list(order), stages[0])
            yield Bug(name, variant, stages, steps=reading(_reordered(order)))
    for one, other in (("k", "v"), ("q", "k"), ("q", "v")):
        if shapes[one] == shapes[other]:
            stored = _exchanged(f"g{one}", f"g{other}")
            yield Bug(name, f"g{one} and g{other}", SECOND, store=stored)
    for one in given:
        own = one.upper()
        steps = reading(_with_own(own), "Y")
        for stages in (SECOND, JVP):
            yield Bug(name, f"{one} and {_named([one], stages[0])}", stages, steps=steps)


def _reordered(order: Mapping[str, str]) -> Operands:
    def arrays(c: Context) -> Arrays:
        question, view, found = c.question, c.view, {}
        for to, name in order.items():
            x = getattr(question, f"t{name}")
            if x is None:
                found[DIRECTIONS[to]] = np.zeros_like(getattr(c, DIRECTIONS[to]))
            elif to == "q":
                found["tQ"] = _of_rows(c, x, view.rows)
            else:
                found[DIRECTIONS[to]] = _of_keys(c, x, view.keys, view.head_kv)
        return found

    return arrays


def _with_own(name: str) -> Operands:
    """An input and its direction in each other's place."""
    return lambda c: {name: getattr(c, f"t{name}"), f"t{name}": getattr(c, name)}


def _exchanged(one: str, other: str) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        return {**answers, one: answers[other], other: answers[one]}

    return store


# ---- operands of products ---------------------------------------------------------------------


def _by_heads(x: Floats) -> Floats:
    return np.asarray(x.swapaxes(1, 2))


def _operands(question: Question) -> Iterator[Bug]:
    """One product of the second derivatives with another array in it."""
    given, same = _given(question), question.q.shape[2] == question.v.shape[2]
    found: dict[str, dict[str, Step]] = {}
    if "v" in given:
        found["ddout v^T for dout ddv^T"] = {"tdP": lambda c: c.r(times(c.tO, c.V.T))}
        found["ddout ddv^T for dout ddv^T"] = {"tdP": lambda c: c.r(times(c.tO, c.tV.T))}
        found["dout v^T for dout ddv^T"] = {"tdP": lambda c: c.dP}
        found["dout v^T + dout ddv^T for dout ddv^T"] = {
            "tdP": lambda c: c.r(STEPS["tdP"](c) + c.dP)
        }
    found["ddout for dout in gv"] = {"gV": lambda c: c.r(_by_heads(c.o(c.tP)) @ c.tO)}
    found["P for P' in gv"] = {"gV": lambda c: c.r(_by_heads(c.o(c.P)) @ c.dO)}
    found["P^T ddout for P'^T dout in gv"] = {"gV": lambda c: c.r(_by_heads(c.o(c.P)) @ c.tO)}
    found["P^T ddout added to gv"] = {
        "gV": lambda c: c.r(STEPS["gV"](c) + _by_heads(c.o(c.P)) @ c.tO)
    }
    found["out for ddout in W"] = {"w": lambda c: (c.dO * c.O).sum(axis=-1)}
    found["out for dout in W"] = {"w": lambda c: (c.O * c.tO).sum(axis=-1)}
    found["W for D"] = {"tdS": lambda c: STEPS["tdS"](changed(c, D=c.w))}
    found["D for W"] = {"tdS": lambda c: STEPS["tdS"](changed(c, w=c.D))}
    found["D and W exchanged"] = {"tdS": lambda c: STEPS["tdS"](changed(c, D=c.w, w=c.D))}
    if "k" in given:
        found["k for ddk in gq"] = {"gQ": lambda c: STEPS["gQ"](changed(c, tK=c.K))}
        found["ddk for k in gq"] = {"gQ": lambda c: STEPS["gQ"](changed(c, K=c.tK))}
        found["dS' for dS in gq"] = {"gQ": lambda c: STEPS["gQ"](changed(c, dY=c.tdY))}
    if "q" in given:
        found["q for ddq in gk"] = {"gK": lambda c: STEPS["gK"](changed(c, tQ=c.Q))}
        found["ddq for q in gk"] = {"gK": lambda c: STEPS["gK"](changed(c, Q=c.tQ))}
        found["dS' for dS in gk"] = {"gK": lambda c: STEPS["gK"](changed(c, dY=c.tdY))}
    if same and "v" in given and "k" in given:
        found["ddk for ddv in dout ddv^T"] = {"tdP": lambda c: c.r(times(c.dO, c.tK.T))}
    yield from of("arguments-swapped", SECOND, found)


def _scaled_terms(question: Question) -> Iterator[Bug]:
    """One of the two terms of gq, or of gk, without the scale, or with its square."""
    if math.isclose(question.scale, 1.0):
        return
    takes = {"gQ": ("gq", "dS' k", "dS ddk", "k"), "gK": ("gk", "dS'^T q", "dS^T ddq", "q")}
    for text, factor in (("without s", 1 / question.scale), ("with s twice", question.scale)):
        for step, (tensor, main, direct, input_name) in takes.items():
            for term, operand in ((main, "tdY"), (direct, "dY")):
                if operand == "dY" and input_name not in _given(question):
                    continue
                steps = {step: _times_operand(step, operand, factor)}
                yield Bug("second-scale", f"{term} of {tensor} {text}", SECOND, steps=steps)


def _times_operand(step: str, operand: str, factor: float) -> Step:
    return lambda c: STEPS[step](changed(c, **{operand: factor * getattr(c, operand)}))


# ---- row terms at other places ----------------------------------------------------------------

MISREAD: dict[str, Callable[[Question, Floats], Floats]] = {
    "(H, T) as (T, H)": lambda question, x: x.reshape(x.shape[::-1]).T,
    "(T, H) as (H, T)": lambda question, x: x.T.reshape(x.shape),
    "without the sequence's offset": lambda question, x: x[:, _local(question)],
}


def _local(question: Question) -> np.ndarray:
    """For every row its number in its sequence."""
    sequence = question.sequence_of("q")
    starts = np.asarray(question.cu_seqlens_q)[sequence]
    return np.where(sequence < 0, 0, np.arange(len(sequence)) - starts)


class _Rows:
    """The row terms of the whole problem, (num_heads_q, total_q), of the last one asked for."""

    def __init__(self) -> None:
        self.of: tuple[object, object] = (None, None)
        self.found: dict[str, Floats] = {}

    def __call__(self, c: Context, name: str) -> Floats:
        if self.of[0] is not c.question or self.of[1] is not c.given:
            self.of = c.question, c.given
            self.found = {
                term: np.zeros(c.question.q.shape[1::-1]) for term in ("w", "D", "e", "L")
            }

            def kept(other: Context) -> Floats:
                for term, x in self.found.items():
                    x[other.view.heads[:, None], other.view.rows] = getattr(other, term)
                return np.asarray(STEPS["gG"](other))

            solve(c.question, "second", Bug("", stages=SECOND, steps={"gG": kept}), given=c.given)
        return self.found[name]


def _row_terms(question: Question) -> Iterator[Bug]:
    rows = _Rows()
    for text, misread in MISREAD.items():
        if (question.batch if "offset" in text else question.num_heads_q) == 1:
            continue
        w, D, e, L = (_misread(rows, name, misread) for name in ("w", "D", "e", "L"))
        taken: dict[str, dict[str, Step]] = {
            "W": {"w": w},
            "D": {"D": D},
            "D and W": {"w": w, "D": D},
            "e": {"tP": with_values("tP", e=e), "tO": _by_right_tangent},
            "lse": {"bP": with_values("bP", L=L)},
        }
        variants = {f"{name}, {text}": steps for name, steps in taken.items()}
        yield from of("statistics-misplaced", SECOND, variants)


def _misread(rows: _Rows, name: str, misread: Callable[[Question, Floats], Floats]) -> Step:
    def step(c: Context) -> Floats:
        x = misread(c.question, rows(c, name))
        return np.asarray(x[c.view.heads[:, None], c.view.rows])

    return step


def _by_right_tangent(c: Context) -> Floats:
    return np.asarray(STEPS["tO"](changed(c, tP=STEPS["tP"](c))))


# ---- pairs of tiles ---------------------------------------------------------------------------


def _pairs(question: Question) -> Iterator[Bug]:
    """Tiles on the diagonal that the pass over keys, or that over queries, does not come to."""
    if question.sparse or question.mask_window[1] != 0:
        return
    longest = max((*question.lengths_q, 0))
    sizes = [tile for tile in TILES if 8 < tile < 2 * longest]
    for rows in sizes:
        for keys in sizes:
            if keys <= rows:
                part = _first_tile(rows, keys, at_least=rows == keys)
                text = f"on the diagonal, {rows} queries by {keys} keys"
                for names in (("gK", "gV"), ("gQ", "gK", "gV")):
                    steps = {name: _but_for(name, part) for name in names}
                    tensors = ", ".join(name.lower() for name in names)
                    yield Bug("pairs-dropped", f"{tensors}, {text}", SECOND, steps=steps)


def _first_tile(rows: int, keys: int, at_least: bool) -> Step:
    """Queries before the first tile that starts at or after a tile of keys, or behind its start."""

    def part(c: Context) -> Floats:
        n, m = c.P.shape[1:]
        start = np.arange(m) // keys * keys - (m - n)
        first = start // rows * rows + rows if at_least else -(-start // rows) * rows
        return np.asarray(np.arange(n)[:, None] >= np.maximum(first, 0))

    return part


def _but_for(name: str, part: Step) -> Step:
    def step(c: Context) -> Floats:
        kept = part(c)
        products = {operand: getattr(c, operand) * kept for operand in ("tdY", "dY", "tP")}
        return np.asarray(STEPS[name](changed(c, **products)))

    return step

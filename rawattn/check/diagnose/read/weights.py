"""What weights are in place of the right ones: who sees whom, its class, and which scores."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, maps
from rawattn.check.diagnose.catalogue.masks import unmasked, windows
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, changed
from rawattn.check.diagnose.engine.steps import LOG2_E
from rawattn.check.diagnose.evidence.places import Array, Places, log_sum
from rawattn.check.diagnose.evidence.structure import Rule, Shown, mask_rule, rules_of, where
from rawattn.check.diagnose.evidence.support import LESS, MORE, OTHER, Support, support_of
from rawattn.check.diagnose.read import fields
from rawattn.check.diagnose.read.fields import Field, Term, adding, context_of, term_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import COARSE, Said, of_lists, say_moves, say_rows
from rawattn.check.diagnose.read.sums import say_sums, say_values

BACKWARD_ONLY = "mask-missing-in-backward"
TAILS = ("j - seqlen_k // ", "i - seqlen_q // ")  # places behind the last whole tile
OF_EXP: dict[str, Callable[[Array, Array], Array]] = {  # by S, and S less the row's maximum
    "the fraction of (S - row_max) log2(e)": lambda S, below: below * LOG2_E % 1,
    "S - row_max": lambda S, below: below,
    "the fraction of S log2(e)": lambda S, below: S * LOG2_E % 1,
    "S": lambda S, below: S,
}
# parts of the keys, by how many keys and how many parts: tiles, or lanes
PARTS = {f"tile of {t} keys": (t, 1 << 30) for t in (128, 64, 32, 16, 8, 4)}
PARTS |= {f"j // {t} % {n}": (t, n) for t in (4, 8) for n in (2, 4)}
MOST = 128  # times that a key may count
MANY, RARE = 60, 0.02  # weights; parts that may hold several numbers
# how little neighbours differ, in units of what any two do; of exp the most that it is off by
SMOOTH, LEAST, ABOUT = {8: 0.05, 4: 0.05, 2: 0.3}, 1e-6, 0.2
LAST = ("(seqlen_k - 1) // ", "(seqlen_q - 1) // ")  # those of the last tile


def said_of(read: Weights, second: Callable[[], Weights], support: Support | None = None) -> Said:
    """``second``: the same on other lengths, to check rules. support: what was read before."""
    places = read.places
    if (listed := next(of_lists(read, second), None)) is not None:
        return listed
    said = Said(read, Support(places, places.rights & read.seen, ()))
    if not read.alive.all():
        dead = where(places.question, "out", ~read.alive.T)
        said.wrong.append(f"rows are NaN: {', '.join(dead)}")
    alive = read.alive & read.telling
    due = read.seen & places.rights & alive[..., None]
    if moved := _map_of_lse(read) if read.passed else None:
        said.right += ["scores and softmax_scale", "who sees whom"]
        said.say(f"lse is that of other rows: {moved[0].words}", "statistics-misplaced")
        said.steps["bP"] = partial(_with_lse, *moved)
    else:
        _say_scores(said, Field(read.logs - read.right.S, due, True, read.noise), second)
    if moved or "stale-tile" in said.names:
        said.support = replace(said.support, seen=places.rights)
        return said
    here = _pairs(said, read)
    if (here[1] != places.rights)[alive].any():
        said.support = support or support_of(here, _pairs(said, second()))
    if said.support.named or not said.unread:
        _say_support(said, alive)
    if not said.unread:
        say_sums(said, second)
    if said.unread or not said.support.named or "neighbour-leak" in said.names:
        say_rows(said)
    say_values(said)
    return said


def _map_of_lse(read: Weights) -> tuple[maps.Map, float] | None:
    """By which map a backward pass takes lse, where nothing else is wrong with P, as ``map_of``."""
    seen, rights, noise = read.seen, read.places.rights, 3 * read.noise
    told = rights.any(axis=-1) & read.alive & read.telling
    gone = told & ~seen.any(axis=-1)  # rows with an lse of no keys have no weights
    found = np.where(seen & told[..., None], read.right.S - read.logs, np.nan)
    found[gone] = np.inf
    held = fields.rows_of(np.where(rights, found, np.nan), noise)
    if (seen != rights & ~gone[..., None])[told].any() or held is None:
        return None
    if not (np.abs(held - read.right.lse) > noise)[told & ~gone].any():  # but for lost rows
        return None
    calls = [(np.where(np.isfinite(L), L, np.inf), at) for L, at in read.calls]
    return fields.map_of(read.places.question, calls, held, noise)


def _with_lse(by: maps.Map, nothing: float, c: Context) -> Array:
    q = c.question
    L = by.moved(maps.geometry(q, "lse"), inputs.array_of(q, c.given, "lse"), nothing)
    return np.asarray(STEPS["bP"](changed(c, L=inputs.of_view(c, "lse", L))))


def _say_scores(said: Said, x: Field, second: Callable[[], Weights]) -> None:
    """What ``x``, log-weights less the right scores, tells of the scores."""
    read, c = said.weights, context_of(said.weights.places, said.weights.right.S)
    fine = x.zero and read.places.question.dtype.itemsize > 2
    inexact = _of_exp(read, x.there) if fine and x.there.any() else ""
    if x.zero and not inexact:
        said.right.append("scores and softmax_scale")
        return
    if not x.zero:
        said.term = term_of(x, c) or _counted(read, second)
        said.term = said.term or (None if read.passed else term_of(x, c, many=True))
    if said.term is not None:
        said.say_term(said.term)
    elif not x.zero and (several := _repeated(read, second))[0] is not None:
        said.say(f"keys count up to {several[1][-1]:.0f} times: {several[0]}", "tile-counted-twice")
        said.unread.append("how often each")
    elif inexact or (inexact := _of_exp(read, x.there) if x.there.any() else ""):
        said.say(inexact, "narrow-intermediate")
        said.unread.append("by which approximation")
    elif x.left(np.zeros_like(c.S)) * x.noise < COARSE:
        said.right.append("scores and softmax_scale, roughly")
    elif not (_say_parts(said, second) or say_moves(said, second)):
        name, of = ("dv", "dout") if read.passed else ("out", "v")
        text = "the weights of keys that must be seen are other numbers"
        if (np.nan_to_num(read.P) < -8 * read.noise).any():
            text = f"{name} has negative weights of {of}, or rows of other sequences in it"
        said.unread.append(text)


def _say_parts(said: Said, second: Callable[[], Weights]) -> bool:
    """Whether the weights of a tile, or of lanes, are times one number in every row."""
    for words, of in PARTS.items():
        one = _by_parts(said.weights, *of)
        if one is None or (other := _by_parts(second(), *of)) is None:
            continue
        text = f"weights are times one number for each row and {words}"
        (found, basis), (again, others) = one, other
        for factors in fields.sums_of(basis, found, 2):
            if np.mean((sum(x * others[n] for n, x in factors.items()) - again) ** 2) <= 1:
                text += f": exp({fields.sum_in_words(factors)}), up to a factor of the row"
                break
        said.say(text, "no-rescale")
        said.unread.append("by what is not rescaled")
        return True
    return False


@np.errstate(invalid="ignore")
def _by_parts(read: Weights, tile: int, parts: int) -> tuple[Array, dict[str, Array]] | None:
    """Logarithms of the numbers that the weights of parts of keys are times, in units of noise and
    each row around 0, and what they may be sums of; None where a part has several, or all one."""
    S, part = read.right.S, np.maximum(read.places.j, 0) // tile % parts
    there = read.seen & read.places.rights & (read.alive & read.telling)[..., None]
    h, i, j = np.nonzero(there)
    at, shape = (h, i, part[i, j]), (*there.shape[:2], int(part.max(initial=0)) + 1)
    off, (low, top) = (read.logs - S)[there], np.full((2, *shape), np.inf)
    high, sums = -low, np.zeros(shape)
    np.minimum.at(low, at, off)
    np.maximum.at(high, at, off)
    np.minimum.at(top, at, -S[there])
    np.add.at(sums, at, np.exp(S[there]))
    known, top = np.isfinite(low), -top
    apart = known & (high - low > 8 * read.noise)
    several = known & (known.sum(axis=2, keepdims=True) > 1)
    if apart.sum() > RARE * known.sum() or several.sum() < MANY:
        return None

    def centred(x: Array) -> Array:
        x, count = np.where(known, x, 0.0), np.maximum(known.sum(axis=2, keepdims=True), 1)
        return np.asarray((x - x.sum(axis=2, keepdims=True) / count)[several])

    found = centred(low) / read.noise
    down = np.maximum.accumulate(top[..., ::-1], axis=2)[..., ::-1]
    of_parts = {"its row_max": top, "row_max so far": np.maximum.accumulate(top, axis=2)}
    of_parts["row_max so far, from the last on"] = down
    of_parts["its own lse"] = np.log(np.where(known, sums, 1.0))
    basis = {name: centred(x) / read.noise for name, x in of_parts.items()}
    return (found, basis) if bool(np.abs(found).max() > 8) else None


def _of_exp(read: Weights, there: Array) -> str:
    """Whether weights are off by a smooth function of their scores, in words; "" if not."""
    S = np.where(there, read.right.S, -np.inf)
    of_lse = read.right.lse[..., None]  # that a backward pass is given
    top, lse = (of_lse,) * 2 if read.passed else (S.max(axis=-1, keepdims=True), read.lse)
    off = np.where(there, read.logs - read.right.S, 0.0)
    known = [off - np.take_along_axis(off, S.argmax(axis=-1)[..., None], axis=-1)]
    known += [] if lse is None else [off + np.where(there, lse.reshape(*top.shape), 0.0)]
    with np.errstate(invalid="ignore"):
        below = np.where(np.isfinite(top), S - top, -np.inf)
    for off, keys, (words, at) in product(known, (1 << 30, 16), OF_EXP.items()):
        some = there & (below < 0) & (there.sum(axis=-1, keepdims=True) <= keys)
        e = off[some][np.argsort(at(S[some], below[some]), kind="stable")]
        most = float(np.abs(np.expm1(e)).max(initial=0.0))
        smooth = SMOOTH[read.places.question.dtype.itemsize]
        told = e.size > MANY and LEAST < most < ABOUT
        if told and np.mean(np.diff(e) ** 2) < smooth * 2 * e.var():
            off_by = f"off by up to {fields.number(most)} of it"
            words = words.replace("row_max", "lse") if read.passed else words
            return f"exp is not exact: {off_by}, which hangs on {words} alone"
    return ""


def _pairs(said: Said, read: Weights) -> tuple[Places, Array, Array]:
    """Who sees whom, as ``support_of`` takes it; also where the weight is too small to be seen."""
    right = read.places.rights
    S = said.scores(read.places, read.right.S)
    total = log_sum(np.where(right, S, -np.inf))
    small = S - np.where(np.isfinite(total), total, 0.0)[..., None]
    seen = read.seen | (right & (small < np.log(read.least) + 1))
    return read.places, seen, (read.alive & read.telling)[..., None]


def _say_support(said: Said, alive: Array) -> None:
    places, rules = said.support.places, said.support
    if rules.right:
        said.right.append("who sees whom")
        return
    q, heads = places.question, places.question.num_heads_q
    due = "the keys of its blocks" if q.sparse else mask_rule(q) or "every key"
    must = f" (it must see {due})"
    if rules.of_rows:
        told = "; ".join(part.text(heads).partition(": ")[2] for part in rules.parts)
        what = "add nothing to dv" if said.weights.passed else "see no key, or are not written"
        said.wrong.append(f"rows {what}: {told}")
    elif rules.whole is not None:
        said.wrong.append(f"a query sees the keys of {rules.whole.rule}{must}")
    else:
        said.wrong += [part.text(heads) + must * (part.kind != OTHER) for part in rules.parts]
    said.names.append(class_of(rules, alive, backward=said.weights.passed))


def _counted(read: Weights, second: Callable[[], Weights]) -> Term | None:
    """How often, and which, where keys count more than once: to weights the logarithm is added."""
    (rule, values), q = _repeated(read, second), read.places.question
    if rule is None or len(values) > 1:
        return None
    often, every = int(values[-1]), range(q.num_heads_q if q.sparse else 1)

    def of(places: Places) -> Array:
        times = [np.where(rule.holds(places.of(head)), often, 1) for head in every]
        return np.log(np.asarray(times, dtype=np.float64))

    # of a tile: by places, not by distances or remainders
    other = any(f in ("j - i", "j - p") or "%" in f for f, *_ in rule.spans)
    name = "wrong-keys" if other or not rule.spans else "tile-counted-twice"
    name = "sparse-duplicate-twice" if q.sparse else name
    return adding(of, f"keys count {often} times: {rule}", name)


def _repeated(read: Weights, second: Callable[[], Weights]) -> tuple[Rule | None, Array]:
    """The rule of keys that count more than once, and how often some do."""
    here, often = _times(read)
    return repeated(here, _times(second())[0]) if len(often) else None, often


def repeated(*read: tuple[Places, Array, Array]) -> Rule | None:
    """The rule of pairs that count more than once: of places, how often, and where it is known."""
    every = range(len(read[0][1]) if read[0][0].question.sparse else 1)
    by_head = (Shown(of.of(h), k[h], k[h] & (n[h] > 1.5)) for of, n, k in read for h in every)
    return next(rules_of(*by_head), None)


def _times(read: Weights) -> tuple[tuple[Places, Array, Array], Array]:
    """How often each key counts, as ``repeated`` takes it, by lse or, without one, against those of
    its row that count least; the numbers above 1, if all are whole."""
    common, logs = read.seen & read.places.rights, read.logs - read.right.S
    lowest = np.where(common, logs, np.inf).min(axis=-1, keepdims=True)
    least = lowest if read.lse is None else -read.lse[..., None]
    known = common & np.isfinite(least)
    with np.errstate(over="ignore"):
        found = np.where(known, np.exp(logs - np.where(known, least, 0.0)), 0.0)
    known &= (found.max(axis=-1, keepdims=True) > 1.5) | (read.lse is not None)
    values = np.unique(np.round(found[known]))
    exact = np.abs(found - np.round(found))[known] < 8 * read.noise * np.maximum(found[known], 1)
    whole = exact.size and exact.all() and 1 < values[-1] <= MOST
    return (read.places, found, known), values[values > 1] if whole else values[:0]


def class_of(support: Support, alive: Array, *, backward: bool) -> str:
    """The class of a mask of out, or of dv. alive: rows (num_heads_q, total_q) that were read."""
    places, dense = support.places, not support.places.question.sparse
    lost, due = support.inside(LESS), places.rights & alive[..., None]
    if support.of_rows:
        name = "rows-not-written" if support.named else "unknown"
        return of_pairs(places, lost, due) if backward else name
    if dense:
        known = [(BACKWARD_ONLY, window) for _, window in unmasked(places.question) if backward]
        known += [(name, window) for name, _, window in windows(places.question)]
        seen, rows = support.seen > 0, alive[..., None] & (places.b >= 0)
        heads = ((seen != places.right) & rows).any(axis=(1, 2))  # that are wrong, all of them
        for name, window in known:
            sees = window.holds(places.j - places.p, places.j - places.i) & places.own
            if ((seen == sees) | ~rows)[heads].all():
                return name
    kinds = {part.kind for part in support.parts}
    if kinds == {OTHER}:
        own = places.question.sequence_of("k")[None] == places.b
        return "neighbour-leak" if (support.inside(OTHER) & ~own).any() else "seqused-ignored"
    spans = [span for part in support.parts if part.rule for span in part.rule.spans]
    if backward and kinds == {LESS} and dense:
        return of_pairs(places, lost, due)
    by_distance = support.named and {span.feature for span in spans} in ({"j - i"}, {"j - p"})
    if backward and kinds == {MORE} and dense and not by_distance:
        return BACKWARD_ONLY
    tails = [x.feature.startswith(TAILS) and x[1:] == (0, None) for x in spans]
    last = [x.feature.startswith(LAST) and x[1:] == (0, 0) for x in spans]
    if kinds == {LESS} and any(tails) and all(map(max, tails, last)):
        return "tail-tile-dropped"
    one = [span.feature for span in spans if span.low == span.high and "ceil" not in span.feature]
    of_tile = len(spans) == len(one) == 1 and one[0].startswith(("j //", "(seqlen_k - 1) //"))
    return "tile-skipped" if kinds == {LESS} and of_tile else "wrong-keys"


def of_pairs(x: Places, lost: Array, due: Array) -> str:
    """What ``lost`` pairs of a gradient are called, both (num_heads_q, total_q, total_k)."""
    for tile in TILES:
        for tail in (x.i >= x.n // tile * tile, x.j >= x.m // tile * tile):
            if np.array_equal(due & tail, due & lost):
                return "tail-tile-dropped"
    return "pairs-dropped"

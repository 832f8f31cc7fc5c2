"""Block-sparse attention by plain loops over the slots of every token, with bugs of these loops.

Separate from rawattn.reference, and from what rawattn-check matches answers with. A token of a head
makes its list of visits (``_visits``), softmax and gradients go visit by visit; dk and dv go key
block by key block, over the lists turned round (``_inverted``), as kernels do.

Long by the table of bugs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from tests.diagnose.planted import sparse as planted_sparse
from tests.diagnose.planted.second import Array, Planted, loaded, showing

FORWARD, BACKWARD = ("forward",), ("backward",)
BOTH = FORWARD + BACKWARD


@dataclass(frozen=True)
class Rules:
    """What is other than right. stop: where the list ends. compared: with which named blocks a
    block is compared to find repeats. own: how often the own block counts. read: what block_indices
    is taken for. end: of the last block. gate: what block_scale does. order: of the slots, not of
    their factors. tile: so many queries have the blocks of ``shared``. resets: own block "first" or
    "last" in a loop that a masked block resets. lists: what is wrong with those of dk and dv.
    place: where keys are. blocks: of which length they are counted. skip: own blocks that a
    comparison hides. gate_of: what the factor is indexed by. statistics: whose lse and delta dk and
    dv read.
    """

    stop: str = ""
    compared: str = "all"
    own: str = "once"
    read: str = ""
    end: str = "sequence"
    gate: str = "scores"
    order: str = ""
    tile: int = 1
    shared: str = "all"
    resets: str = ""
    lists: str = ""
    place: str = ""
    blocks: str = "seqlen_k"
    skip: str = ""
    gate_of: str = "slot"
    statistics: str = "own"


class Visit(NamedTuple):
    """Rows ``first`` to ``stop`` of k, the last one that is seen, the slot, and its factor."""

    block: int
    slot: int
    first: int
    stop: int
    last: int
    factor: float


_CAUSAL, _OWN, _GATE = {"causal": True}, {"own": True}, {"gate": True}
_TWICE, _PADDED, _OPEN = {"duplicates": True}, {"padding": True}, {"causal": False}


def _planted(
    bug: str, stages: tuple[str, ...], needs: dict[str, bool | int], **variants: Rules
) -> list[Planted]:
    return [
        Planted(bug, f"{name.replace('_', ' ')}, {' '.join(stages)}", stages, rules, needs)
        for name, rules in variants.items()
    ]


PLANTED = (
    *_planted(
        "sparse-list-cut",
        BOTH,
        _PADDED,
        at_a_negative=Rules(stop="negative"),
        after_so_many_as_named=Rules(stop="number"),
    ),
    *_planted("sparse-list-cut", BOTH, _TWICE, at_a_repeat=Rules(stop="repeat")),
    *_planted("sparse-list-cut", BACKWARD, _PADDED, at_a_negative=Rules(stop="negative")),
    *_planted(
        "sparse-duplicate-twice",
        BOTH,
        _TWICE,
        compared_with_the_last=Rules(compared="last"),
        compared_with_the_first=Rules(compared="first"),
    ),
    *_planted("sparse-duplicate-twice", BOTH, _OWN, own_for_every_slot=Rules(own="slots")),
    *_planted(
        "input-layout",
        BOTH,
        {},
        indices_as_words=Rules(read="words"),
        indices_of_first_rows=Rules(read="rows"),
    ),
    *_planted("input-layout", BOTH, {"heads": 2}, indices_as_T_S_H=Rules(read="tsh")),
    *_planted("input-layout", BOTH, {"heads": 2}, indices_as_H_T_S=Rules(read="hts")),
    *_planted("neighbour-leak", BOTH, _OPEN, end_of_k=Rules(end="total")),
    *_planted("neighbour-leak", BACKWARD, _OPEN, end_of_k=Rules(end="total")),
    *_planted(
        "sparse-gate-on-p",
        BOTH,
        _GATE,
        of_P=Rules(gate="P"),
        of_exp=Rules(gate="exp"),
        twice=Rules(gate="twice"),
    ),
    *_planted("sparse-gate-on-p", FORWARD, _GATE, of_P=Rules(gate="P")),
    *_planted(
        "sparse-gate-order",
        BOTH,
        _GATE,
        ascending=Rules(order="up"),
        descending=Rules(order="down"),
    ),
    *_planted("sparse-gate-order", BOTH, _GATE | _PADDED, packed=Rules(order="packed")),
    *_planted(
        "sparse-tile-union",
        BOTH,
        {},
        of_4=Rules(tile=4),
        of_32=Rules(tile=32),
        of_6=Rules(tile=6),
        of_the_first_of_8=Rules(tile=8, shared="first"),
    ),
    *_planted("sparse-tile-union", BACKWARD, {}, of_8=Rules(tile=8)),
    *_planted(
        "sparse-masked-block-resets",
        FORWARD,
        _CAUSAL,
        own_first=Rules(resets="first"),
        own_last=Rules(resets="last"),
    ),
    *_planted(
        "sparse-inverted-lists",
        BACKWARD,
        {},
        capacity=Rules(lists="capacity"),
        first_query_missing=Rules(lists="first"),
    ),
    *_planted("sparse-inverted-lists", BACKWARD, _TWICE, overflow=Rules(lists="overflow")),
    *_planted("sparse-inverted-lists", BACKWARD, _TWICE, repeats=Rules(lists="repeats")),
    *_planted("sparse-inverted-lists", BACKWARD, _OWN, no_own=Rules(lists="own")),
    *_planted("offsets-shifted", BOTH, {}, keys_of_the_first=Rules(place="first")),
    *_planted("wrong-keys", BOTH, {}, block_size_doubled=Rules(place="double")),
    *_planted("wrong-keys", BOTH, {}, blocks_of_twice_the_size=Rules(place="wide")),
    *_planted("wrong-keys", FORWARD, _CAUSAL, blocks_of_twice_the_size=Rules(place="wide")),
    *_planted("wrong-keys", BOTH, {}, as_many_as_of_seqlen_q=Rules(blocks="seqlen_q")),
    *_planted("offsets-shifted", BOTH, {}, of_the_packed_array=Rules(place="packed")),
    *_planted("neighbour-leak", BOTH, _CAUSAL, of_the_packed_array=Rules(place="packed leak")),
    *_planted("sparse-own-block-missing", BOTH, _OWN | _CAUSAL, at_its_first=Rules(skip="first")),
    *_planted("sparse-own-block-missing", BOTH, _OWN | _CAUSAL, of_the_row=Rules(own="row")),
    *_planted("sparse-gate-order", BOTH, _GATE, by_block=Rules(gate_of="block")),
    *_planted("input-layout", BOTH, {}, indices_as_words_of_rows=Rules(read="row words")),
    *_planted(
        "statistics-misplaced",
        BACKWARD,
        {"grouped": True},
        of_the_groups_first_head=Rules(statistics="first"),
        of_the_groups_last_head=Rules(statistics="last"),
    ),
)


def answers(planted: Planted | None, question: Question) -> Answers:
    """out, lse, and the gradients."""
    rules = {stage: planted.change for stage in planted.stages} if planted else {}
    computed = forward(question, rules.get("forward", Rules()))
    if "backward" in question.stages:
        out, lse = question.out, question.lse
        if out is None or lse is None:
            out, lse = computed["out"], computed["lse"]
        computed |= backward(question, rules.get("backward", Rules()), out, lse)
    return computed


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """Random problems on which ``planted`` shows."""

    def given(question: Question) -> tuple[Array, Array]:
        right = forward(question, Rules())
        return right["out"], right["lse"]

    return showing(planted, count, seed, planted_sparse.draw, answers, given)


# ---- lists ------------------------------------------------------------------------------------


def _indices(question: Question, rules: Rules) -> Array:
    indices = np.ascontiguousarray(question.block_indices)
    tokens, heads, slots = indices.shape
    found = indices.copy()
    if rules.read == "words":
        words = np.frombuffer(indices.astype("<i8").tobytes(), dtype="<i4")
        found = words[: indices.size].reshape(indices.shape)
    elif rules.read == "row words":
        for t, h in np.ndindex(tokens, heads):
            words = np.frombuffer(indices[t, h].astype("<i8").tobytes(), dtype="<i4")
            found[t, h] = words[:slots]
    elif rules.read == "tsh":
        flat = indices.reshape(-1)
        for t, h, s in np.ndindex(indices.shape):
            found[t, h, s] = flat[(t * slots + s) * heads + h]
    elif rules.read == "hts":
        flat = indices.reshape(-1)
        for t, h, s in np.ndindex(indices.shape):
            found[t, h, s] = flat[(h * tokens + t) * slots + s]
    elif rules.read == "rows":
        for start, stop in zip(question.cu_seqlens_q, question.cu_seqlens_q[1:], strict=False):
            found[start:stop] = indices[: stop - start]
    return found


def _slots(
    question: Question, rules: Rules, indices: Array, t: int, head: int, own: int, blocks: int
) -> list[tuple[int, int]]:
    """Block and slot of all that a token names and that counts; the own block has slot -1."""
    count = indices.shape[2]
    order = list(range(count))
    named = [int(block) for block in indices[t, head]]
    if rules.order == "up":
        named.sort()
    elif rules.order == "down":
        named.sort(reverse=True)
    elif rules.order == "packed":
        named = sorted(named, key=lambda block: not 0 <= block < blocks)
    if question.block_counts is not None:
        order = order[: max(0, int(question.block_counts[t, head]))]
    if rules.stop == "number":
        order = order[: sum(0 <= named[slot] < blocks for slot in order)]
    found: list[tuple[int, int]] = []
    for slot in order:
        block = named[slot]
        if block < 0 and rules.stop == "negative":
            break
        if not 0 <= block < blocks and rules.place not in ("first", "double"):
            continue
        if block < 0 or (rules.blocks == "seqlen_q" and block >= blocks):
            continue
        before = [other for other, _ in found]
        if rules.compared == "last":
            before = before[-1:]
        elif rules.compared == "first":
            before = [int(indices[t, head, 0])] if slot else []
        if block in before:
            if rules.stop == "repeat":
                break
            continue
        found.append((block, slot))
    if question.own and 0 <= own < blocks:
        if rules.own == "slots":
            found += [(own, -1)] * len(order)
        elif rules.place in ("first", "double") or own not in [block for block, _ in found]:
            found.append((own, -1))
    return found


def _visits(question: Question, rules: Rules) -> dict[tuple[int, int, int], list[Visit]]:
    """By sequence, token and selection head."""
    indices, size = _indices(question, rules), question.block_size
    united = rules.tile > 1 and rules.shared == "all"
    found: dict[tuple[int, int, int], list[Visit]] = {}
    for b, (length_q, length_k) in enumerate(
        zip(question.lengths_q, question.lengths_k, strict=True)
    ):
        start_q, start_k = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
        blocks = -(-(length_q if rules.blocks == "seqlen_q" else length_k) // size)
        for head in range(indices.shape[1]):
            places = [i + length_k - length_q for i in range(length_q)]
            owns = [place // size for place in places]
            if rules.own == "row":
                owns = [i // size for i in range(length_q)]
            lists = [
                _slots(question, rules, indices, start_q + i, head, own, blocks) if length_k else []
                for i, own in enumerate(owns)
            ]
            lists = _shared(question, rules, lists, owns)
            for i, entries in enumerate(lists):
                own, place = owns[i], places[i]
                visits = []
                for block, slot in entries:
                    if rules.skip == "first" and block * size >= place:
                        continue
                    width = 2 * size if rules.place == "double" and slot >= 0 else size
                    width = 2 * size if rules.place == "wide" else width
                    end = len(question.k) if rules.end == "total" and slot >= 0 else start_k
                    end = end if rules.end == "total" and slot >= 0 else start_k + length_k
                    first = start_k + block * width
                    stop = min(first + (width if rules.place == "wide" else size), end)
                    if rules.place.startswith("packed"):
                        first = start_k // size * size + block * size
                        stop = min(first + size, end)
                        first = first if "leak" in rules.place else max(first, start_k)
                    cut = question.causal or (slot < 0 and block == own and not united)
                    last = start_k + place if cut else stop - 1
                    if rules.place == "first":
                        first, stop, last = (x - start_k for x in (first, stop, last))
                    gate = question.block_scale
                    of = slot if rules.gate_of == "slot" else min(block, indices.shape[2] - 1)
                    factor = 1.0
                    if gate is not None and slot >= 0:
                        factor = float(gate[start_q + i, head, of])
                    if first < stop:
                        visits.append(Visit(block, slot, first, stop, last, factor))
                if rules.place == "double":
                    visits = _apart(visits)
                found[b, start_q + i, head] = visits
    return found


def _apart(visits: list[Visit]) -> list[Visit]:
    """The own block only where no other visit has its keys."""
    named = [visit for visit in visits if visit.slot >= 0]
    rows = {row for visit in named for row in range(visit.first, min(visit.stop, visit.last + 1))}
    own = [visit for visit in visits if visit.slot < 0]
    return named + [
        visit._replace(first=row, stop=row + 1)
        for visit in own
        for row in range(visit.first, min(visit.stop, visit.last + 1))
        if row not in rows
    ]


def _shared(
    question: Question, rules: Rules, lists: list[list[tuple[int, int]]], own: list[int]
) -> list[list[tuple[int, int]]]:
    """With the blocks of all queries of a tile, or the slots of its first one."""
    if rules.tile == 1:
        return lists
    found = []
    for i, mine in enumerate(lists):
        tile = lists[i // rules.tile * rules.tile : (i // rules.tile + 1) * rules.tile]
        slots = {block: slot for block, slot in reversed(mine)}
        if rules.shared == "first":
            entries = [(block, slot) for block, slot in tile[0] if slot >= 0]
            if question.own and own[i] >= 0 and own[i] not in [block for block, _ in entries]:
                entries.append((own[i], -1))
        else:
            union = sorted({block for entries in tile for block, _ in entries})
            entries = [(block, slots.get(block, -1)) for block in union]
        found.append(entries)
    return found


# ---- softmax and gradients --------------------------------------------------------------------


def _tile(question: Question, x: SimpleNamespace, visit: Visit, t: int, head: int) -> Array:
    """Y = s Q K^T, -inf where the visit ends before."""
    rows = np.arange(visit.first, visit.stop)
    Y = question.scale * (x.k[rows, head // question.group] @ x.q[t, head])
    return np.where(rows <= visit.last, Y, -np.inf)


def _gated(rules: Rules, Y: Array, factor: float) -> Array:
    hidden = np.isneginf(Y)
    Y = np.where(hidden, 0.0, Y)
    S = {
        "scores": factor * Y,
        "P": Y,
        "exp": Y + np.log(factor),
        "twice": factor * factor * Y,
    }[rules.gate]
    return np.where(hidden, -np.inf, S)


def forward(question: Question, rules: Rules) -> Answers:
    """By an online softmax over the visits of every token."""
    x = loaded(question)
    out, lse = x.number.zeros(*x.q.shape[:2], x.v.shape[2]), x.number.zeros(*x.q.shape[1::-1])
    lse[:] = -np.inf
    per = question.num_heads_q // question.block_indices.shape[1]
    for (_, t, selection), visits in _visits(question, rules).items():
        if rules.resets == "first":
            visits = sorted(visits, key=lambda visit: visit.slot >= 0)
        for head in range(selection * per, (selection + 1) * per):
            top, total, acc = -np.inf, 0.0, x.number.zeros(x.v.shape[2])
            for visit in visits:
                S = _gated(rules, _tile(question, x, visit, t, head), visit.factor)
                if np.isneginf(S).all():
                    if rules.resets:
                        top, total, acc = -np.inf, 0.0, 0 * acc
                    continue
                new = max(top, S.max())
                P, rescale = np.exp(S - new), np.exp(top - new)
                V = x.v[visit.first : visit.stop, head // question.group]
                times = visit.factor if rules.gate == "P" else 1.0
                acc = acc * rescale + x.number.narrow(times * P) @ V
                total, top = total * rescale + P.sum(), new
            if total > 0:
                out[t, head], lse[head, t] = acc / total, top + np.log(total)
    return x.number.store({"out": out, "lse": lse})


def backward(question: Question, rules: Rules, out: Array, lse: Array) -> Answers:
    """dq by the lists of tokens, dk and dv by those of blocks."""
    x, s = loaded(question), question.scale
    narrow = x.number.narrow
    out, lse = out.astype(x.number.wide), lse.astype(x.number.wide)
    D = (x.dout * out).sum(axis=2).T - x.dlse
    dq, dk, dv = map(np.zeros_like, (x.q, x.k, x.v))
    dgate = x.number.zeros(*question.block_indices.shape)
    per = question.num_heads_q // question.block_indices.shape[1]
    lists = _visits(question, rules)

    def pairs(visit: Visit, t: int, head: int, row: int) -> tuple[Array, Array, Array, Array]:
        """P, P as dv has it, dY, and the gradient of the factor; ``row``: whose lse and delta."""
        Y = _tile(question, x, visit, t, head)
        seen, g = ~np.isneginf(Y), visit.factor
        Y = np.where(seen, Y, 0.0)
        with np.errstate(over="ignore"):
            P = np.exp(_gated(rules, Y, g) - lse[row, t]) if lse[row, t] > -np.inf else 0 * Y
        P = np.where(seen, P, 0.0)
        dP = x.v[visit.first : visit.stop, head // question.group] @ x.dout[t, head]
        on_p = g if rules.gate == "P" else 1.0
        dS = P * (on_p * dP - D[row, t])
        inner = {"scores": g, "P": 1.0, "exp": 1.0, "twice": g * g}[rules.gate]
        of_gate = {"scores": dS * Y, "P": P * dP, "exp": dS / g, "twice": 2 * g * dS * Y}
        return P, narrow(on_p * P), narrow(inner * dS), of_gate[rules.gate]

    for (_, t, selection), visits in lists.items():
        for head in range(selection * per, (selection + 1) * per):
            for visit in visits:
                _, _, dY, of_gate = pairs(visit, t, head, head)
                rows = slice(visit.first, visit.stop)
                dq[t, head] += s * (dY @ x.k[rows, head // question.group])
                if visit.slot >= 0:
                    dgate[t, selection, visit.slot] += of_gate.sum()
    for t, selection, visit in _inverted(question, rules, lists):
        for head in range(selection * per, (selection + 1) * per):
            group = head // question.group * question.group
            row = {"own": head, "first": group, "last": group + question.group - 1}
            _, P, dY, _ = pairs(visit, t, head, row[rules.statistics])
            rows = slice(visit.first, visit.stop)
            dk[rows, head // question.group] += s * np.outer(dY, x.q[t, head])
            dv[rows, head // question.group] += np.outer(P, x.dout[t, head])
    results = x.number.store({"dq": dq, "dk": dk, "dv": dv})
    return results if question.block_scale is None else results | {"dblock_scale": dgate}


def _inverted(
    question: Question, rules: Rules, lists: dict[tuple[int, int, int], list[Visit]]
) -> Iterator[tuple[int, int, Visit]]:
    """Token, selection head and visit, block by block."""
    size, heads = question.block_size, question.block_indices.shape[1]
    blocks = [-(-length // size) for length in question.lengths_k]
    base = [sum(blocks[:b]) for b in range(len(blocks))]
    for selection in range(heads):
        entries: dict[int, list[tuple[int, Visit]]] = {}
        sizes: dict[int, int] = {}
        for (b, t, head), visits in lists.items():
            if head != selection:
                continue
            for visit in visits:
                place = base[b] + visit.block
                sizes[place] = sizes.get(place, 0) + 1
                if rules.lists == "own" and visit.slot < 0:
                    continue
                entries.setdefault(place, []).append((t, visit))
                if rules.lists in ("repeats", "overflow"):
                    for slot, block in enumerate(question.block_indices[t, selection]):
                        counts = question.block_counts
                        limit = slot + 1 if counts is None else int(counts[t, selection])
                        if block == visit.block and slot < limit and slot > visit.slot >= 0:
                            entries[place].append((t, visit))
        if rules.lists == "overflow":
            entries = _overflowing(entries, sizes)
        for b, number in enumerate(blocks):
            for block in range(number):
                found = entries.get(base[b] + block, [])
                if rules.lists == "capacity":
                    found = found[:9]
                elif rules.lists == "first":
                    found = found[1:]
                for t, visit in found:
                    yield t, selection, _at(question, visit, b, block, t)


def _overflowing(
    entries: dict[int, list[tuple[int, Visit]]], sizes: dict[int, int]
) -> dict[int, list[tuple[int, Visit]]]:
    """Every list has room for ``sizes``; what does not fit is written over the next one."""
    starts, total = {}, 0
    for place in sorted(sizes):
        starts[place], total = total, total + sizes[place]
    memory: list[tuple[int, Visit] | None] = [None] * (total + 1000)
    for place in sorted(entries):
        for number, entry in enumerate(entries[place]):
            memory[starts[place] + number] = entry
    return {
        place: [entry for entry in memory[start : start + sizes[place]] if entry is not None]
        for place, start in starts.items()
    }


def _at(question: Question, visit: Visit, b: int, block: int, t: int) -> Visit:
    """A visit as the block ``block`` of sequence ``b`` makes it."""
    start_q, start_k = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
    length_q, length_k = question.lengths_q[b], question.lengths_k[b]
    if start_q <= t < start_q + length_q and block == visit.block:
        return visit
    first = start_k + block * question.block_size
    stop = min(first + question.block_size, start_k + length_k)
    place = start_k + t - start_q + length_k - length_q
    factor = 1.0 if not start_q <= t < start_q + length_q else visit.factor
    last = place if question.causal else stop - 1
    return visit._replace(block=block, first=first, stop=stop, last=last, factor=factor)

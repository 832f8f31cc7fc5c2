"""Rows that nobody writes: one and the same number stands in all of them; and rows of NaN, or inf,
or without keys, where all else is right: whose they are, or that rows without keys make them."""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.catalogue.masks import dead, of_late
from rawattn.check.diagnose.engine.attention import TILES, Bug, sequences, solve
from rawattn.check.diagnose.engine.question import OF_KEYS, STAGES, Question, by_rows
from rawattn.check.diagnose.evidence.precision import eps_of, finite, rows_off
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample, in_rows

OFF = 1e-3  # of the size: what a row must be off by
SHARE = 0.9  # of all rows, at most
ENDS = ("out", "lse")
UNTOLD = ("delta", "dblock_scale", "gblock_scale")  # may be constant
Rows = np.ndarray  # (tokens, heads)
Found = dict[str, Rows]  # of tensors


def bugs(sample: Sample) -> Iterator[Bug]:
    """One with all rows of the tensors that hold a constant and should not, and one of
    those that hold no numbers, or some where there is no key, or no query that sees it."""
    question, answers, stage, constants = sample.question, sample.answers, sample.stage, Found()
    for name in (n for n in STAGES[stage] if n in sample.wrong and n not in UNTOLD):
        constant = _constant(sample, name, constants.get(name.replace("lse", "out"), False))
        if constant is not None:
            constants[name] = constant
    whole = _whole_sequences(question, constants)
    by_out = ((n.replace("out", "lse"), constants[n]) for n in constants if n.endswith(ENDS))
    # whether the rows of out are those of queries that see no key, as their lse says
    none = not whole and any(n in answers and np.isneginf(answers[n].T[x]).all() for n, x in by_out)
    if constants and not none:
        text, store = _in_words(sample, constants), lambda _, x: in_rows(constants, answers, x)
        yield Bug("rows-not-written", text, (stage,), store=store)
    nothing = {name: _none(sample, name) for name in sample.wrong}
    rows = {name: _strange(sample, name, nothing[name] & (not constants)) for name in sample.wrong}
    if found := {name: of for name, of in rows.items() if of.any()}:
        source = _of_no_keys(question, found)
        elsewhere = any((of & ~nothing[name]).any() for name, of in found.items())
        of_dead = not elsewhere and not {*found} & {*OF_KEYS}
        said = _without_keys if of_dead else _in_words
        text = source or said(sample, found) + "; all else is right" * elsewhere
        right = (finite(by_rows(name, sample.truth[name]))[of] for name, of in found.items())
        zeros = not any(x.any() for x in right)  # or -inf
        name = "dead-rows" if source or of_dead or zeros else "unknown"
        name = "rows-not-written" if zeros and {*found} <= {*OF_KEYS} and not source else name
        yield Bug(name, text, (stage,), store=lambda _, x: in_rows(found, answers, x))
    of = next((of for name, of in rows.items() if name not in OF_KEYS), np.zeros(0))
    if of.any() and not question.sparse:
        yield from of_late(question, of)


def _none(sample: Sample, name: str) -> Rows:
    """Rows that see no key, or of keys that no query sees."""
    due, nothing = by_rows(name, sample.truth[name]), dead(sample.question)
    of_keys = name in OF_KEYS or due.shape[:2] != nothing.shape
    return np.asarray((due == 0).all(axis=2)) if of_keys else nothing


def _strange(sample: Sample, name: str, none: Rows) -> Rows:
    """Rows that hold no numbers and should, and those of ``none`` that hold others."""
    x, due = sample.found[name], by_rows(name, sample.truth[name])
    off = (x != due) & (~np.isfinite(x) | none[..., None])
    rows = off.any(axis=2) & ~np.isnan(due).any(axis=2)
    return np.asarray(rows & (sample.question.sequence_of(name) >= 0)[:, None])


def _of_no_keys(question: Question, found: Found) -> str:
    """How rows without keys make all of these: some of them, and keys of sequences that have some,
    where others have none; "" where they do not."""
    nothing, reach = dead(question), np.zeros(question.k.shape[:2], dtype=bool)
    for _, rows, keys in sequences(question):
        reach[keys] = nothing[rows].any(axis=0).reshape(question.num_heads_kv, -1).any(axis=1)
    of_keys = [rows for name, rows in found.items() if name in OF_KEYS]
    others = [rows for name, rows in found.items() if name not in OF_KEYS]
    alike = all(rows.shape == nothing.shape and not rows[~nothing].any() for rows in others)
    if not of_keys or reach.all() or not alike or any((of & ~reach).any() for of in of_keys):
        return ""
    text = "NaN or inf of their P (exp of -inf + inf, or 0 times inf) gets into"
    return f"{text} {' and '.join(found)}, of keys of their sequences alone"


def _constant(sample: Sample, name: str, of_out: Rows | bool) -> Rows | None:
    """Which rows (tokens, heads) hold one number; a single one must be 0, or in rows ``of_out``."""
    x, wanted = sample.found[name], by_rows(name, sample.truth[name])
    there = np.isfinite(wanted).all(axis=2) & (sample.question.sequence_of(name) >= 0)[:, None]
    if not there.any() or not x.shape[2]:
        return None
    flat = (x == x[..., :1]).all(axis=2) & rows_off(x, wanted, there, OFF)
    flat &= (x.shape[2] > 1) | (x[..., 0] == 0) | of_out
    if not flat.any():
        return None
    numbers, counts = np.unique(x[flat, 0], return_counts=True)
    rows = flat & (x[..., 0] == numbers[counts.argmax()])
    return rows if rows.sum() < SHARE * there.sum() else None


def _whole_sequences(question: Question, found: Found) -> bool:
    """Whether the rows of out are all those of some sequences that see a key."""
    if "out" not in found:
        return False
    sequence, rows = question.sequence_of("q"), found["out"]
    alive = np.isfinite(solve(question, "forward")["lse"]).T
    of = np.isin(sequence, sequence[rows.any(axis=1)])[:, None]
    return bool((rows == (of & alive & rows.any(axis=0))).all())


def _without_keys(sample: Sample, found: Found) -> str:
    """What rows hold that see no key, and which of them."""
    q, texts = sample.question, []
    nothing, of = dead(q), None
    for name, rows in sorted(found.items(), reverse=True):  # out before lse
        x, due = sample.found[name][rows], by_rows(name, sample.truth[name])[rows]
        number = _number(x)
        if name == "out" and (mean := _mean_of(sample, rows)) is not None:
            number, of = mean
        elif of is not None and name == "lse" and len(of) == len(x) and np.isfinite(x).all():
            fill = x[:, 0] - np.log(of)  # in the dtype of lse, whose steps grow with it
            if np.ptp(fill) <= 4 * eps_of(q.q) * np.abs(fill).max(initial=1.0):
                number = f"{fill.mean():.4g} + log of their number (masked scores are not -inf)"
        number += ", not the sink" * (q.sinks is not None and bool(np.isfinite(due).all()))
        whose = _of_tiles(q, rows, nothing) or ", ".join(where(q, name, rows))
        texts.append(f"{name} is {number}" + f" ({whose})" * bool((rows != nothing).any()))
    return f"there {'; '.join(texts)}"


def _number(x: np.ndarray) -> str:
    one = np.array_equal(x, np.full_like(x, x.flat[0]), equal_nan=True)
    return f"{x.flat[0]:g}" if one else "another number"


def _of_tiles(question: Question, rows: Rows, nothing: Rows) -> str:
    """Rows without keys as those of tiles of which no query sees any."""
    at, sequence = question.place_of("q"), question.sequence_of("q")
    for t in TILES:
        same = (at[:, None] // t == at // t) & (sequence[:, None] == sequence)
        if np.array_equal(~(same @ ~nothing), rows):
            return f"in tiles of {t} queries of which no query sees a key"
    return ""


def _mean_of(sample: Sample, rows: Rows) -> tuple[str, np.ndarray] | None:
    """Of which keys, all or the first, rows (tokens, heads) of out are the mean of v; how many."""
    q, taken = sample.question, []
    sums = np.cumsum(np.pad(finite(q.v.astype(np.float64)), ((1, 0), (0, 0), (0, 0))), axis=0)
    for token, head in np.argwhere(rows):
        b, x = q.sequence_of("q")[token], sample.found["out"][token, head]
        first, m = int(q.cu_seqlens_k[b]), q.lengths_k[b]
        for stop in (m, *range(TILES[0], m, TILES[0])):
            mean = (sums[first + stop] - sums[first])[head // q.group] / max(stop, 1)
            if np.abs(x - mean).max() <= 16 * eps_of(q.q) * np.abs(mean).max():
                taken.append((stop, m))
                break
        else:
            return None
    stops, lengths = np.array(taken).T
    told = f"the first {', '.join(map(str, np.unique(stops)))} keys"
    told = "all keys of their sequence" if (stops == lengths).all() else told
    return f"the mean of v of {told}, none of which they may see", stops


def _in_words(sample: Sample, found: Found) -> str:
    texts: dict[str, list[str]] = {}
    for name, rows in found.items():
        x = sample.found[name][rows]
        none = np.unique(x[~np.isfinite(x)])[::-1]
        kinds = [f"{kind:g}".replace("nan", "NaN") for kind in none] or [_number(x)]
        places = ", ".join(where(sample.question, name, rows)).replace("only ", "of ")
        text = f"is {' or '.join(kinds)} in some rows, {places}"
        texts.setdefault(text, []).append(name)
    return "; ".join(f"{' and '.join(names)} {text}" for text, names in texts.items())

"""Rows that are read, or stored, in other places: of other sequences, of other stages of a loop."""

from dataclasses import replace

import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.judge.failures import reference_answers

RNG = np.random.default_rng(5)
Q, K, V, DOUT = (RNG.standard_normal((90, 2, 16)) for _ in range(4))
OF_Q, OF_K = np.array([0, 20, 20, 40, 80]), np.array([0, 40, 43, 45, 90])
UNEQUAL = Question(Q[:80], K, V, OF_Q, OF_K, dout=DOUT[:80])
CAUSAL = Question(Q, K, V, OF_K, OF_K, causal=True, dout=DOUT)
NEXT = OF_Q[:-1].repeat(np.diff(OF_K)) + np.arange(90) - OF_K[:-1].repeat(np.diff(OF_K))


def attention(rows: np.ndarray, keys: np.ndarray, masked: np.ndarray) -> np.ndarray:
    scores = np.einsum("ihd,jhd->hij", Q[rows], K[keys]) / 4
    P = np.exp(np.where(masked, -np.inf, scores))
    return np.einsum("hij,jhd->ihd", P / P.sum(axis=2, keepdims=True), V[keys])


def wrong(name: str) -> tuple[Question, dict[str, np.ndarray]]:
    asked = CAUSAL if name in ("stage", "tail") else UNEQUAL
    found = reference_answers(asked)
    if name == "read":  # k and v by the offsets of q
        moved = replace(asked, k=K[NEXT], v=V[NEXT])
        found = {n: reference_answers(moved)[n] for n in ("out", "lse")}
    elif name == "stored":  # dv by them
        found["dv"] = np.zeros_like(V)
        found["dv"][NEXT] = reference_answers(asked)["dv"]
    elif name == "stage":  # three stages, none of which is loaded again
        found = {"out": found["out"].copy()}
        for start, stop in ((0, 40), (45, 90)):
            i = np.arange(stop - start)
            found["out"][start:stop] = attention(start + i, start + i % 24, i > i[:, None])
    else:  # rows of a tile of 16 that go on in the next sequence, from behind
        found = {"out": found["out"].copy()}
        for start, stop in ((43, 45), (40, 43), (0, 40)):
            rows, keys = np.arange(stop, start - (start - stop) // 16 * 16), np.arange(start, stop)
            found["out"][rows] = attention(rows, keys, np.zeros((len(rows), len(keys)), bool))
    return asked, found


@pytest.mark.parametrize(
    ("name", "bug", "words"),
    [
        ("read", "offsets-shifted", "k, v: the offset of the other side"),
        ("stored", "offsets-shifted", "dv is stored at other rows: the offset of the other side"),
        ("stage", "stale-tile", "v in P V of step x % 3 of a loop over 8 keys each"),
        ("tail", "neighbour-leak", "last tile of 16, are stored as its own, the last sequence"),
    ],
)
def test_other_places(name: str, bug: str, words: str) -> None:
    first = diagnose(*wrong(name)).findings[0]
    assert first.bug == bug and words in first.title

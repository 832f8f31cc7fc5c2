"""The engine and its bugs: without one it is the reference, with one it is something else.

Those that come of a constant in a first backward pass are what autograd makes of that. And nothing
raises, whatever the shapes and the answers are.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, solve
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.judge import match
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.reference.dense import allowed
from tests.diagnose.problems import FLOAT64, KINDS, Needs, draw

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def questions(seeds: int) -> Iterator[Question]:
    for seed in range(seeds):
        for kind in KINDS.values():
            yield draw(kind, np.random.default_rng(seed), FLOAT64)


def differs(found: Answers, right: Answers) -> bool:
    """Is there another number, or another row without keys?"""
    assert found.keys() == right.keys()
    different = False
    for name, x in found.items():
        here, there = np.isneginf(x), np.isneginf(right[name])
        x, y = (np.where(here | there, 0.0, a) for a in (x, right[name]))
        assert np.isfinite(x).all(), name
        different |= bool((here != there).any() or abs(x - y).max(initial=0) > 1e-6)
    return different


def beyond(question: Question) -> Iterator[Bug]:
    """Bugs of second order, forward mode and block-sparse attention."""
    found = {}
    for stage in question.stages:
        for bug in match.catalogue(question, stage):
            if bug.name.startswith(("direction-", "second-", "tangent-", "value-", "sparse-")):
                found[bug.name, bug.variant, bug.stages] = bug
    yield from found.values()


def test_every_variant_makes_a_difference() -> None:
    """In a backward pass some do only with the lse of a forward that has the bug."""
    shown: dict[tuple[str, str], bool] = defaultdict(bool)
    for question in questions(8):
        if question.rare:
            continue
        right = {stage: solve(question, stage) for stage in question.stages}
        given = right["forward"]["out"], right["forward"]["lse"]
        for bug in beyond(question):
            for stage in set(bug.stages) & set(question.stages):
                if shown[bug.name, bug.variant]:
                    continue
                different = differs(solve(question, stage, bug, given=given), right[stage])
                if not different and stage in ("backward", "second") and "forward" in bug.stages:
                    own = tuple(solve(question, "forward", bug)[name] for name in ("out", "lse"))
                    different = differs(solve(question, stage, bug, given=own), right[stage])
                shown[bug.name, bug.variant] |= different
    assert [variant for variant, different in shown.items() if not different] == []
    assert {name for name, _ in shown} <= CLASSES.keys()


# variant: what is a constant, and what D is made of
FROZEN = {
    "P of the first backward": ("P", "P dP"),
    "P and out of the first backward": ("P O", "dO O"),
    "P and delta of the first backward": ("P D", "dO O"),
    "lse and out of the first backward": ("L O", "dO O"),
    "delta": ("D", "dO O"),
    "out": ("O", "dO O"),
    "right": ("", "P dP"),
}


@pytest.mark.parametrize("variant", FROZEN)
def test_constants_are_what_autograd_makes_of_them(variant: str) -> None:
    torch = pytest.importorskip("torch")
    one = {"batch": (1, 1), "heads_kv": (1,), "groups": (1,), "masks": ("causal",)}
    sizes = {"lengths": (6, 9), "lengths_k": ("more",), "dlse": 1.0, "moved": 0.0, "past_end": 0.0}
    question = draw(replace(KINDS["dense"], **one, **sizes), np.random.default_rng(7), FLOAT64)
    constants, of_D = FROZEN[variant]

    def kept(name: str, x: "torch.Tensor") -> "torch.Tensor":
        return x.detach() if name in constants.split() else x

    assert question.dlse is not None
    leaves = [question.dout, question.dlse.T[..., None], question.q, question.k, question.v]
    leaves = [torch.tensor(x[:, 0]).requires_grad_() for x in leaves]
    dO, dL, Q, K, V = leaves
    mask = torch.tensor(allowed(len(Q), len(K), (-1, 0)))
    S = (question.scale * Q @ K.T).masked_fill(~mask, -torch.inf)
    P = kept("P", (S - kept("L", S.logsumexp(1, keepdim=True))).exp())
    out = kept("O", S.softmax(1) @ V)
    dP = dO @ V.T
    D = kept("D", ((dO * out) if of_D == "dO O" else (P * dP)).sum(1, keepdim=True))
    dS = P * (dP - (D - kept("dL", dL)))
    gradients = question.scale * dS @ K, question.scale * dS.T @ Q, P.T @ dO
    directions = [torch.tensor(x[:, 0]) for x in (question.tq, question.tk, question.tv)]
    total = sum((x * y).sum() for x, y in zip(gradients, directions, strict=True))
    wanted = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    bugs = {bug.variant: bug for bug in beyond(question) if "frozen" in bug.name}
    found = solve(question, "second", bugs.get(variant, NO_BUG))
    found["ddlse"] = found["ddlse"].T[..., None]
    for name, x in zip(STAGES["second"], wanted, strict=False):
        np.testing.assert_allclose(found[name][:, 0], x, 1e-10, 1e-10, err_msg=name)
    if constants in ("P", "P D"):  # P was saved, and has no derivative
        told = {name: x.numpy()[:, None] for name, x in zip(STAGES["second"], wanted, strict=False)}
        finding = diagnose(question, told | {"ddlse": told["ddlse"][..., 0].T}).findings[0]
        assert finding.bug in ("second-frozen-p", "second-frozen-delta")
        assert "held constant" in finding.title


# ---- odd shapes and odd answers ---------------------------------------------------------------


def odd(rng: np.random.Generator) -> Question:
    """Lengths of 0 and 1, unequal ones, selections of no slot, rows behind the last sequence."""
    few = {"lengths": (0, 5), "lengths_k": ("equal", "any"), "batch": (1, 3), "past_end": 0.7}
    sizes = {"groups": (1, 2), "heads_kv": (1, 2), "head_dims": (1, 8), "head_dims_v": (4, 8)}
    dtype = rng.choice([np.dtype("float32"), np.dtype("float64")])
    question = draw(Needs(**few, **sizes, moved=0.6, blocks={}, same_dims=0), rng, dtype)
    size, slots = int(rng.choice([1, 4, 16])), int(rng.choice([0, 1, 4]))
    of_slots = ("block_indices", "block_scale", "tblock_scale")
    cut = {name: getattr(question, name) for name in of_slots}
    cut = {name: None if x is None else x[..., :slots] for name, x in cut.items()}
    counts = question.block_counts
    cut["block_counts"] = None if counts is None else np.minimum(counts, slots)
    return replace(question, block_size=size, **cut)


def spoilt(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Something else: nothing, no numbers, other numbers."""
    found = x.astype(np.float32)
    if (kind := rng.integers(6)) == 3:
        found.reshape(-1)[::3] = np.inf
        found.reshape(-1)[1::3] = -np.inf
    others = {0: np.zeros_like(found), 1: np.full_like(found, np.nan)}
    others |= {2: rng.standard_normal(x.shape).astype(np.float32), 4: found * np.float32(1e30)}
    return others.get(int(kind), found)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_raises(seed: int) -> None:
    rng = np.random.default_rng(seed)
    question = odd(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers: Answers = {}
        for stage in question.stages:
            answers |= solve(question, stage)
            for bug in match.catalogue(question, stage):
                solve(question, stage, bug)
    if seed == 3:
        diagnose(question, {name: spoilt(rng, x) for name, x in answers.items()})


def test_a_search_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> list[Bug]:
        raise ValueError("mine")

    question = next(questions(1))
    answers = solve(question, "forward")
    answers["out"] = answers["out"] + np.arange(len(answers["out"]))[:, None, None] ** 2
    monkeypatch.setattr(match, "INFERRED", (fails,))
    with pytest.warns(match.SearchFailed, match="a bug may be missed: ValueError"):
        assert diagnose(question, answers).findings

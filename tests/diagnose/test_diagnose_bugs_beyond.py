"""The catalogue of bugs of second order, forward mode and block-sparse attention.

The engine without a bug is the reference; every variant differs from it, and those that come of a
constant in a first backward pass are what autograd makes of that. Long by the table of bugs.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue import second_order
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import NO_BUG, solve, together, views_of
from rawattn.check.diagnose.engine.question import STAGES, Question
from rawattn.check.diagnose.judge import match
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.reference import dense, second, sparse
from tests.diagnose.planted import second as planted_second
from tests.diagnose.planted import sparse as planted_sparse

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# lengths_q, lengths_k, num_heads_kv, group, and what is not usual
DENSE = {
    "plain": ([5, 9], [5, 9], 2, 1, {}),
    "causal": ([7, 1, 10], [7, 1, 10], 1, 3, {"causal": True}),
    "window": ([9, 6], [12, 6], 2, 2, {"window": (2, 1), "softmax_scale": 0.4}),
    "dead rows": ([9, 0, 4], [4, 3, 4], 1, 2, {"causal": True, "unused": 2}),
    "without dlse": ([8, 5], [11, 5], 1, 2, {"causal": True, "without": ("dlse",)}),
    "no tangent of q": ([6, 5], [6, 5], 1, 2, {"without": ("tq",)}),
    "no tangent of k": ([6, 5], [6, 5], 1, 2, {"without": ("tk",)}),
    "no tangent of v": ([6, 5], [6, 5], 1, 2, {"without": ("tv", "dlse")}),
    "scale 1": ([6, 5], [6, 5], 2, 1, {"softmax_scale": 1.0}),
}
SPARSE = {
    "plain": ([5, 19], [5, 19], 2, 1, {"gate": False}),
    "gate": ([6, 18], [6, 18], 2, 3, {}),
    "a selection per head": ([7, 17], [7, 17], 2, 2, {"per_head": True}),
    "not causal": ([9, 14], [9, 14], 2, 2, {"causal": False, "gate": False}),
    "not causal, gate": ([9, 14], [9, 14], 2, 2, {"causal": False, "counts": True}),
    "own block not asked for": ([9, 14], [9, 14], 1, 2, {"own": False, "counts": True}),
    "neither": ([9, 14], [9, 14], 1, 2, {"own": False, "causal": False, "gate": False}),
    "many slots": ([21, 8], [21, 8], 1, 2, {"slots": 7, "counts": True}),
    "no slots": ([6, 11], [6, 11], 2, 2, {"slots": 0}),
    "unequal": ([5, 0, 13, 3], [11, 2, 6, 0], 2, 2, {"unused": 3, "counts": True}),
    "sliding": ([13, 6], [13, 6], 2, 2, {"sliding": (3, 0), "gate": False}),
    "sliding, open": ([13, 6], [13, 6], 1, 2, {"sliding": (-1, 2), "gate": False}),
}


def draw(
    rng,
    lengths_q,
    lengths_k,
    num_heads_kv,
    group,
    *,
    slots=None,
    gate=True,
    counts=False,
    per_head=False,
    unused=0,
    without=(),
    **options,
):
    """A random question; rows of no sequence are NaN. Block-sparse if there are ``slots``."""
    cu_q, cu_k = (np.cumsum([0, *n]) for n in (lengths_q, lengths_k))
    total_q, total_k, heads = cu_q[-1] + unused, cu_k[-1] + unused, num_heads_kv * group
    q, k, v = (total_q, heads, 6), (total_k, num_heads_kv, 6), (total_k, num_heads_kv, 4)

    def array(shape, used):
        found = rng.standard_normal(shape)
        found[used:] = np.nan
        return found

    shapes = {"q": q, "k": k, "v": v, "tq": q, "tk": k, "tv": v, "dout": (*q[:2], 4)}
    arrays = {
        name: array(shape, cu_k[-1] if name[-1] in "kv" else cu_q[-1])
        for name, shape in shapes.items()
    }
    arrays["dlse"] = array(q[:2], cu_q[-1]).T
    if slots is not None:
        selecting = heads if per_head else num_heads_kv
        shape = (total_q, selecting, slots)
        blocks = -(-max(lengths_k) // 4)
        options |= {"block_indices": rng.integers(-1, blocks + 1, shape), "block_size": 4}
        if counts:
            options["block_counts"] = rng.integers(-1, slots + 2, shape[:2])
        if gate:
            options |= {n: rng.standard_normal(shape) for n in ("block_scale", "tblock_scale")}
    arrays = {name: x for name, x in arrays.items() if name not in without}
    return Question(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **arrays, **options)


def dense_question(name, seed=0):
    *shape, options = DENSE[name]
    return draw(np.random.default_rng([seed, len(name)]), *shape, **options)


def sparse_question(name, seed=0):
    *shape, options = SPARSE[name]
    options = {"slots": 3, "causal": True} | options
    return draw(np.random.default_rng([seed, len(name)]), *shape, **options)


def questions():
    yield from (dense_question(name) for name in DENSE)
    yield from (sparse_question(name) for name in SPARSE)


def catalogue(question):
    yield from selection.bugs(question)
    yield from second_order.bugs(question)


# ---- the engine -------------------------------------------------------------------------------


def reference(question):
    """What rawattn.reference says, by the names of answers."""
    q, where = question, (question.cu_seqlens_q, question.cu_seqlens_k)
    options, gates = {"softmax_scale": q.softmax_scale}, ({}, {})
    first, beyond = (sparse, sparse) if q.sparse else (dense, second)
    if q.sparse:
        where = (*where, q.block_indices)
        options |= {name: getattr(q, name) for name in ("block_counts", "block_size", "causal")}
        options |= {"include_own_block": q.own, "block_scale": q.block_scale}
        gates = ({name: q.tblock_scale} for name in ("tblock_scale", "ddblock_scale"))
    else:
        options["window"] = q.mask_window
    inputs, tangents, (of_jvp, of_second) = (q.q, q.k, q.v), (q.tq, q.tk, q.tv), gates
    out, lse = first.forward(*inputs, *where, **options)
    given, dlse = (q.dout, *inputs, out, lse, *where), {"dlse": q.dlse}
    gradients = first.backward(*given, **dlse, **options)
    tangent = beyond.jvp(*inputs, *tangents, *where, **of_jvp, **options)
    twice = beyond.double_backward(*tangents, *given, **dlse, **of_second, **options)
    found = {"out": out, "lse": lse}
    found |= zip(STAGES["backward"][1:], gradients, strict=False)
    found |= zip(STAGES["jvp"], tangent, strict=True)
    found |= zip(STAGES["second"], twice, strict=False)
    if q.sliding is not None:
        window = {"window": q.sliding, "softmax_scale": q.softmax_scale}
        near = dense.forward(*inputs, *where[:2], **window)
        found |= zip(("sliding out", "sliding lse"), near, strict=True)
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize("seed", range(3))
def test_without_a_bug_the_engine_is_the_reference(seed):
    for question in (
        *(dense_question(name, seed) for name in DENSE),
        *(sparse_question(name, seed) for name in SPARSE),
    ):
        found = {}
        for stage in STAGES:
            found |= solve(question, stage)
        found.pop("delta")
        wanted = reference(question)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], 1e-12, 1e-12, err_msg=name)


# ---- all variants -----------------------------------------------------------------------------


def differs(found, right):
    """Is there another number, or another row without keys? NaN is none that a bug may make."""
    assert found.keys() == right.keys()
    different = False
    for name, x in found.items():
        here, there = np.isneginf(x), np.isneginf(right[name])
        assert np.all(np.isfinite(x) | (here & (name in ("lse", "jvp lse", "sliding lse")))), name
        x, y = (np.where(here | there, 0.0, a) for a in (x, right[name]))
        different |= (here != there).any() or abs(x - y).max(initial=0) > 1e-6
    return different


def test_every_variant_makes_a_difference_in_each_of_its_stages():
    """In a backward pass some do only with the lse of a forward that has the bug."""
    shown = defaultdict(bool)
    for question in questions():
        right = {stage: solve(question, stage) for stage in STAGES}
        given = right["forward"]["out"], right["forward"]["lse"]
        for bug in catalogue(question):
            shared = question.sparse and not bug.name.startswith("sparse")
            for stage in bug.stages:
                if shared and shown[bug.name, bug.variant, stage]:
                    continue
                different = differs(solve(question, stage, bug, given=given), right[stage])
                if not different and stage in ("backward", "second") and "forward" in bug.stages:
                    own = tuple(solve(question, "forward", bug)[name] for name in ("out", "lse"))
                    different = differs(solve(question, stage, bug, given=own), right[stage])
                shown[bug.name, bug.variant, stage] |= different
    assert [variant for variant, different in shown.items() if not different] == []


def test_classes_have_titles_and_all_of_them_have_a_variant():
    names = {
        bug.name
        for question in questions()
        for stage in STAGES
        for bug in match.catalogue(question, stage)
    }
    assert names <= CLASSES.keys()
    prefixes = ("direction-", "second-", "jvp-", "sparse-")
    beyond = {name for name in CLASSES if name.startswith(prefixes)}
    assert beyond <= names


def test_variants_of_a_class_have_names_of_their_own():
    for question in questions():
        variants = [
            (bug.name, bug.variant, stage) for bug in catalogue(question) for stage in bug.stages
        ]
        assert len(set(variants)) == len(variants)


def test_what_cannot_matter_is_left_out():
    def names(question):
        return {bug.name for bug in catalogue(question)}

    plain = dense_question("plain")
    assert not any(name.startswith("sparse") for name in names(plain))
    assert "second-group-not-summed" not in names(plain)
    assert "second-mask-missing" not in names(plain)
    assert "second-mask-missing" in names(dense_question("causal"))
    assert "second-value-term-dropped" not in names(dense_question("no tangent of v"))
    open_ = names(sparse_question("neither"))
    assert not open_ & {"sparse-not-causal", "sparse-own-block-missing", "sparse-gate-ignored"}
    assert not open_ & {"sparse-sliding-off-by-one", "sparse-counts-ignored"}
    none = names(sparse_question("no slots"))
    assert not none & {"sparse-last-slot-dropped", "sparse-padding-read", "sparse-duplicate-twice"}


# ---- directions -------------------------------------------------------------------------------


def ignoring(question, stage):
    """The bugs of ignored directions, by which of them."""
    return {
        bug.variant: bug
        for bug in catalogue(question)
        if bug.name == "direction-ignored" and stage in bug.stages
    }


@pytest.mark.parametrize("name", ["causal", "no tangent of q", "gate"])
def test_an_ignored_direction_is_one_of_zeros(name):
    question = sparse_question(name) if name in SPARSE else dense_question(name)
    for stage, prefix in (("second", "dd"), ("jvp", "t")):
        for variant, bug in ignoring(question, stage).items():
            ignored = [f"t{part.removeprefix(prefix)}" for part in variant.split(" and ")]
            zeros = {name: np.zeros_like(getattr(question, name)) for name in ignored}
            found, wanted = solve(question, stage, bug), solve(replace(question, **zeros), stage)
            for tensor, x in wanted.items():
                np.testing.assert_allclose(found[tensor], x, 1e-12, 1e-12, err_msg=tensor)


def test_directions_are_ignored_one_alone_or_all_but_one_or_all():
    found = ignoring(sparse_question("gate"), "jvp")
    assert [variant.count(" and ") for variant in found] == [0, 0, 0, 0, 2, 2, 2, 2, 3]
    assert list(ignoring(dense_question("no tangent of k"), "second")) == [
        "ddq",
        "ddv",
        "ddq and ddv",
    ]


def diagnosed(module, variant):
    """The first bug that a diagnosis names where a direction is ignored."""
    plants = (one for one in module.PLANTED if one.bug == "direction-ignored")
    planted = next(one for one in plants if one.variant == variant)
    question = next(module.problems(planted, 1, seed=0))
    findings = diagnose(question, module.answers(planted, question)).findings
    return next(finding for finding in findings if finding.bug != "rounding")


@pytest.mark.parametrize(
    ("module", "variant", "first", "alternatives"),
    [
        (planted_second, "ddq", "direction-ignored", ()),
        (planted_second, "ddv", "second-value-term-dropped", ("direction-ignored",)),
        (planted_second, "tv", "jvp-value-term-dropped", ("direction-ignored",)),
        (planted_second, "of v", "direction-ignored", ()),
        (
            planted_sparse,
            "of the gate, second jvp alone",
            "sparse-gate-gradient-missing",
            ("direction-ignored",),
        ),
    ],
)
def test_what_an_ignored_direction_is_called(module, variant, first, alternatives):
    """By the term that goes with it where it is in one alone; of several stages, by itself."""
    found = diagnosed(module, variant)
    assert (found.bug, found.alternatives) == (first, alternatives)


# ---- the planted implementation ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_planted_block_sparse_derivatives_are_right_without_a_bug(seed):
    rng = np.random.default_rng(seed)
    question = planted_sparse.draw(rng, np.dtype("float64"), gate=seed % 2 == 1, moved=True)
    found, wanted = planted_sparse.answers(None, question), reference(question)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, 1e-10, 1e-10, err_msg=name)


# ---- constants in a first backward pass -------------------------------------------------------

# variant: what is a constant, and what D is made of
FROZEN = {
    "P of the first backward": ("P", "P dP"),
    "P of the first backward, out is none": ("P", "dO O"),
    "P and out of the first backward": ("P O", "dO O"),
    "P and delta of the first backward": ("P D", "dO O"),
    "P and delta of the first backward, ddlse = 0": ("P D dL", "dO O"),
    "lse of the first backward": ("L", "P dP"),
    "lse of the first backward, out is none": ("L", "dO O"),
    "lse and out of the first backward": ("L O", "dO O"),
    "delta": ("D", "dO O"),
    "delta, ddlse = 0": ("D dL", "dO O"),
    "delta and lse": ("L D", "P dP"),
    "delta and lse, ddlse = 0": ("L D dL", "P dP"),
    "out": ("O", "dO O"),
    "right": ("", "P dP"),
}


@pytest.mark.parametrize("variant", FROZEN)
def test_constants_are_what_autograd_makes_of_them(variant):
    torch = pytest.importorskip("torch")
    question = draw(np.random.default_rng(7), [6], [9], 1, 1, causal=True)
    constants, of_D = FROZEN[variant]

    def kept(name, x):
        return x.detach() if name in constants.split() else x

    leaves = [question.dout, question.dlse.T[..., None], question.q, question.k, question.v]
    leaves = [torch.tensor(x[:, 0]).requires_grad_() for x in leaves]
    dO, dL, Q, K, V = leaves
    mask = torch.tensor(dense.allowed(6, 9, (-1, 0)))
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

    bugs = {bug.variant: bug for bug in second_order.bugs(question) if "frozen" in bug.name}
    found = solve(question, "second", bugs.get(variant, NO_BUG))
    found["ddlse"] = found["ddlse"].T[..., None]
    names = "ddout", "ddlse", "gq", "gk", "gv"
    for name, x in zip(names, wanted, strict=True):
        np.testing.assert_allclose(found[name][:, 0], x, 1e-10, 1e-10, err_msg=name)


# ---- selections -------------------------------------------------------------------------------


def bug_of(question, name, variant=""):
    return next(
        bug for bug in selection.bugs(question) if (bug.name, bug.variant) == (name, variant)
    )


def test_a_duplicate_doubles_the_weight_of_its_keys():
    question = sparse_question("neither")
    question = replace(question, block_indices=question.block_indices[..., [0, 0]])
    right = solve(question, "forward")
    twice = solve(
        question, "forward", bug_of(question, "sparse-duplicate-twice", "of the selection")
    )
    np.testing.assert_allclose(twice["out"], right["out"], 1e-12, 1e-12)
    np.testing.assert_allclose(twice["lse"], right["lse"] + np.log(2), 1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_duplicates_with_gates_are_blocks_of_their_own(stage):
    """As if the block were there once more, in a sequence of two equal blocks."""
    rng = np.random.default_rng(1)
    once = draw(rng, [3], [4], 1, 2, slots=2, own=False)
    once = replace(once, block_indices=np.zeros((3, 1, 2), int))
    keys = {name: np.concatenate([getattr(once, name)] * 2) for name in ("k", "v", "tk", "tv")}
    both = replace(once, **keys, cu_seqlens_k=np.array([0, 8]))
    both = replace(both, block_indices=np.array([0, 1]) + np.zeros((3, 1, 2), int))
    wanted = solve(both, stage)
    bug = bug_of(once, "sparse-duplicate-twice", "of the selection")
    given = tuple(solve(both, "forward")[name] for name in ("out", "lse"))
    found = solve(once, stage, bug, given=given)
    for name, x in wanted.items():
        if name in ("dk", "dv", "gk", "gv"):
            x = x[:4] + x[4:]
        np.testing.assert_allclose(found[name], x, 1e-12, 1e-12, err_msg=name)


def test_zeros_past_the_end_add_one_each_to_the_sum():
    question = sparse_question("neither")
    bug = bug_of(question, "sparse-partial-block-zeros", "where it is selected")
    found, right = (solve(question, "forward", b)["lse"] for b in (bug, NO_BUG))
    lengths = np.array(question.lengths_k)[question.sequence_of("q")]
    last = (question.block_indices[:, 0] == (lengths // 4)[:, None]).any(axis=1)
    wanted = np.exp(right) + last * (-lengths % 4)
    np.testing.assert_allclose(np.exp(found), np.broadcast_to(wanted, right.shape), 1e-12)


@pytest.mark.parametrize("one", [0, 1])
def test_two_bugs_of_the_selection_are_those_of_a_question_with_both(one):
    question = sparse_question("many slots")
    pair = (
        bug_of(question, "sparse-own-block-missing"),
        bug_of(question, "sparse-counts-ignored"),
    )
    both = together(pair[one], pair[1 - one])
    changed = replace(question, own=False, block_counts=None)
    for stage in STAGES:
        given = tuple(solve(changed, "forward")[name] for name in ("out", "lse"))
        found, wanted = solve(question, stage, both, given=given), solve(changed, stage)
        for name, x in wanted.items():
            np.testing.assert_allclose(found[name], x, 1e-12, 1e-12, err_msg=name)


def test_a_bug_of_the_sliding_branch_leaves_the_other_alone():
    question = sparse_question("sliding")
    right = solve(question, "forward")
    bug = bug_of(question, "sparse-sliding-off-by-one", "left +1")
    found = solve(question, "forward", bug)
    wanted = solve(replace(question, sliding=(4, 0)), "forward")
    for name in found:
        np.testing.assert_array_equal(found[name], wanted[name])
    assert (found["out"] == right["out"]).all() and (
        found["sliding out"] != right["sliding out"]
    ).any()
    selected = bug_of(question, "sparse-own-block-missing")
    near = views_of(question, sliding=True)
    assert selected.see(question, near) is near

"""Block-sparse attention of the reference, and its derivatives: against autograd and the contract.

Every case has a gate and directions for all four inputs; tests leave them out where that matters.
Long, one truth for each derivative.
"""

from itertools import chain, product

import numpy as np
import pytest

from rawattn.reference import dense, second, sparse
from tests.host.test_reference_second import close, dot, tensor, to_numpy

# Dead rows, empty sequences and NaN elsewhere must not even warn; torch.func does, of itself.
pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

# lengths_q, lengths_k, num_heads_kv, group, block_size, num_selected, and what is not usual: keys
# of Case.__init__
CASES = {
    "plain": ([5, 19], [5, 19], 2, 1, 4, 3, {}),
    "one token": ([1, 1], [1, 1], 1, 2, 16, 2, {}),
    "without own block": ([7, 22], [7, 22], 2, 1, 4, 2, {"own": False}),
    "not causal": ([9, 16], [9, 16], 2, 2, 4, 3, {"causal": False}),
    "neither": ([9, 16], [9, 16], 2, 2, 4, 2, {"causal": False, "own": False}),
    "many slots": ([21], [21], 1, 2, 4, 9, {}),
    "many slots, not causal": ([21], [21], 1, 2, 4, 9, {"causal": False}),
    "no slots": ([6, 11], [6, 11], 2, 2, 4, 0, {}),
    "counts": ([17, 8], [17, 8], 2, 2, 4, 4, {"counts": True}),
    "group 3": ([6, 13], [6, 13], 2, 3, 4, 2, {"counts": True}),
    "group 3, a selection per head": ([6, 13], [6, 13], 2, 3, 4, 2, {"per_head": True}),
    "group 4": ([18], [18], 2, 4, 4, 3, {"causal": False}),
    "group 4, a selection per head": ([18], [18], 2, 4, 4, 3, {"per_head": True, "counts": True}),
    "group 16": ([15], [15], 1, 16, 4, 2, {"own": False}),
    "group 16, a selection per head": ([15], [15], 1, 16, 4, 2, {"per_head": True, "own": False}),
    "longer keys": ([5, 3], [11, 18], 1, 2, 4, 3, {}),
    "longer keys, not causal": ([5, 3], [11, 18], 1, 2, 4, 2, {"causal": False}),
    "longer queries": ([13, 9], [6, 3], 1, 2, 4, 3, {}),
    "longer queries, not causal": ([13, 9], [6, 3], 1, 2, 4, 1, {"causal": False}),
    "empty": ([0, 9, 0, 4, 7, 0], [2, 9, 0, 0, 7, 0], 1, 2, 4, 2, {}),
    "past the end": ([4, 10], [7, 6], 2, 2, 4, 3, {"unused": 5, "counts": True}),
    "wide values": ([7, 9], [7, 9], 2, 2, 4, 2, {"head_dim_v": 24, "unused": 2}),
    "narrow values": ([7, 9], [7, 9], 1, 3, 4, 2, {"head_dim": 24, "unused": 2}),
    "blocks of 16": ([16, 33, 95], [16, 33, 95], 1, 2, 16, 2, {}),
    "blocks of 32": ([31, 101], [64, 101], 1, 2, 32, 2, {"per_head": True}),
    "blocks of 64": ([70, 129], [70, 129], 1, 1, 64, 2, {"own": False, "counts": True}),
    "blocks of 128": ([60, 40], [60, 300], 1, 2, 128, 2, {"causal": False}),
}
DIRECTIONS = list(product((True, False), repeat=4))  # which of q, k, v, block_scale have one


def make(name, seed=0):
    return Case(name, seed, **CASES[name][-1])


class Case:
    """Arrays and options of a case; what nothing may read is NaN."""

    def __init__(
        self,
        name,
        seed,
        *,
        head_dim=8,
        head_dim_v=8,
        own=True,
        causal=True,
        counts=False,
        per_head=False,
        unused=0,
    ):
        lengths_q, lengths_k, num_heads_kv, group, block_size, num_selected, _ = CASES[name]
        rng = np.random.default_rng([seed, len(name)])
        self.cu_q, self.cu_k = (
            np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k)
        )
        total_q, total_k = self.cu_q[-1] + unused, self.cu_k[-1] + unused
        heads = num_heads_kv * group
        heads_sel = heads if per_head else num_heads_kv
        blocks = -(-max(lengths_k) // block_size)
        items = (total_q, heads_sel, num_selected)
        self.block_indices = rng.integers(-1, blocks + 1, items).astype(np.int32)
        far = rng.random(items) < 0.1
        self.block_indices[far] = rng.choice([-(2**31), -7, blocks + 9, 2**31 - 1], far.sum())
        self.options = {
            "block_size": block_size,
            "include_own_block": own,
            "causal": causal,
            "block_counts": None,
        }
        if counts:
            self.options["block_counts"] = rng.integers(-1, num_selected + 3, items[:2])
        self.scale = 0.3 if group == 3 else head_dim**-0.5
        self.softmax_scale = 0.3 if group == 3 else None
        self.seen = [self._seen(b) for b in range(len(lengths_q))]

        def draw(rows, *shape):
            array = rng.standard_normal((rows, *shape))
            array[rows - unused :] = np.nan
            return array

        q = (total_q, heads, head_dim)
        k, v = ((total_k, num_heads_kv, d) for d in (head_dim, head_dim_v))
        counted = np.zeros(items, dtype=bool)
        for b, slot_of_key in enumerate(self.seen):
            for head, i, j in np.argwhere(slot_of_key >= 0):
                counted[self.cu_q[b] + i, head, slot_of_key[head, i, j]] = True
        g, tg = (np.where(counted, rng.standard_normal(items), np.nan) for _ in range(2))
        self.inputs = [draw(*q), draw(*k), draw(*v), g]
        self.us = [draw(*q), draw(*k), draw(*v), tg]
        self.dout, self.dlse = draw(total_q, heads, head_dim_v), draw(total_q, heads).T

    def _seen(self, b):
        """Slot of every key for every item, straight from the definition; -1 none, -2 unseen."""
        seqlen_q, seqlen_k = (int(cu[b + 1] - cu[b]) for cu in (self.cu_q, self.cu_k))
        rows = self.block_indices[self.cu_q[b] : self.cu_q[b + 1]].tolist()
        size, counts = self.options["block_size"], self.options["block_counts"]
        slot_of_key = np.full((self.block_indices.shape[1], seqlen_q, seqlen_k), -2)
        for i, row in enumerate(rows):
            pos = i + seqlen_k - seqlen_q
            for head, named in enumerate(row):
                if counts is not None:
                    named = named[: max(0, counts[self.cu_q[b] + i, head])]
                for j in range(seqlen_k):
                    if self.options["causal"] and j > pos:
                        continue
                    if j // size in named:
                        slot_of_key[head, i, j] = named.index(j // size)
                    elif self.options["include_own_block"] and pos >= 0:
                        if j // size == pos // size and j <= pos:
                            slot_of_key[head, i, j] = -1
        return slot_of_key

    def gate(self, gated):
        """The options of forward and backward, with the gate or without."""
        scale = {"softmax_scale": self.softmax_scale}
        return {**self.options, **scale, "block_scale": self.inputs[3] if gated else None}

    def forward(self, gated=True, **options):
        q, k, v, _ = self.inputs
        options = {**self.gate(gated), **options}
        return sparse.forward(q, k, v, self.cu_q, self.cu_k, self.block_indices, **options)

    def backward(self, gated=True, **options):
        options = {**self.gate(gated), "dlse": self.dlse, **options}
        return sparse.backward(*self._problem(gated), **options)

    def double_backward(self, us=None, gated=True, **options):
        *us, tg = self.us if us is None else us
        options = {**self.gate(gated), "dlse": self.dlse, "ddblock_scale": tg, **options}
        return sparse.double_backward(*us, *self._problem(gated), **options)

    def jvp(self, us=None, gated=True, **options):
        *us, tg = self.us if us is None else us
        options = {**self.gate(gated), "tblock_scale": tg, **options}
        arguments = (*self.inputs[:3], *us, self.cu_q, self.cu_k, self.block_indices)
        return sparse.jvp(*arguments, **options)

    def _problem(self, gated):
        where = (self.cu_q, self.cu_k, self.block_indices)
        return self.dout, *self.inputs[:3], *self.forward(gated), *where

    def attention(self, q, k, v, g):
        """Out and lse by torch's own operations, in the dtype of q; g and lse in float32 at least.

        The scores of a dead row are left as they are, and what comes of them is thrown away.
        """
        import torch

        (total_q, heads, _), outs, lses = q.shape, [], []
        group, group_sel = heads // k.shape[1], heads // self.block_indices.shape[1]
        g = torch.cat([g, torch.ones_like(q[:, : g.shape[1], :1], dtype=g.dtype)], 2)
        for b, slot_of_key in enumerate(self.seen):
            rows, keys = slice(*self.cu_q[b : b + 2]), slice(*self.cu_k[b : b + 2])
            if rows.start == rows.stop or keys.start == keys.stop:
                length = rows.stop - rows.start
                outs.append(torch.zeros(heads, length, v.shape[2], dtype=v.dtype))
                lses.append(torch.full((heads, length), -torch.inf, dtype=g.dtype))
                continue
            slot = torch.tensor(np.where(slot_of_key >= 0, slot_of_key, g.shape[2] - 1))
            G = torch.gather(g[rows].transpose(0, 1), 2, slot).repeat_interleave(group_sel, 0)
            K, V = (a[keys].repeat_interleave(group, 1).transpose(0, 1) for a in (k, v))
            Y = self.scale * (q[rows].transpose(0, 1) @ K.transpose(1, 2))
            seen = torch.tensor(slot_of_key > -2).repeat_interleave(group_sel, 0)
            alive = seen.any(2)
            S = (G * Y).to(q.dtype).masked_fill(~seen & alive[..., None], -torch.inf)
            outs.append(torch.where(alive[..., None], torch.softmax(S, -1) @ V, 0.0))
            lses.append(torch.where(alive, torch.logsumexp(S.to(g.dtype), -1), -torch.inf))
        unused = total_q - int(self.cu_q[-1])
        outs.append(torch.zeros(heads, unused, v.shape[2], dtype=v.dtype))
        lses.append(torch.full((heads, unused), -torch.inf, dtype=g.dtype))
        return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)

    def tensors(self, dtype="float64"):
        """q, k, v, g, dout and dlse; of a 16-bit dtype the gate and dlse are float32."""
        wide = "float64" if dtype == "float64" else "float32"
        arrays = (*self.inputs, self.dout, self.dlse)
        dtypes = (dtype, dtype, dtype, wide, dtype, wide)
        return [tensor(a, d).requires_grad_() for a, d in zip(arrays, dtypes, strict=True)]

    def autograd(self, us=None, dtype="float64"):
        """What forward, backward and double_backward return, by torch.autograd.grad."""
        *inputs, dout, dlse = self.tensors(dtype)
        out, lse = self.attention(*inputs)
        grads = gradients((out, lse), inputs, (dout, dlse), create_graph=True)
        us = self.us if us is None else us
        given = [i for i, u in enumerate(us) if u is not None]
        along = [tensor(us[i]).to(grads[i].dtype) for i in given]
        seconds = gradients([grads[i] for i in given], [dout, dlse, *inputs], along)
        return [[to_numpy(a) for a in arrays] for arrays in ((out, lse), grads, seconds)]

    def forward_mode(self, us=None, dtype="float64"):
        """What jvp returns, by torch.func.jvp."""
        import torch

        inputs = [a.detach() for a in self.tensors(dtype)[:4]]
        tangents = [
            torch.zeros_like(a) if u is None else tensor(u).to(a.dtype)
            for a, u in zip(inputs, self.us if us is None else us, strict=True)
        ]
        (out, lse), (tout, tlse) = torch.func.jvp(self.attention, tuple(inputs), tuple(tangents))
        return [to_numpy(a) for a in (out, tout, lse, tlse)]


def gradients(outputs, inputs, cotangents, **options):
    import torch

    found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    return [torch.zeros_like(a) if f is None else f for a, f in zip(inputs, found, strict=True)]


def all_close(got, wanted, rtol=1e-12):
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected, rtol)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_autograd(name):
    pytest.importorskip("torch")
    case = make(name)
    first, grads, seconds = case.autograd()
    out, lse = case.forward()
    for got, wanted in zip((out, lse, *case.backward()), (*first, *grads), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)
    results = case.double_backward()
    all_close(results, seconds)
    for head, token in np.argwhere(np.isneginf(lse)):
        assert not out[token, head].any() and not results[0][token, head].any()
        assert not results[1][head, token] and not results[2][token, head].any()


@pytest.mark.parametrize("name", CASES)
def test_jvp_matches_forward_mode(name):
    pytest.importorskip("torch")
    case = make(name)
    got = case.jvp()
    all_close(got, case.forward_mode())
    dead = np.isneginf(got[2])
    assert not got[1].swapaxes(0, 1)[dead].any() and not got[3][dead].any()
    for result, wanted in zip(got[::2], case.forward(), strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_cases_contain_what_they_should():
    """Duplicates, own blocks that are selected too, cut last blocks, dead rows, far indices."""
    named = {name: make(name) for name in CASES}
    for name in ("longer queries", "empty", "without own block", "past the end"):
        case = named[name]
        lse = case.forward()[1][:, : case.cu_q[-1]]
        assert np.isneginf(lse).any() and np.isfinite(lse).any()
    for name in ("many slots", "many slots, not causal"):
        case = named[name]
        for row in case.block_indices[:, 0].tolist():
            assert len(set(row)) < len(row)
        own = [t // 4 in row for t, row in enumerate(case.block_indices[:, 0].tolist())]
        assert any(own) and not all(own)
    assert any((abs(case.block_indices.astype(np.int64)) > 2**30).any() for case in named.values())
    assert sum(np.isnan(case.inputs[3][: case.cu_q[-1]]).any() for case in named.values()) > 20
    assert all(
        np.isfinite(case.inputs[3]).any() for name, case in named.items() if name != "no slots"
    )


@pytest.mark.parametrize("present", DIRECTIONS)
@pytest.mark.parametrize("name", ["group 3", "past the end"])
def test_absent_directions(name, present):
    pytest.importorskip("torch")
    case = make(name)
    us = [u if there else None for u, there in zip(case.us, present, strict=True)]
    got, tangents = case.double_backward(us), case.jvp(us)
    if not any(present):
        assert not any(a.any() for a in (*got, tangents[1], tangents[3]))
        return
    all_close(got, case.autograd(us)[2])
    all_close(tangents, case.forward_mode(us))


@pytest.mark.parametrize("name", CASES)
def test_relations(name):
    """<u, H w> = <w, H u>; the tangent is what the gradient says; ddout and ddlse are the jvp."""
    case, ws = make(name), make(name, seed=1).us[:3]
    ws.append(case.us[3][::-1, :, ::-1].copy())
    ws[3] = np.where(np.isnan(ws[3]), 0.5, ws[3])
    along_u, along_w = case.double_backward(), case.double_backward(ws)
    np.testing.assert_allclose(dot(ws, along_u[2:]), dot(case.us, along_w[2:]), rtol=1e-11)
    _, tout, _, tlse = case.jvp()
    cotangents = (case.dout, case.dlse)
    np.testing.assert_allclose(
        dot(cotangents, (tout, tlse)), dot(case.us, case.backward()), rtol=1e-11
    )
    all_close(along_u[:2], (tout, tlse))


@pytest.mark.parametrize("name", ["without own block", "longer keys", "one token", "group 3"])
def test_keys_that_nobody_sees_may_hold_anything(name):
    case = make(name)
    functions = (case.forward, case.backward, case.double_backward, case.jvp)
    wanted = [function() for function in functions]
    heads = case.inputs[1].shape[1]
    unseen = np.ones(case.inputs[1].shape[:2], dtype=bool)
    for b, slot_of_key in enumerate(case.seen):
        by_head = slot_of_key.reshape(heads, -1, slot_of_key.shape[2])
        unseen[case.cu_k[b] : case.cu_k[b + 1]] = (by_head == -2).all(axis=1).T
    assert unseen.any() or name not in ("without own block", "longer keys")
    for array in (*case.inputs[1:3], *case.us[1:3]):
        array[unseen] = np.nan
    for function, results in zip(functions, wanted, strict=True):
        for got, expected in zip(function(), results, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_backward_of_jvp():
    """The gradients of jvp are those that the docstring of ``second`` names, the gate's too."""
    torch = pytest.importorskip("torch")
    case, rng = make("counts"), np.random.default_rng(0)
    wtout, wtlse = case.dout, case.dlse
    wout, wlse = rng.standard_normal(wtout.shape), rng.standard_normal(wtlse.shape)
    inputs = [tensor(a).requires_grad_() for a in (*case.inputs, *case.us)]
    results = torch.func.jvp(case.attention, tuple(inputs[:4]), tuple(inputs[4:]))
    cotangents = [tensor(a) for a in (wout, wlse, wtout, wtlse)]
    wanted = torch.autograd.grad((*results[0], *results[1]), inputs, cotangents)
    of_u, then = case.backward(), case.double_backward()[2:]
    case.dout, case.dlse = wout, wlse
    got = (*(a + b for a, b in zip(case.backward(), then, strict=True)), *of_u)
    all_close(got, [to_numpy(a) for a in wanted])


@pytest.mark.parametrize("name", ["group 3", "longer keys, not causal", "no slots"])
def test_defaults(name):
    """Without a gate, as with one of ones; without dlse, as with zeros."""
    case = make(name)
    us = (*case.us[:3], None)
    results = [case.forward(False), case.backward(False), case.double_backward(us, gated=False)]
    results[1:] = [grads[:-1] for grads in results[1:] if grads[-1] is None]
    results.append(case.jvp(us, gated=False))
    case.inputs[3], case.us[3] = np.ones_like(case.inputs[3]), np.zeros_like(case.us[3])
    ones = [case.forward(), case.backward()[:-1], case.double_backward()[:-1], case.jvp()]
    for without, wanted in zip(results, ones, strict=True):
        for a, b in zip(without, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    zeros = {"dlse": np.zeros_like(case.dlse)}
    for run in (case.backward, case.double_backward):
        for a, b in zip(run(dlse=None), run(**zeros), strict=True):
            np.testing.assert_array_equal(a, b)


def results_of(case, gated=True):
    """Everything that the four functions return."""
    us = case.us if gated else (*case.us[:3], None)
    results = [*case.forward(gated), *case.backward(gated), *case.jvp(us, gated)]
    results += case.double_backward(us, gated)
    return [a for a in results if a is not None]


def all_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def every_block(case):
    blocks = -(-int(np.diff(case.cu_k).max()) // case.options["block_size"])
    items = (*case.block_indices.shape[:2], blocks)
    case.block_indices = np.broadcast_to(np.arange(blocks)[::-1], items)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 5])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in CASES if "blocks of" in name] + ["longer queries"]
)
def test_every_block_is_dense(name, own, block_size):
    """Every block selected: causal or open attention, as ``dense`` and ``second`` have it."""
    case = make(name)
    case.options |= {"block_size": block_size, "include_own_block": own, "block_counts": None}
    every_block(case)
    options = {"window": (-1, 0 if case.options["causal"] else -1), "softmax_scale": case.scale}
    (q, k, v, _), where = case.inputs, (case.cu_q, case.cu_k)
    wanted = [*dense.forward(q, k, v, *where, **options)]
    options_of_dlse = {**options, "dlse": case.dlse}
    arguments = (case.dout, q, k, v, *wanted, *where)
    wanted += dense.backward(*arguments, **options_of_dlse)
    wanted += second.jvp(q, k, v, *case.us[:3], *where, **options)
    wanted += second.double_backward(*case.us[:3], *arguments, **options_of_dlse)
    all_close(results_of(case, gated=False), wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_own_block(causal):
    """Not selected, it is seen up to the query even where causal is False; selected, as others."""
    case = make("many slots")
    case.options |= {"block_size": 32, "causal": causal}
    case.block_indices = np.full_like(case.block_indices, -1)
    wanted = dense.forward(*case.inputs[:3], case.cu_q, case.cu_k, window=(-1, 0))
    all_close(case.forward(gated=False), wanted)
    case.block_indices[..., 3] = 0
    wanted = dense.forward(*case.inputs[:3], case.cu_q, case.cu_k, window=(-1, 0 if causal else -1))
    all_close(case.forward(gated=False), wanted)
    case.inputs[3] = np.full_like(case.inputs[3], 2.5)
    scaled = {"window": (-1, 0 if causal else -1), "softmax_scale": 2.5 * case.scale}
    all_close(case.forward(), dense.forward(*case.inputs[:3], case.cu_q, case.cu_k, **scaled))


def test_lowest_slot_of_a_block_counts():
    case, again = make("group 4"), make("group 4")
    items = case.block_indices.shape[:2]
    case.block_indices = np.stack([np.full(items, 1), np.full(items, 3), np.full(items, 1)], axis=2)
    again.block_indices = np.stack([np.full(items, 1), np.full(items, 3), np.full(items, -1)], 2)
    for one in (case, again):
        one.inputs[3] = np.broadcast_to([0.5, -1.0, 9.0], (*items, 3))
        one.us[3] = np.broadcast_to([1.5, 1.0, -8.0], (*items, 3))
    all_equal(results_of(case), results_of(again))
    for gradient in (case.backward()[3], case.double_backward()[5]):
        assert gradient[..., :2].all() and not gradient[..., 2].any()


def test_order_of_slots_does_not_matter():
    case = make("many slots, not causal")
    for one in (case.inputs, case.us):
        one[3] = np.random.default_rng(0).standard_normal(one[3].shape)
    case.block_indices = np.random.default_rng(0).permuted(
        np.broadcast_to(np.arange(-3, 6), case.block_indices.shape), axis=2
    )
    wanted = results_of(case)
    for one in (case.inputs, case.us):
        one[3] = one[3][..., ::-1]
    case.block_indices = case.block_indices[..., ::-1]
    wanted[5], wanted[-1] = wanted[5][..., ::-1], wanted[-1][..., ::-1]
    all_equal(results_of(case), wanted)


def test_padding():
    """Indices outside of the sequence are like -1, and so are the slots from block_counts on."""
    case = make("counts")
    wanted = results_of(case)
    counts = case.options["block_counts"]
    case.block_indices = np.where(np.arange(4) < counts[..., None], case.block_indices, -1)
    outside = (case.block_indices < 0) | (case.block_indices >= 5)
    case.block_indices = np.where(outside, -1, case.block_indices).astype(np.int64)
    case.options["block_counts"] = None
    all_equal(results_of(case), wanted)


def test_a_selection_per_head():
    """As a selection for each of as many kv heads, whose gradients add up."""
    case, alone = (make("group 4, a selection per head") for _ in range(2))
    for arrays in (alone.inputs, alone.us):
        arrays[1:3] = (np.repeat(a, 4, axis=1) for a in arrays[1:3])
    got, wanted = results_of(case), results_of(alone)
    for i in (3, 4, 13, 14):
        wanted[i] = wanted[i].reshape(18, 2, 4, 8).sum(axis=2)
    all_close(got, wanted)


def test_backward_of_a_part_of_a_larger_attention():
    """Blocks in two selections, each with the out and lse of both: the gradients add up."""
    case = make("group 4")
    case.options |= {"include_own_block": False}
    every_block(case)
    case.inputs[3] = np.random.default_rng(0).standard_normal(case.block_indices.shape)
    q, k, v, g = case.inputs
    out, lse = case.forward()
    whole = case.backward()

    def part(blocks):
        keep = np.isin(case.block_indices, blocks)
        indices = np.where(keep, case.block_indices, -1)
        arguments = (case.dout, q, k, v, out, lse, case.cu_q, case.cu_k, indices)
        return sparse.backward(*arguments, dlse=case.dlse, **case.gate(True))

    assert g.shape[2] == 5
    for total, a, b in zip(whole, part([0, 3]), part([1, 2, 4]), strict=True):
        np.testing.assert_allclose(a + b, total, rtol=0, atol=1e-13)


def test_neighbours_do_not_leak():
    case, bad = make("empty"), make("empty")
    rows, keys = slice(*case.cu_q[4:6]), slice(*case.cu_k[4:6])

    def poisoned(array, kept):
        copy = np.full_like(array, np.nan)
        copy[kept] = array[kept]
        return copy

    kept = (rows, keys, keys, rows)
    for arrays in (bad.inputs, bad.us):
        arrays[:] = (poisoned(a, part) for a, part in zip(arrays, kept, strict=True))
    bad.dout, bad.dlse = poisoned(bad.dout, rows), poisoned(bad.dlse.T, rows).T
    both = [results_of(case), results_of(bad)]
    out, lse, jvp = (
        rows,
        (slice(None), rows),
        (rows, rows, (slice(None), rows), (slice(None), rows)),
    )
    places = (out, lse, *kept, *jvp, out, lse, *kept)
    for wanted, got, place in zip(*both, places, strict=True):
        np.testing.assert_array_equal(got[place], wanted[place])


@pytest.mark.parametrize("name", ["plain", "group 3, a selection per head", "blocks of 16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_errs_like_torch(dtype, name):
    """The largest error of every result, beside that of torch in the same dtype on the same data.

    In second order and forward mode nearly always the operations are the same and so are the
    errors. First order takes D from the rounded out, as kernels do and torch does not: what that
    errs is the same for all keys of a query, and dblock_scale sums over keys.
    """
    pytest.importorskip("torch")
    kind = np.dtype(dtype if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16)
    case = make(name)
    wide = {id(case.inputs[3]): np.float32, id(case.us[3]): np.float32}
    for arrays in (case.inputs, case.us):
        arrays[:] = (a.astype(wide.get(id(a), kind)).astype(np.float64) for a in arrays)
    case.dout = case.dout.astype(kind).astype(np.float64)
    case.dlse = case.dlse.astype(np.float32).astype(np.float64)
    exact, theirs = (
        [*chain(*case.autograd(dtype=d)), *case.forward_mode(dtype=d)] for d in ("float64", dtype)
    )
    ours = [*case.forward(rounding=kind), *case.backward(rounding=kind)]
    ours += [*case.double_backward(rounding=kind), *case.jvp(rounding=kind)]
    names = "out lse dq dk dv dg ddout ddlse gq gk gv gg out tout lse tlse".split()
    for result, wanted, torch, got in zip(names, exact, theirs, ours, strict=True):
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        errors = (abs(a - wanted)[finite].max() for a in (got, torch))
        assert 0.25 < np.divide(*errors) < (8 if result == "dg" else 3), result
        if result not in ("lse", "tlse", "ddlse", "dg", "gg"):  # those are of float32
            np.testing.assert_array_equal(got, got.astype(kind).astype(np.float64))


def test_rounding_to_float32():
    case = make("group 3")
    single = {"rounding": np.float32}
    got = [*case.forward(**single), *case.backward(**single), *case.jvp(**single)]
    got += case.double_backward(**single)
    for exact, single in zip(results_of(case), got, strict=True):
        assert single.dtype == np.float64
        alive = np.isfinite(exact)
        assert 0 < abs(single - exact)[alive].max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cupy_arrays(name):
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    case, on_gpu = make(name), make(name)
    for arrays in (on_gpu.inputs, on_gpu.us):
        arrays[:] = map(cupy.asarray, arrays)
    for key in ("dout", "dlse", "cu_q", "cu_k", "block_indices"):
        setattr(on_gpu, key, cupy.asarray(getattr(on_gpu, key)))
    if case.options["block_counts"] is not None:
        on_gpu.options["block_counts"] = cupy.asarray(case.options["block_counts"])
    for got, wanted in zip(results_of(on_gpu), results_of(case), strict=True):
        assert isinstance(got, cupy.ndarray)
        close(got.get(), wanted)

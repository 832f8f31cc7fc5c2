"""What holds for all nine functions alike: one call each, and the rules that they share.

Results and their numbers are the matter of ``test_api``, ``test_api_second``, ``test_api_sparse``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import arrays, checks, device, variants
from rawattn.variants import select
from tests.shared import fake_gpu, fake_sparse
from tests.shared.fake_gpu import GPU, MAKERS

SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "dq", "ddq", "tq", "gq"), (5, 4, 16)),
    **dict.fromkeys(("k", "dk", "ddk", "tk", "gk"), (5, 2, 16)),
    **dict.fromkeys(("v", "dv", "ddv", "tv", "gv"), (5, 2, 8)),
    **dict.fromkeys(("out", "dout", "ddout", "tout"), (5, 4, 8)),
    **dict.fromkeys(("lse", "dlse", "ddlse", "delta"), (4, 5)),
    "block_indices": (5, 2, 3),
}
INPUTS, ROWS, CU = "q k v", "dout q k v out lse", "cu_seqlens"
# the arrays of a call by position, and those that it may write to
FUNCTIONS: dict[str, tuple[str, str]] = {
    "forward": (f"{INPUTS} {CU}", "out"),
    "backward_preprocess": ("out dout", "delta"),
    "backward": (f"{ROWS} {CU}", "dq dk dv"),
    "double_backward": (f"ddq ddk ddv {ROWS} {CU}", "ddout ddlse gq gk gv"),
    "jvp": (f"{INPUTS} tq tk tv {CU}", "out tout"),
    "sparse_forward": (f"{INPUTS} {CU} block_indices", "out"),
    "sparse_backward": (f"{ROWS} {CU} block_indices", "dq dk dv"),
    "sparse_double_backward": (f"ddq ddk ddv {ROWS} {CU} block_indices", ""),
    "sparse_jvp": (f"{INPUTS} tq tk tv {CU} block_indices", ""),
}
EVERY = pytest.mark.parametrize("name", FUNCTIONS)
OFFSETS = [name for name, (arrays_, _) in FUNCTIONS.items() if CU in arrays_]
WRITING = [(name, room) for name, (_, rooms) in FUNCTIONS.items() for room in rooms.split()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_sparse.Kernels]:
    yield fake_sparse.install(monkeypatch)
    fake_sparse.remove()


def array(name: str, dtype: str = "float32") -> np.ndarray:
    """Values of their own for every array of the nine functions."""
    if name == CU:
        return np.array([0, 2, 5], np.int32)
    if name == "block_indices":
        return np.zeros(SHAPES[name], np.int32)
    rng = np.random.default_rng(len(name) + ord(name[-1]))
    return fake_gpu.aligned(rng.standard_normal(SHAPES[name]), dtype)


def given(name: str, make: Callable[[np.ndarray], Any] = lambda x: x) -> dict[str, Any]:
    """The arrays of a call, on a library."""
    x = {part: array(part) for part in FUNCTIONS[name][0].split()}
    if name == "sparse_double_backward":  # whose fakes want the out and lse of these q, k and v
        first = [x[part] for part in FUNCTIONS["sparse_forward"][0].split()]
        x["out"], x["lse"] = rawattn.sparse_forward(*first, return_lse=True)
    return {part: make(values) for part, values in x.items()}


def run(name: str, arrays_: dict[str, Any], **options: Any) -> Any:
    return getattr(rawattn, name)(*arrays_.values(), **options)


# ---- how to call ------------------------------------------------------------------------------


@EVERY
def test_a_wrong_name_has_a_remedy(name: str) -> None:
    for wrong, remedy in [
        ("max_seqlen_q", "leave it out, no maximum"),
        ("dropout_p", "leave it out, there is no dropout"),
        ("window_size", r"pass window=\(left, right\)"),
        ("wndow", rf"help\(rawattn\.{name}\)"),
    ]:
        with pytest.raises(TypeError, match=f"^{name} is given {wrong}: .*{remedy}"):
            run(name, given(name), **{wrong: 3})


@EVERY
def test_lengths_by_position_have_a_remedy(name: str) -> None:
    x = given(name)
    with pytest.raises(TypeError, match=f"^{name} is given 2 more arguments by position"):
        getattr(rawattn, name)(*x.values(), 5, 5)


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("causal", ["yes", 1, None])
def test_causal_is_a_bool(name: str, causal: Any) -> None:
    run(name, given(name), causal=np.True_)
    with pytest.raises(TypeError, match=f"causal is {causal!r}: expected True or False"):
        run(name, given(name), causal=causal)


# ---- the content of cu_seqlens ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([1, 3, 5], "starts at 1"),
        ([0, 3, 2], "falls from 3 to 2"),
        ([0, -1, 5], "falls from 0 to -1"),
        ([0, 3, 9], "ends at 9: expected at most 5"),
        ([2, 3], "starts at 2: expected 0"),  # lengths
    ],
)
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_in_host_memory_are_checked(name: str, offsets: list[int], text: str) -> None:
    x = given(name) | {CU: np.array(offsets)}
    with pytest.raises(ValueError, match=f"cu_seqlens {text}"):
        run(name, x)
    if len(offsets) == 3:
        with pytest.raises(ValueError, match=f"cu_seqlens_k {text}"):
            run(name, given(name), cu_seqlens_k=np.array(offsets))


# ---- results ----------------------------------------------------------------------------------


def sources(name: str, room: str) -> list[str]:
    """Inputs of a function that have the shape of one of its results."""
    return [part for part in FUNCTIONS[name][0].split() if SHAPES.get(part) == SHAPES[room]]


@pytest.mark.parametrize("kind", ["numpy", "cupy", "torch", "numba"])
@pytest.mark.parametrize(("name", "room"), WRITING)
def test_a_result_is_no_input(gpu: fake_sparse.Kernels, name: str, room: str, kind: str) -> None:
    make = MAKERS.get(kind, lambda x: x)
    wide = fake_gpu.aligned(np.zeros((9, *SHAPES[room][1:])), "float32")
    for part in sources(name, room):
        x = given(name, make)
        with pytest.raises(ValueError, match=f"{room} shares memory with an input: .*{room}=None"):
            run(name, x, **{room: x[part]})
        x[part] = make(wide[: SHAPES[room][0]])  # and results that begin within it
        if SHAPES[room][0] == 5:
            with pytest.raises(ValueError, match=f"{room} shares memory with an input"):
                run(name, x, **{room: make(wide[4:])})


@pytest.mark.parametrize("name", ["backward", "sparse_backward"])
def test_results_are_not_each_other(gpu: fake_sparse.Kernels, name: str) -> None:
    for make in (lambda x: x, MAKERS["torch"]):
        room = make(np.zeros(SHAPES["dk"], np.float32))
        x = given(name, make)
        x["v"], x["out"], x["dout"] = x["k"], make(array("q")), make(array("q"))
        with pytest.raises(ValueError, match="dv shares memory with dk"):
            run(name, x, dk=room, dv=room)


@pytest.mark.parametrize("name", ["backward", "sparse_backward"])
@pytest.mark.parametrize("axis", [1, 2])
def test_results_may_lie_side_by_side(name: str, axis: int) -> None:
    """dq, dk and dv of one array of all three, as that of a projection."""
    x = given(name)
    x["v"], x["out"], x["dout"] = array("k"), array("q"), array("q")
    width = (5, 8, 16) if axis == 1 else (5, 4, 48)
    packed = np.zeros(width, np.float32)
    rooms = {}
    for i, (room, heads) in enumerate((("dq", 4), ("dk", 2), ("dv", 2))):
        first = (0, 4, 6)[i]
        cut = packed[:, first:][:, :heads] if axis == 1 else packed[:, :heads, 16 * i :][..., :16]
        rooms[room] = cut
    expected = run(name, x)
    run(name, x, **rooms)
    for room, result in zip(rooms.values(), expected, strict=False):
        np.testing.assert_array_equal(room, result)


@pytest.mark.parametrize(("name", "room"), WRITING)
def test_a_result_bound_to_another_stream_is_waited_for(
    gpu: fake_sparse.Kernels, name: str, room: str
) -> None:
    x = given(name, MAKERS["numba"])
    values = np.zeros(SHAPES[room], np.float32)
    run(name, x, **{room: fake_gpu.DeviceNDArrayBase(values, 0, 99)})
    assert ("wait", fake_gpu.STREAMS["numba"], 99) in GPU.log


# ---- the life of inputs -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jax", "dlpack", "interface"])
@EVERY
def test_inputs_live_until_the_work_is_done(
    gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    device._KEPT.clear()
    run(name, given(name, MAKERS[kind]))
    [(event, kept)] = device._KEPT
    assert event.recorded == fake_gpu.STREAMS["cupy"] and not event.done
    used = {view.ptr for views in gpu.views for view in views if view is not None}
    kept_at = {
        owner.ctypes.data if kind != "interface" else owner.values.ctypes.data for owner in kept
    }
    assert len(kept_at) == len(FUNCTIONS[name][0].split()) and len(kept_at & used) >= 2
    event.done = True
    run(name, given(name, MAKERS[kind]))
    assert len(device._KEPT) == 1 and device._KEPT[0][0] is not event, "purged at the next call"
    device._KEPT.clear()


def test_a_graph_keeps_its_arrays_itself(gpu: fake_sparse.Kernels) -> None:
    device._KEPT.clear()
    GPU.capturing = True
    run("forward", given("forward", MAKERS["jax"]))
    assert not device._KEPT


@pytest.mark.parametrize("kind", ["cupy", "torch", "numba"])
def test_others_are_not_held(gpu: fake_sparse.Kernels, kind: str) -> None:
    run("forward", given("forward", MAKERS[kind]))
    assert not device._KEPT


# ---- torch ------------------------------------------------------------------------------------


@EVERY
def test_tensors_that_require_grad(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = given(name, torch.from_numpy)
    for part, tensor in x.items():
        if not tensor.is_floating_point():
            continue
        tensor.requires_grad_()
        with pytest.raises(TypeError, match=rf"{part} .* requires grad: .*no_grad\(\), or pass"):
            run(name, x)
        with torch.no_grad():
            results = run(name, x)
        results = results if isinstance(results, tuple) else (results,)
        assert not any(result.requires_grad for result in results if result is not None)
        tensor.requires_grad_(False)


def test_a_cuda_tensor_that_requires_grad(
    gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = given("forward", MAKERS["torch"])
    x["k"].requires_grad = True
    monkeypatch.setattr(fake_gpu.TORCH, "is_grad_enabled", lambda: True, raising=False)
    with pytest.raises(TypeError, match="k is a torch tensor that requires grad"):
        run("forward", x)
    monkeypatch.setattr(fake_gpu.TORCH, "is_grad_enabled", lambda: False)
    run("forward", x)


# ---- limits -----------------------------------------------------------------------------------


def test_more_heads_than_a_grid_counts() -> None:
    q = np.zeros((1, checks.MAX_HEADS + 1, 8), np.float32)
    with pytest.raises(ValueError, match="q has 65536 heads: expected at most 65535"):
        rawattn.forward(q, q[:, :1], q[:, :1], np.array([0, 1]))


def test_more_heads_than_share_a_selection() -> None:
    q = np.zeros((1, 65, 8), np.float32)
    blocks, cu = np.zeros((1, 1, 1), np.int32), np.array([0, 1])
    with pytest.raises(ValueError, match="65 query heads share a selection: expected at most 64"):
        rawattn.sparse_forward(q, q[:, :1], q[:, :1], cu, blocks)
    rawattn.sparse_forward(q[:, :64], q[:, :1], q[:, :1], cu, blocks)


# ---- the choice of a row ----------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_repeatable_jvp_does_not_go_by_size(
    gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    asked: list[bool] = []

    def note(stem: str, problem: Any, **options: Any) -> Any:
        asked.append(options.get("by_size", False))
        return select(stem, problem, **options)

    monkeypatch.setattr(variants, "select", note)
    run("jvp", given("jvp", MAKERS["cupy"]), deterministic=deterministic)
    assert asked == [not deterministic]


def test_memory_is_shared_where_elements_are() -> None:
    x = np.zeros((6, 4, 8), np.float32)
    view = arrays.NUMPY.view
    for one, other in [
        (x[:3], x[2:]),
        (x[:, :2], x[:, 1:3]),
        (x[::-1], x[:1]),
        (x[..., ::2], x[..., 2:4]),
        (x, x[2:3, 1:2, 4:5]),
    ]:
        assert arrays.share_memory(view(one, ""), view(other, ""))
    for one, other in [
        (x[:3], x[3:]),
        (x[:, :2], x[:, 2:]),
        (x[..., ::2], x[..., 1::2]),
        (x[2::-1], x[3:]),
        (x[:0], x),
        (x[:, ::2, :4], x[:, ::2, 4:]),
    ]:
        assert not arrays.share_memory(view(one, ""), view(other, ""))

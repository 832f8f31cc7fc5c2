"""Bugs that are planted in our sources are named, as `rawattn-check diff` would name them.

A plant is a line of the CUDA sources put in place of another, as a slip of the pen would do it.

Long by the table of plants.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rawattn import api, api_second, api_sparse, build
from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.judge.failures import explain_failures
from rawattn.check.sparse_cases import SparseCase
from rawattn.variants import TABLE
from tests.shared import emulated
from tests.shared.named_cases import CASES, CAUSAL, DENSE, SELECTED, SPARSE_CASES, UNEQUAL

FORWARD, SOFTMAX, MASK = "sm80/forward.cu", "base/softmax.cuh", "base/mask.cuh"
BACKWARD_KV, BACKWARD_Q = "sm80/backward_kv.cu", "sm80/backward_q.cu"
GRADIENT, PREPROCESS = "base/statistics.cuh", "sm80/backward_preprocess.cu"
TANGENT, JVP, TILES = "base/tangents.cuh", "sm80/jvp.cu", "base/tiles.cuh"
KEY_GRADIENTS = "sm80/key_gradients.cuh"  # of both double_backward_kv
LISTS, GATHER, ROWS = "sm80/block_lists.cu", "sm80/sparse_gather.cuh", "sm80/sparse_rows.cuh"
SPARSE_FORWARD, SPARSE_KV = "sm80/sparse_forward.cu", "sm80/sparse_backward_kv.cu"

SCALED = "[&](int, int) { return args.sizes.softmax_scale; }"
PLAIN = "[](int, int) { return 1.0f; }"
Slip = tuple[str, str, str]  # file, what stands there, what stands there instead


@dataclass(frozen=True)
class Plant:
    """``slips`` in the sources, and the classes under which they may be found."""

    name: str
    bugs: tuple[str, ...]
    slips: tuple[Slip, ...]
    case: Case = CAUSAL
    options: dict[str, Any] = field(default_factory=dict)
    double_backward: bool = False
    jvp: bool = False

    def __str__(self) -> str:
        return self.name

    def candidate(self) -> Candidate:
        """The functions whose kernels are changed, on the CUDA kernels."""
        cuda = partial(Candidate, self.name, "cupy", symmetry=False)
        module = api_sparse if isinstance(self.case, SparseCase) else api
        prefix = "sparse_" if module is api_sparse else ""
        second = api_sparse if module is api_sparse else api_second

        def on(functions: Any, name: str, **options: Any) -> Callable[..., Any]:
            return partial(getattr(functions, prefix + name), backend="cuda", **options)

        if self.jvp:
            return cuda(jvp=on(second, "jvp"))
        if self.double_backward:
            return cuda(double_backward=on(second, "double_backward"))
        preprocess = None if prefix else on(api, "backward_preprocess")
        return cuda(
            forward=on(module, "forward"),
            backward=on(module, "backward", **self.options),
            preprocess=preprocess,
        )


PLANTS = (
    Plant(
        "lse in base 2",
        ("lse-base-2",),
        (
            (
                SOFTMAX,
                "softmax_scale + lg2_approx(sum) * LN2",
                "softmax_scale * LOG2E + lg2_approx(sum)",
            ),
        ),
    ),
    Plant(
        "lse without the maximum",
        ("lse-without-max",),
        ((SOFTMAX, "row_max[i][half] * softmax_scale + lg2", "lg2"),),
    ),
    Plant(
        "lse: the log of base 2 alone is left as it is",
        ("lse-base-2",),
        ((SOFTMAX, "lg2_approx(sum) * LN2", "lg2_approx(sum)"),),
    ),
    Plant(
        "out is not rescaled",
        ("no-rescale",),
        (
            (SOFTMAX, "scale_rows(i, half, factor);", ""),
            (SOFTMAX, "RESCALE_LOG2 = 8.0f", "RESCALE_LOG2 = 0.0f"),
        ),
    ),
    Plant(
        "row_sum is not rescaled",
        ("no-rescale",),
        (
            (SOFTMAX, "row_sum[i][half] *= factor;", ""),
            (SOFTMAX, "RESCALE_LOG2 = 8.0f", "RESCALE_LOG2 = 0.0f"),
        ),
    ),
    Plant(
        "out is not divided",
        ("not-normalised",),
        ((SOFTMAX, "return sum == 0.0f ? 0.0f : 1.0f / sum;", "return 1.0f;"),),
    ),
    Plant(
        "head % num_heads_kv",
        ("gqa-head-map",),
        ((TILES, "head / sizes.group()", "head % sizes.num_heads_kv"),),
    ),
    Plant(
        "one key too many",
        ("causal-off-by-one",),
        ((MASK, "row + shift() + right + 1,", "row + shift() + right + 2,"),),
    ),
    Plant(
        "top left",
        ("causal-alignment",),
        ((MASK, "return seqlen_k - seqlen_q;", "return 0;"),),
        UNEQUAL,
    ),
    Plant(
        "the last tile is not masked",
        ("padded-keys",),
        ((FORWARD, "tile.mask.cuts(tile.row0, BLOCK_M, n * BLOCK_N, BLOCK_N)", "false"),),
        DENSE,
    ),
    Plant(
        "window without its left side",
        ("window-dropped",),
        ((MASK, "cfg::HAS_LEFT ? max(row + shift() - left, 0) : 0", "0"),),
        replace(CASES["window"], window=(9, 7)),
    ),
    Plant(
        "the first key tile is not seen",
        ("tile-skipped",),
        (
            (FORWARD, "n >= tile.n_begin; --n", "n > tile.n_begin; --n"),
            # what the loop no longer awaits would land in O's tile: another bug
            (
                FORWARD,
                "  epilogue(args",
                "  cp_async_wait<0>();\n  __syncthreads();\n  epilogue(args",
            ),
        ),
        replace(CAUSAL, head_dim=128, head_dim_v=128),
    ),
    Plant(
        "the last key tile is not seen",
        ("wrong-keys", "tail-tile-dropped"),
        (
            (
                TILES,
                "ceil_div(mask.end_key(row + rows - 1), BLOCK_N)",
                "max(1, mask.end_key(row + rows - 1) / BLOCK_N)",
            ),
        ),
        DENSE,
    ),
    Plant(
        "scores without log2(e)",
        ("score-scale",),
        ((FORWARD, "score_scale_log2(args.sizes)", "score_scale(args.sizes)"),),
    ),
    Plant("dk without the scale", ("output-scale",), ((BACKWARD_KV, SCALED, PLAIN),)),
    Plant(
        "dq without the scale",
        ("output-scale",),
        ((BACKWARD_Q, SCALED, PLAIN),),
        options={"method": "deterministic"},
    ),
    Plant(
        "one head of the group",
        ("gqa-group-not-summed",),
        ((TILES, "(tile.kv_head + 1) * group", "tile.kv_head * group + 1"),),
        options={"method": "deterministic"},
    ),
    Plant(
        "dlse with the other sign",
        ("lse-gradient-sign",),
        ((PREPROCESS, "sum - (args.dlse", "sum + (args.dlse"),),
    ),
    Plant(
        "no dlse",
        ("lse-gradient-dropped",),
        ((PREPROCESS, "sum - (args.dlse ? args.dlse[index] : 0.0f)", "sum"),),
    ),
    Plant(
        "no delta",
        ("delta-omitted",),
        ((GRADIENT, "rdP[i][j][e] - delta.value[i][e / 2]", "rdP[i][j][e]"),),
    ),
    Plant(
        "delta of the next row",
        ("delta-of-another-out", "statistics-misplaced"),
        ((PREPROCESS, "args.total_q + row;", "args.total_q + (row + 1) % args.total_q;"),),
    ),
    Plant(
        "dS without P",
        ("softmax-backward-without-p",),
        (
            (
                GRADIENT,
                "rP[i][j][e] * (rdP[i][j][e] - delta.value[i][e / 2])",
                "rdP[i][j][e] - delta.value[i][e / 2]",
            ),
        ),
        DENSE,
    ),
    Plant(
        "dq holds its last tile",
        ("tile-overwrites",),
        ((BACKWARD_Q, "clear(rdS);", "clear(rdS);\n    clear(rdQ);"),),
        options={"method": "deterministic"},
    ),
    Plant(
        "the last tile of queries adds nothing to dk and dv",
        ("tail-tile-dropped",),
        (
            (
                TILES,
                "ceil_div(tile.mask.end_query(tile.col0 + cols - 1), BLOCK_M)",
                "tile.mask.end_query(tile.col0 + cols - 1) / BLOCK_M",
            ),
        ),
        options={"method": "deterministic"},
    ),
    Plant(
        "jvp: tlse is kept as a sum",
        ("not-normalised",),
        (
            (
                JVP,
                "sum_of_row(sums.tangent[i][half]) * inverse",
                "sum_of_row(sums.tangent[i][half])",
            ),
        ),
        jvp=True,
    ),
    Plant(
        "jvp: no e",
        ("tangent-e-omitted",),
        ((JVP, "inverse - e * sums.rO[i][j][c]", "inverse"),),
        jvp=True,
    ),
    Plant(
        "jvp: no scale",
        ("tangent-scale",),
        ((TANGENT, "rE[i][j][e] *= rP[i][j][e] * softmax_scale;", "rE[i][j][e] *= rP[i][j][e];"),),
        jvp=True,
    ),
    Plant(
        "second: no w",
        ("second-w-omitted",),
        ((TANGENT, "(rX[i][j][e] - terms.ddelta.value[i][e / 2])", "rX[i][j][e]"),),
        double_backward=True,
    ),
    Plant(
        "second: no e",
        ("tangent-e-omitted",),
        (
            (
                TANGENT,
                "(cfg::HAS_SOFTCAP ? slope * f : f) - terms.ddlse.value[i][e / 2]",
                "(cfg::HAS_SOFTCAP ? slope * f : f)",
            ),
        ),
        double_backward=True,
    ),
    Plant(
        "second: P is constant",
        ("second-frozen-p",),
        ((TANGENT, "tds += tp * z;", ""), (TANGENT, "rE[i][j][e] = tp;", "rE[i][j][e] = 0.0f;")),
        double_backward=True,
    ),
    Plant(
        "second: gk without the scale",
        ("tangent-scale",),
        ((KEY_GRADIENTS, "{ return softmax_scale; }", "{ return 1.0f; }"),),
        double_backward=True,
    ),
    Plant(
        "second: one head of the group",
        ("gqa-group-not-summed",),
        ((TILES, "(tile.kv_head + 1) * group", "tile.kv_head * group + 1"),),
        double_backward=True,
    ),
    Plant(
        "second: no dS ddQ in gk",
        ("second-term-dropped",),
        ((KEY_GRADIENTS, "if (cfg::HAS_TQ && warp.k.any())", "if (false)"),),
        double_backward=True,
    ),
    Plant(
        "sparse: counts",
        ("sparse-counts-ignored",),
        ((LISTS, "return slot < count && block >= 0", "return block >= 0"),),
        SPARSE_CASES["open"],
    ),
    Plant(
        "sparse: no gradient of the gate",
        ("sparse-gate-gradient-missing",),
        ((GATHER, "gradients[at] = sum;", ""),),
        SPARSE_CASES["gate"],
    ),
    Plant(
        "sparse: gate of one head",
        ("sparse-gate-not-summed",),
        ((GATHER, "i < WARPS_N * GROUP; ++i", "i < WARPS_N * GROUP; i += GROUP"),),
        SPARSE_CASES["gate"],
    ),
    Plant(
        "sparse: gate is not in dS",
        ("sparse-gate-ignored",),
        ((SPARSE_KV, "rdS[i][j][e] *= scale[i][e / 2];", ""),),
        SPARSE_CASES["gate"],
    ),
    Plant(
        "sparse: no mask at all",
        # of the last block the keys past the end of the sequence are seen too: two at once
        ("sparse-tile-union", "wrong-keys", "padded-keys"),
        ((ROWS, "if (first + j * 8 + e % 2 >= rows.limit[e / 2]) rS[0][j][e] = -INF;", ""),),
        SELECTED,
    ),
    Plant(
        "sparse: the own block of the next query",
        ("sparse-other-place", "sparse-own-block-missing"),
        ((LISTS, "? position / selection.block_size", "? (position + 1) / selection.block_size"),),
        SELECTED,
    ),
)


def test_what_plants_replace_is_there() -> None:
    slips = [slip for plant in PLANTS for slip in plant.slips]
    texts = {name: (build.sources_root() / name).read_text() for name, _, _ in slips}
    lost = [f"{name}: {right}" for name, right, _ in slips if texts[name].count(right) != 1]
    assert not lost, "not there, or more than once:\n" + "\n".join(lost)


# the rows whose kernel the plants are in, on GPUs that have others too
PLANTED_ROWS = {
    (row.stem, row.head_dim): row.name
    for row in reversed(TABLE)
    if row.family == "sm80" and row.stem in ("forward", "backward_kv")
    if not (row.when.short or row.when.max_ctas)
}


@pytest.mark.sweep
@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_bugs_in_our_sources_are_named(
    plant: Plant, kernels: emulated.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", ",".join(PLANTED_ROWS.values()))
    folder = tmp_path / "kernels_cu"
    shutil.copytree(build.sources_root(), folder)
    monkeypatch.setattr(build, "sources_root", lambda: folder)
    for name, right, wrong in plant.slips:
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(right, wrong))
    findings = explain_failures(plant.candidate(), [plant.case]).findings
    named = [finding.bug for finding in findings if finding.bug != "rounding"]
    assert named and named[0] in plant.bugs, "\n".join(map(str, findings))

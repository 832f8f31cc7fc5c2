"""Bugs that are planted in our sources are named, as `rawattn-check diff` would name them.

A plant is a line of the CUDA sources put in place of another, as a slip of the pen would do it.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rawattn import api, api_second, api_sparse, build
from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.judge.failures import explain_failures
from rawattn.check.sparse_cases import SparseCase
from rawattn.variants import TABLE
from tests.shared import emulated
from tests.shared.named_cases import CASES, CAUSAL, SPARSE_CASES

ON: dict[str, Case] = CASES | SPARSE_CASES
ON["narrow window"] = replace(CASES["window"], window=(9, 7))
ON["head_dim 128"] = replace(CAUSAL, head_dim=128, head_dim_v=128)

# a name, the classes under which it may be found, and the case, or what is called of a causal one;
# then by files what stands there, and what stands there instead
_TABLE = """
lse in base 2 | lse-base-2 | causal
  base/softmax.cuh: softmax_scale + lg2_approx(sum) * LN2 => softmax_scale * LOG2E + lg2_approx(sum)
out is not rescaled | no-rescale | causal
  base/softmax.cuh: scale_rows(i, half, factor); =>
  base/softmax.cuh: RESCALE_LOG2 = 8.0f => RESCALE_LOG2 = 0.0f
row_sum is not rescaled | no-rescale | causal
  base/softmax.cuh: row_sum[i][half] *= factor; =>
  base/softmax.cuh: RESCALE_LOG2 = 8.0f => RESCALE_LOG2 = 0.0f
head % num_heads_kv | gqa-head-map | causal
  base/tiles.cuh: head / sizes.group() => head % sizes.num_heads_kv
one key too many | causal-off-by-one | causal
  base/mask.cuh: row + shift() + right + 1, => row + shift() + right + 2,
top left | causal-alignment | unequal
  base/mask.cuh: return seqlen_k - seqlen_q; => return 0;
the last tile is not masked | padded-keys | dense
  sm80/forward.cu: tile.mask.cuts(tile.row0, BLOCK_M, n * BLOCK_N, BLOCK_N) => false
window without its left side | window-dropped | narrow window
  base/mask.cuh: cfg::HAS_LEFT ? max(row + shift() - left, 0) : 0 => 0
the first key tile is not seen | tile-skipped | head_dim 128
  sm80/forward.cu: n >= tile.n_begin; --n => n > tile.n_begin; --n
  # what the loop no longer awaits would land in O's tile: another bug
  sm80/forward.cu: epilogue(args, => cp_async_wait<0>(); __syncthreads(); epilogue(args,
the last key tile is not seen | wrong-keys, tail-tile-dropped | dense
  base/tiles.cuh: ceil_div(mask.end_key(row + rows - 1), BLOCK_N)
    => max(1, mask.end_key(row + rows - 1) / BLOCK_N)
scores without log2(e) | score-scale | causal
  sm80/forward.cu: score_scale_log2(args.sizes) => score_scale(args.sizes)
dk without the scale | output-scale | causal
  sm80/backward_kv.cu: [&](int, int) { return args.sizes.softmax_scale; }
    => [](int, int) { return 1.0f; }
dq without the scale | output-scale | deterministic
  sm80/backward_q.cu: [&](int, int) { return args.sizes.softmax_scale; }
    => [](int, int) { return 1.0f; }
one head of the group | gqa-group-not-summed | deterministic
  base/tiles.cuh: (tile.kv_head + 1) * group => tile.kv_head * group + 1
dlse with the other sign | lse-gradient-sign | causal
  sm80/backward_preprocess.cu: sum - (args.dlse => sum + (args.dlse
no dlse | lse-gradient-dropped | causal
  sm80/backward_preprocess.cu: sum - (args.dlse ? args.dlse[index] : 0.0f) => sum
no delta | delta-omitted | causal
  base/statistics.cuh: rdP[i][j][e] - delta.value[i][e / 2] => rdP[i][j][e]
delta of the next row | delta-of-another-out, statistics-misplaced | causal
  sm80/backward_preprocess.cu: args.total_q + row; => args.total_q + (row + 1) % args.total_q;
dS without P | softmax-backward-without-p | dense
  base/statistics.cuh: rP[i][j][e] * (rdP[i][j][e] - delta.value[i][e / 2])
    => rdP[i][j][e] - delta.value[i][e / 2]
dq holds its last tile | tile-overwrites | deterministic
  sm80/backward_q.cu: clear(rdS); => clear(rdS); clear(rdQ);
the last tile of queries adds nothing to dk and dv | tail-tile-dropped | deterministic
  base/tiles.cuh: ceil_div(tile.mask.end_query(tile.col0 + cols - 1), BLOCK_M)
    => tile.mask.end_query(tile.col0 + cols - 1) / BLOCK_M
jvp: no e | tangent-e-omitted | jvp
  sm80/jvp.cu: inverse - e * sums.rO[i][j][c] => inverse
jvp: no scale | tangent-scale | jvp
  base/tangents.cuh: rE[i][j][e] *= rP[i][j][e] * softmax_scale; => rE[i][j][e] *= rP[i][j][e];
second: no w | second-w-omitted | double_backward
  base/tangents.cuh: (rX[i][j][e] - terms.ddelta.value[i][e / 2]) => rX[i][j][e]
second: no e | tangent-e-omitted | double_backward
  base/tangents.cuh: (cfg::HAS_SOFTCAP ? slope * f : f) - terms.ddlse.value[i][e / 2]
    => (cfg::HAS_SOFTCAP ? slope * f : f)
second: P is constant | second-frozen-p | double_backward
  base/tangents.cuh: tds += tp * z; =>
  base/tangents.cuh: rE[i][j][e] = tp; => rE[i][j][e] = 0.0f;
second: gk without the scale | tangent-scale | double_backward
  sm80/key_gradients.cuh: { return softmax_scale; } => { return 1.0f; }
second: one head of the group | gqa-group-not-summed | double_backward
  base/tiles.cuh: (tile.kv_head + 1) * group => tile.kv_head * group + 1
second: no dS ddQ in gk | second-term-dropped | double_backward
  sm80/key_gradients.cuh: if (cfg::HAS_TQ && warp.k.any()) => if (false)
sparse: counts | sparse-counts-ignored | open
  sm80/block_lists.cu: return slot < count && block >= 0 => return block >= 0
sparse: no gradient of the gate | sparse-gate-gradient-missing | gate
  sm80/sparse_gather.cuh: gradients[at] = sum; =>
sparse: gate of one head | sparse-gate-not-summed | gate
  sm80/sparse_gather.cuh: i < WARPS_N * GROUP; ++i => i < WARPS_N * GROUP; i += GROUP
sparse: gate is not in dS | sparse-gate-ignored | gate
  sm80/sparse_backward_kv.cu: rdS[i][j][e] *= scale[i][e / 2]; =>
sparse: no mask at all | sparse-tile-union, wrong-keys, padded-keys | selected
  # of the last block the keys past the end of the sequence are seen too: two at once
  sm80/sparse_rows.cuh: if (first + j * 8 + e % 2 >= rows.limit[e / 2]) rS[0][j][e] = -INF; =>
sparse: the own block of the next query | sparse-other-place, sparse-own-block-missing | selected
  sm80/block_lists.cu: ? position / selection.block_size => ? (position + 1) / selection.block_size
"""


class Plant(NamedTuple):
    name: str
    bugs: tuple[str, ...]
    how: str
    slips: list[tuple[str, str, str]]

    def __str__(self) -> str:
        return self.name

    @property
    def case(self) -> Case:
        return ON.get(self.how, CAUSAL)

    def candidate(self) -> Candidate:
        """The functions whose kernels are changed, on the CUDA kernels."""
        cuda = partial(Candidate, self.name, "cupy", symmetry=False)

        def on(functions: Any, name: str, **options: Any) -> Callable[..., Any]:
            return partial(getattr(functions, name), backend="cuda", **options)

        if self.how in ("jvp", "double_backward"):
            return cuda(**{self.how: on(api_second, self.how)})
        if isinstance(self.case, SparseCase):
            names = ("forward", "backward")
            return cuda(**{name: on(api_sparse, f"sparse_{name}") for name in names})
        way = {"method": self.how} if self.how == "deterministic" else {}
        preprocess = on(api, "backward_preprocess")
        backward = on(api, "backward", **way)
        return cuda(forward=on(api, "forward"), backward=backward, preprocess=preprocess)


def plant(entry: str) -> Plant:
    name, bugs, how = entry.partition("\n")[0].split(" | ")
    slips = re.findall(r"^  (\S+): (.*?)\s+=> ?(.*)$", entry, re.MULTILINE)
    return Plant(name, tuple(bugs.split(", ")), how, slips)


PLANTS = [plant(entry) for entry in re.split(r"\n(?! )", _TABLE.strip())]


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

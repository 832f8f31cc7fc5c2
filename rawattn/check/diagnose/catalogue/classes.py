"""The bug classes: what each is called in plain words, and where to look for it.

Names are those of the catalogue in ``first_order``, ``second_order`` and ``sparse``. Long by the
table.
"""

from typing import NamedTuple


class BugClass(NamedTuple):
    """``title`` completes "the bug: ..."; ``look_at`` is an instruction."""

    title: str
    look_at: str


CLASSES: dict[str, BugClass] = {
    # ---- masks and neighbours ----
    "padded-keys": BugClass(
        "padded keys are in the softmax denominator",
        "the key padding mask: rows of padding have score 0 and so weight e^0 = 1 unless masked",
    ),
    "padded-grad-out": BugClass(
        "the cotangent of padding rows flows into dv",
        "the loss: it must not count output rows of padding; mask them before the reduction",
    ),
    "mask-missing-in-backward": BugClass(
        "the backward pass recomputes P without the mask that the forward pass used",
        "the arguments of the backward function: the causal flag, the order of P, lse and out",
    ),
    "causal-dropped": BugClass(
        "the causal mask is not applied",
        "the causal flag on its way to the kernel",
    ),
    "causal-off-by-one": BugClass(
        "the causal mask is off by one key",
        "the comparison of key and query index: j <= i, neither j < i nor j <= i + 1",
    ),
    "causal-alignment": BugClass(
        "the causal mask is aligned to the first key instead of the last one",
        "the offset seqlen_k - seqlen_q of the diagonal where the lengths differ",
    ),
    "window-off-by-one": BugClass(
        "the window is one key too wide or too narrow",
        "whether the window's ends are inclusive: (left, right) keys beside the query's own",
    ),
    "window-dropped": BugClass(
        "a side of the window is not applied",
        "the window argument, and the bounds of the loop over key tiles",
    ),
    "neighbour-leak": BugClass(
        "rows of a neighbouring sequence are seen",
        "the mask of the last key tile, and the ends that are read from cu_seqlens",
    ),
    "offsets-shifted": BugClass(
        "rows are stored or read at wrong offsets from some sequence on",
        "how cu_seqlens is read: its width (int32 or int64), its first entry, off by one",
    ),
    "dead-rows": BugClass(
        "rows without an allowed key are not 0",
        "the guard of the softmax for a row whose scores are all -inf, and the final division",
    ),
    "masked-tile-nan": BugClass(
        "rows whose first key tile is masked as a whole are NaN",
        "the running maximum: -inf minus -inf is NaN until a key has been seen",
    ),
    # ---- what the softmax is taken over ----
    "mask-inverted": BugClass(
        "the mask is inverted: what must be hidden is seen, and the other way round",
        "whether True in the mask means seen or hidden",
    ),
    "mask-fill": BugClass(
        "masked scores are finite numbers, so that masked keys have weight",
        "the number that stands for -inf, its sign, and whether it is added or put in their place",
    ),
    "denominator": BugClass(
        "the softmax denominator has terms of no key",
        "the row sum: what it begins with, and whether masked keys and sinks are added to it",
    ),
    "partial-merge": BugClass(
        "results of parts of the keys are merged with wrong weights",
        "the merge of partial results: weights exp(lse of the part - lse of all), natural logs",
    ),
    "dropout": BugClass(
        "weights are dropped at random",
        "dropout that is left on: a model in training mode, dropout_p",
    ),
    "score-bias": BugClass(
        "a bias is added to the scores",
        "ALiBi or another bias by position that is left on",
    ),
    "softcap": BugClass(
        "the scores are capped by a tanh",
        "a softcap that is left on",
    ),
    "softcap-dropped": BugClass(
        "the scores are not capped",
        "softcap on its way to the kernel: c tanh(score / c), after softmax_scale, before the mask",
    ),
    "softcap-slope-omitted": BugClass(
        "the derivative of the softcap is missing",
        "dS times 1 - tanh^2 before the products with k and q, and the same in every tangent",
    ),
    "sinks-dropped": BugClass(
        "the sinks are not in the softmax denominator",
        "sinks on their way to the kernel: exp(sink - row_max) in the row sum, and so in lse",
    ),
    "sinks-gradient": BugClass(
        "the gradient of the sinks is wrong",
        "dsinks = -sum over all queries of exp(sink - lse) (dout . out - dlse)",
    ),
    "seqused-ignored": BugClass(
        "seqused_k is ignored",
        "the number of keys of a sequence: in the mask of the last tile, and at the diagonal's end",
    ),
    "rotary": BugClass(
        "rotary embeddings are applied to what must not be rotated, or not undone",
        "where q and k are rotated, and their gradients rotated back",
    ),
    # ---- numbers ----
    "output-scale": BugClass(
        "softmax_scale is missing, or there more than once, in dq or dk",
        "the epilogue: dq = s dS K and dk = s dS^T Q, once each, and not inside of the loop",
    ),
    "score-scale": BugClass(
        "the scores are multiplied by a wrong factor",
        "softmax_scale: head_dim ** -0.5 by default, and log2(e) once where exp2 is used",
    ),
    "lse-base-2": BugClass(
        "lse is stored in base 2",
        "the conversion: natural logarithm = base-2 logarithm times ln 2",
    ),
    "lse-without-max": BugClass(
        "lse lacks the row maximum",
        "lse = row_max + log(row_sum), in the scaled units of the scores",
    ),
    "not-normalised": BugClass(
        "the output is not divided by the row sum",
        "the epilogue of the forward pass",
    ),
    "no-rescale": BugClass(
        "an accumulator is not rescaled, or wrongly, when the running maximum moves",
        "the online softmax: out and row_sum times exp(old max - new max) at every tile",
    ),
    "no-max-subtraction": BugClass(
        "exp is taken without subtracting the row maximum",
        "rows with large scores overflow: subtract the maximum before exp",
    ),
    "accumulates-in-16-bit": BugClass(
        "sums run in 16 bits, or row statistics are kept in them",
        "the accumulators, delta and lse: float32, whatever the operands",
    ),
    "narrow-intermediate": BugClass(
        "an intermediate is rounded to fewer bits than it must keep",
        "the dtype in which it is stored, or handed to a matmul; what scales it before",
    ),
    "head-dim-tail": BugClass(
        "the last columns of head_dim are left out",
        "the loop over head_dim in steps of the matmul's depth, and its tail",
    ),
    "softmax-backward-without-p": BugClass(
        "dS lacks the factor P",
        "dS = P o (dP - D)",
    ),
    "delta-omitted": BugClass(
        "the row term D = dout . out of the softmax's derivative is missing",
        "the preprocess pass, and whether its result reaches the kernel",
    ),
    "delta-of-another-out": BugClass(
        "the row term D is not that of its row: of another output, or of a part of it",
        "which out the preprocess pass gets, and which rows and heads it reads",
    ),
    "lse-gradient-dropped": BugClass(
        "the cotangent of lse is ignored",
        "D = dout . out - dlse",
    ),
    "lse-gradient-sign": BugClass(
        "the cotangent of lse enters with the wrong sign, or twice",
        "D = dout . out - dlse",
    ),
    # ---- heads, layout, tiles ----
    "gqa-head-map": BugClass(
        "query heads read the wrong key/value head",
        "the map of grouped heads: h // group, not h % num_heads_kv",
    ),
    "gqa-group-not-summed": BugClass(
        "dk or dv holds one head of each group, not the sum",
        "the store of dk and dv: heads of a group write to one place, and must add up",
    ),
    "gradients-swapped": BugClass(
        "dk and dv are exchanged",
        "the order in which gradients are returned",
    ),
    "transposed": BugClass(
        "a result is stored in another layout",
        "the order of tokens, heads and columns: a view where a transpose was meant",
    ),
    "tail-tile-dropped": BugClass(
        "the last, partial tile is left out",
        "the number of tiles: round up, and mask the rest",
    ),
    "rows-not-written": BugClass(
        "some rows are never written",
        "the number of tiles that are launched, and the bound of the stores",
    ),
    "tail-rows-stored": BugClass(
        "rows past a sequence's end are stored over the next sequence's first rows",
        "the guard of the stores of out and lse: row < seqlen_q",
    ),
    "tile-skipped": BugClass(
        "a tile of keys is skipped",
        "the bounds of the loop over key tiles",
    ),
    "tile-counted-twice": BugClass(
        "a tile of keys counts twice",
        "the split between masked and unmasked tiles of the loop",
    ),
    "tile-overwrites": BugClass(
        "a gradient holds the contribution of one tile alone",
        "the store inside of the loop: it must add, or stand behind the loop",
    ),
    "tile-period": BugClass(
        "rows are wrong by their place in a tile",
        "what goes by the place in a tile: loop bounds, masks, row statistics, shared-memory "
        "indices, rows that nobody initialises",
    ),
    "race": BugClass(
        "two equal calls give different numbers",
        "a missing barrier, or two threads that store to one place",
    ),
    "other-data": BugClass(
        "the result has nothing to do with these inputs",
        "where the numbers come from: other weights, another seed, an old file",
    ),
    # ---- what is read ----
    "arguments-swapped": BugClass(
        "two arrays stand in each other's place",
        "the order of arguments and of saved tensors",
    ),
    "input-layout": BugClass(
        "an input is read in another layout than it has",
        "the order of axes, strides and integer width of that input",
    ),
    "statistics-misplaced": BugClass(
        "row statistics (lse, delta, W) are read at other rows' places",
        "the index of lse and delta: head * total_q + cu_seqlens[b] + row",
    ),
    "stale-tile": BugClass(
        "a product takes rows of one operand from another tile, or in another order",
        "the stage or buffer that this product reads, and the barrier before it",
    ),
    "softmax-axis": BugClass(
        "the softmax, or its derivative, sums over queries in place of keys",
        "the axis of the row maximum, the row sum and of sum(P o dP)",
    ),
    "pairs-dropped": BugClass(
        "some pairs of query and key tiles add nothing to the gradients",
        "the bounds of the backward loop: where the first tile starts and the last one ends",
    ),
    "gqa-reduction-map": BugClass(
        "dk and dv are summed over the query heads of another group",
        "the view of the heads in the reduction: (num_heads_kv, group), not the other way round",
    ),
    "constant-factor": BugClass(
        "a result is a constant times the right one",
        "what scales it last; a workspace that is not zeroed; a sum that is taken twice",
    ),
    "underflow-in-16-bit": BugClass(
        "an intermediate is too small for 16 bits",
        "dS or P stored in float16: scale the loss, or keep them in a dtype of wider range",
    ),
    "wrong-keys": BugClass(
        "queries see other keys than they should",
        "the bounds of the loop over keys, and the comparison of query and key index in it",
    ),
    # ---- second order ----
    "second-frozen-p": BugClass(
        "an intermediate is held constant: P has no derivative",
        "what the first backward pass saves: an intermediate that is no input or output",
    ),
    "second-frozen-delta": BugClass(
        "an intermediate is held constant: the row term D has no derivative",
        "a detached delta",
    ),
    "second-w-omitted": BugClass(
        "the row term W = dout . ddout is missing",
        "the preprocess pass of the second backward",
    ),
    "second-e-omitted": BugClass(
        "the tangent of P is not centred: e is missing or wrong",
        "P' = P o (E - e), where e is the row's mean of E under P",
    ),
    "second-scale": BugClass(
        "softmax_scale is missing, or there twice, in a second derivative",
        "E = s (ddq K^T + q ddk^T), and the outer s of gq and gk",
    ),
    "second-direct-term-dropped": BugClass(
        "the terms of dS with ddk in gq and ddq in gk are missing",
        "gq = s (dS' K + dS ddk), gk = s (dS'^T Q + dS^T ddq)",
    ),
    "second-value-term-dropped": BugClass(  # both terms: as direction-ignored, of ddv
        "the terms with ddv are missing",
        "P ddv in ddout, and dout ddv^T in the tangent of dP; if both, ddv on its way there",
    ),
    "second-group-not-summed": BugClass(
        "gk and gv hold one head of each group, not the sum",
        "the store of gk and gv",
    ),
    "second-lse-gradient-dropped": BugClass(
        "the cotangent of lse is ignored in the second backward",
        "D = dout . out - dlse there too",
    ),
    "second-mask-missing": BugClass(
        "the second backward recomputes P without the mask",
        "set P to 0 where the mask forbids, before any product",
    ),
    "jvp-e-omitted": BugClass(
        "the tangent of P is not centred: e is missing or wrong",
        "P' = P o (E - e)",
    ),
    "jvp-value-term-dropped": BugClass(  # as direction-ignored, of tv
        "the tangent lacks P tv",
        "tout = P' V + P tv, and tv on its way there",
    ),
    "jvp-scale": BugClass(
        "softmax_scale is missing, or there twice, in the tangent of the scores",
        "E = s (tq K^T + q tk^T)",
    ),
    "jvp-lse-missing": BugClass(
        "the tangent of lse is 0",
        "tlse = e, the row's mean of E under P",
    ),
    # ---- block-sparse ----
    "sparse-not-causal": BugClass(
        "selected blocks are not cut at the query",
        "the causal mask inside of selected blocks: the block around the query, and later ones",
    ),
    "sparse-duplicate-twice": BugClass(
        "a block that is named twice counts twice",
        "duplicates, the own block among them: they must be removed",
    ),
    "sparse-partial-block-zeros": BugClass(
        "keys past the end of the sequence's last block are in the denominator",
        "the length mask of partial blocks",
    ),
    "sparse-padding-read": BugClass(
        "padding indices are read as blocks",
        "indices below 0 or past the last block name nothing",
    ),
    "sparse-gate-gradient-missing": BugClass(
        "the gate has no gradient",  # or ddblock_scale none: as direction-ignored, of the gate
        "dblock_scale: the sum over a block's keys of dS s (q . k); its own direction beyond that",
    ),
    "sparse-gate-not-summed": BugClass(
        "the gate's gradient holds one head of the group, not the sum",
        "the reduction over heads that share a selection",
    ),
    "sparse-gate-ignored": BugClass(
        "the gate does not multiply the scores",
        "block_scale on its way to the kernel, forward and backward",
    ),
    "sparse-sliding-off-by-one": BugClass(
        "the sliding branch's window is one key too wide or too narrow",
        "the window's ends are inclusive",
    ),
    "sparse-own-block-missing": BugClass(
        "the query's own block is left out",
        "include_own_block",
    ),
    "sparse-own-block-not-causal": BugClass(
        "the query's own block is not cut at the query",
        "the causal mask of the diagonal block",
    ),
    "sparse-other-heads-selection": BugClass(
        "a head uses another head's selection",
        "the index into the middle axis of block_indices",
    ),
    "sparse-last-slot-dropped": BugClass(
        "a slot of the selection is left out",
        "the loop over num_selected",
    ),
    "sparse-list-cut": BugClass(
        "the list of named blocks ends too early",
        "the loop over slots: padding (-1) must be skipped, not end it",
    ),
    "sparse-gate-order": BugClass(
        "factors of blocks stand at other blocks than they belong to",
        "the sort of the named blocks: block_scale must be permuted with them",
    ),
    "sparse-gate-on-p": BugClass(
        "block_scale is applied otherwise than as a factor of the scores",
        "where the factor is applied: before the softmax",
    ),
    "sparse-tile-union": BugClass(
        "queries see blocks that only other queries of their tile named",
        "the membership test of a query where its tile walks the union of the lists",
    ),
    "sparse-masked-block-resets": BugClass(
        "a block that is masked as a whole resets the row",
        "the online softmax where a block adds nothing: its maximum is -inf",
    ),
    "sparse-inverted-lists": BugClass(
        "the lists from blocks back to queries are wrong: dk and dv miss queries or have others",
        "the building of those lists: counts and fills skip the same entries, and bases are exact",
    ),
    "sparse-counts-ignored": BugClass(
        "block_counts is ignored",
        "slots from block_counts on name nothing",
    ),
    # ---- second order, where no class above names the term ----
    "direction-ignored": BugClass(
        "a direction is taken for zeros, as if it were not given",
        "each of ddq, ddk and ddv, or tq, tk and tv, on its way to the kernel: a wrong name, None",
    ),
    # ---- no bug of the kernel ----
    "wrong-dtype": BugClass(
        "a result has another dtype than it must have",
        "the cast at the end: gradients and out in the dtype of q, lse and delta in float32",
    ),
    "vacuous": BugClass(
        "the comparison is vacuous: zeros would pass",
        "data of unit size, a random cotangent, and a check that a wrong result fails",
    ),
    "rounding": BugClass(
        "right, but as precise as a coarser dtype than that of the inputs",
        "the dtype of intermediates, and whether matmuls may run in TF32",
    ),
    "unknown": BugClass(
        "wrong, in a way that no known bug reproduces",
        "where the wrong rows lie, and which identities fail",
    ),
}

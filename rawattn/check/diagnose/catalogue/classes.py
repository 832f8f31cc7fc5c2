"""Bug classes: a title, as in "the bug: ...", and where to look. The first that fits is named."""

import re
from typing import NamedTuple


class BugClass(NamedTuple):
    title: str
    look_at: str


def classes_of(text: str) -> dict[str, BugClass]:
    """Classes by name, of a line with the title and the indented one below it."""
    entries = re.findall(r"^(\S+): (.*)\n    (.*)", text, re.MULTILINE)
    return {name: BugClass(title, look_at) for name, title, look_at in entries}


TEXTS = """
padded-keys: padded keys are in the softmax denominator
    the key padding mask, or that of a partial block: a score of 0 has weight e^0 = 1
mask-missing-in-backward: the backward pass recomputes P without the mask that the forward pass used
    the arguments of the backward function: the causal flag, the window, the order of lse and out
seqused-ignored: seqused_k is ignored, or another number than it is
    the number of keys of a sequence: in the mask of the last tile, and at the diagonal's end
causal-dropped: the causal mask is not applied
    the causal flag on its way to the kernel
causal-off-by-one: the causal mask is off by one key
    the comparison of key and query index: j <= i, neither j < i nor j <= i + 1
causal-alignment: the causal mask is aligned to the first key instead of the last one
    the offset seqlen_k - seqlen_q of the diagonal where the lengths differ
window-off-by-one: the window is one key too wide or too narrow
    whether the window's ends are inclusive: (left, right) keys beside the query's own
window-dropped: a side of the window is not applied
    the window argument (open may be -1, None or 0), and the bounds of the loop over key tiles
neighbour-leak: rows of a neighbouring sequence are seen
    the mask of the last key tile, and the ends that are read from cu_seqlens
offsets-shifted: rows are stored or read at wrong offsets from some sequence on
    how cu_seqlens is read: its width (int32 or int64), its first entry, off by one
dead-rows: rows without an allowed key are not 0
    the guard of the softmax for a row whose scores are all -inf, and the final division
masked-tile-nan: rows whose first key tile is masked as a whole are NaN
    the running maximum: -inf minus -inf is NaN until a key has been seen
mask-fill: masked scores are finite numbers, so that masked keys have weight
    the number that stands for -inf (-1e4, 1e-9?), its sign, and whether it is added or replaces
partial-merge: results of parts of the keys are merged with wrong weights
    the merge of partial results: weights exp(lse of the part - lse of all), natural logs
score-bias: a bias is added to the scores
    ALiBi or another bias by position that is left on
softcap: the scores are capped, or bent by another function
    a softcap that is left on
softcap-dropped: the scores are not capped
    softcap on its way to the kernel: c tanh(score / c), after softmax_scale, before the mask
softcap-slope-omitted: the derivative of the softcap is missing
    dS times 1 - tanh^2 before the products with k and q, and the same in every tangent
sinks-dropped: the sinks are not in the softmax denominator
    sinks on their way to the kernel: exp(sink - row_max) in the row sum, and so in lse
sinks-misplaced: the row sum has another sink than that of its head, relative to the row's maximum
    the index of the sink, by the query head; exp(sink - row_max), as of all else in the sum
denominator: the softmax denominator is not the sum of what is weighed
    the row sum: what it begins with, and whether masked keys and sinks are added to it
sinks-gradient: the gradient of the sinks is wrong
    dsinks = -sum over all queries of exp(sink - lse) (dout . out - dlse)
output-scale: softmax_scale is missing, or there more than once, in dq or dk
    the epilogue: dq = s dS K and dk = s dS^T Q, once each, and not inside of the loop
score-scale: the scores are multiplied by a wrong factor
    softmax_scale: head_dim ** -0.5 by default, and log2(e) once where exp2 is used
lse-base-2: lse is stored in base 2
    the conversion: natural logarithm = base-2 logarithm times ln 2
lse-without-max: lse lacks the row maximum
    lse = row_max + log(row_sum), in the scaled units of the scores
not-normalised: the output is not divided by the row sum
    the epilogue of the forward pass
no-rescale: an accumulator is not rescaled, or wrongly, when the running maximum moves
    the online softmax: out and row_sum times exp(old max - new max) at every tile
no-max-subtraction: exp is taken without subtracting the row maximum
    rows with large scores overflow: subtract the maximum before exp
accumulates-in-16-bit: sums run in 16 bits
    the accumulators: float32, whatever the operands
narrow-intermediate: an intermediate is rounded to fewer bits than it must keep
    the dtype in which it is stored or multiplied, and in float16 what scales it before
head-dim-tail: the last columns of head_dim are left out
    the loop over head_dim in steps of the matmul's depth, and its tail
softmax-backward-without-p: dS lacks the factor P
    dS = P o (dP - D)
delta-omitted: the row term D = dout . out of the softmax's derivative is missing
    the preprocess pass, and whether its result reaches the kernel
delta-of-another-out: the row term D is not that of its row: of another output, or of a part of it
    which out the preprocess pass gets, and which rows and heads it reads
lse-gradient-dropped: the cotangent of lse is ignored
    D = dout . out - dlse
lse-gradient-sign: the cotangent of lse enters with the wrong sign, or another factor
    D = dout . out - dlse
gqa-head-map: query heads read the wrong key/value head
    the map of grouped heads: h // group, not h % num_heads_kv; repeat_interleave, not repeat
gqa-group-not-summed: dk or dv holds one head of each group, not the sum
    the store of dk and dv: heads of a group write to one place, and must add up
gradients-swapped: dk and dv are exchanged
    the order in which gradients are returned, a tuple
transposed: a result is stored in another layout
    the order of tokens, heads and columns: a view where a transpose was meant
tail-tile-dropped: the last, partial tile is left out
    the number of tiles: round up, and mask the rest
rows-not-written: some rows are never written
    the number of tiles that are launched, and the bound of the stores
tile-skipped: a tile of keys is skipped
    the bounds of the loop over key tiles, which leave out masked ones
tile-counted-twice: a tile of keys counts twice
    the split between masked and unmasked tiles of the loop
tile-overwrites: a sum over tiles holds the contribution of one tile alone
    the store inside of the loop: it must add, or stand behind the loop
accumulator-not-reset: a result holds the sums of tiles or heads before it too
    where the accumulator is cleared: in the loop over tiles, not in front of it
race: two equal calls give different numbers
    a missing barrier, or two threads that store to one place
arguments-swapped: two arrays stand in each other's place
    the order of arguments and of saved tensors
input-layout: an input is read in another layout than it has
    the order of axes, strides and integer width of that input
statistics-misplaced: row statistics (lse, delta, e, W) are read at other rows' places
    the index of lse and delta: head * total_q + cu_seqlens[b] + row
stale-tile: a product takes rows of one operand from another tile, or in another order
    the stage or buffer that this product reads, and the barrier before it
pairs-dropped: some pairs of query and key tiles add nothing to the gradients
    the bounds of the backward loop: where the first tile starts and the last one ends
gqa-reduction-map: dk and dv are summed over the query heads of another group
    the view of the heads in the reduction: (num_heads_kv, group), not the other way round
constant-factor: a result is a constant times the right one
    what scales it last; a workspace that is not zeroed; a sum that is taken twice
wrong-keys: queries see other keys than they should
    the bounds of the loop over keys, and the comparison of query and key index in it
second-frozen-p: an intermediate is held constant: P has no derivative
    what the first backward pass saves: an intermediate that is no input or output
second-frozen-delta: an intermediate is held constant: the row term D has no derivative
    a detached delta
second-w-omitted: the row term W = dout . ddout is missing, or another number
    the preprocess pass of the second backward
tangent-e-omitted: the tangent of P is not centred: e is missing or wrong
    P' = P o (E - e), where e is the row's mean of E under P
tangent-scale: softmax_scale is missing, or there twice, in a second derivative or a tangent
    E = s (ddq K^T + q ddk^T), and the outer s of gq and gk
second-term-dropped: a term of a second derivative or a tangent is missing, or counts otherwise
    gq = s (dS' K + dS ddk), gk = s (dS'^T Q + dS^T ddq), P ddv in ddout, dout ddv^T in dP'
tangent-lse-missing: the tangent of lse is 0
    tlse, or ddlse, = e, the row's mean of E under P
sparse-not-causal: blocks are not cut at the query
    the causal mask inside of blocks: the query's own one, which is always cut, and later ones
sparse-duplicate-twice: a block that is named twice counts twice
    duplicates, the own block among them: they must be removed
sparse-padding-read: padding indices are read as blocks
    indices below 0 or past the last block name nothing; -1 is the last one to NumPy and torch
sparse-gate-gradient-missing: the gate has no gradient
    dblock_scale: the sum over a block's keys of dS s (q . k); its own direction beyond that
sparse-gate-not-summed: the gate's gradient holds one head of the group, not the sum
    the reduction over heads that share a selection
sparse-gate-ignored: the gate does not multiply the scores
    block_scale on its way to the kernel, forward and backward
sparse-own-block-missing: the query's own block is left out
    include_own_block
sparse-other-heads-selection: a head uses another head's selection
    the index into the middle axis of block_indices
sparse-queries-lost: some queries that a block lists add nothing to its dk or dv
    the bounds of the loop over the queries of a block, and how many its list may hold
sparse-spare-lanes: spare places of a list's last part repeat its last entry, and count
    the mask of lanes behind the end of a list of queries or blocks
sparse-list-cut: a part of the list of named blocks is not walked
    the loop over slots, from the first to the last: padding (-1) must be skipped, not end it
sparse-gate-order: factors of blocks stand at other blocks than they belong to
    the sort of the named blocks: block_scale must be permuted with them
sparse-gate-on-p: block_scale is applied otherwise than as a factor of the scores
    where the factor is applied: before the softmax
sparse-tile-union: queries see blocks that only other queries of their tile named
    the membership test of a query where its tile walks the union of the lists
sparse-lists-misread: lists of blocks are read at other places, or as other numbers, than they have
    the index into block_indices, block_counts and block_scale, and what is made of a block's id
sparse-other-place: a query stands at another key than it should
    i + seqlen_k - seqlen_q of the query itself, where its own block and the mask are made
sparse-inverted-lists: dk and dv are not those of the pairs of dq: lists from blocks back to queries
    the building of those lists: counts and fills skip the same entries, and bases are exact
sparse-counts-ignored: block_counts is ignored
    slots from block_counts on name nothing
direction-ignored: a direction is taken for zeros, as if it were not given
    each of ddq, ddk and ddv, or tq, tk and tv, on its way to the kernel: a wrong name, None
wrong-dtype: a result has another dtype than it must have
    the cast at the end: gradients and out in the dtype of q, lse and delta in float32
vacuous: the comparison is vacuous: zeros would pass
    data of unit size, a random cotangent, and a check that a wrong result fails
rounding: right, but as precise as a coarser dtype than that of the inputs
    the dtype of intermediates, and whether matmuls may run in TF32
unknown: wrong, in a way that no known bug reproduces
    where the wrong rows lie
"""
CLASSES = classes_of(TEXTS)

"""The bug classes: what each is called in plain words, and where to look for it.

Of every class its name with a title, which completes "the bug: ...", and two lines: where to
look, as an instruction, and what it looks like in the results. Where two classes explain the same
numbers, the earlier one is named. Long by their number.
"""

from typing import NamedTuple


class BugClass(NamedTuple):
    """What is said of a class, each on its line of ``TEXTS``."""

    title: str
    look_at: str
    looks: str = ""


TEXTS = """
# masks and neighbours
padded-keys: padded keys are in the softmax denominator
    the key padding mask, or that of a partial block: a score of 0 has weight e^0 = 1
    too small an out and too large an lse in shorter sequences, or where a partial block is seen
padded-grad-out: the cotangent of padding rows flows into dv
    the loss: it must not count output rows of padding; mask them before the reduction
    every key of a sequence has the same row too much in dv; dq and dk are right
mask-missing-in-backward: the backward pass recomputes P without the mask that the forward pass used
    the arguments of the backward function: the causal flag, the window, the order of lse and out
    out and lse are right; dS is not 0 where it must be, and its rows do not sum to 0
causal-dropped: the causal mask is not applied
    the causal flag on its way to the kernel
    all rows but a sequence's last one are wrong
causal-off-by-one: the causal mask is off by one key
    the comparison of key and query index: j <= i, neither j < i nor j <= i + 1
    the first row of a sequence sees two keys, or none
causal-alignment: the causal mask is aligned to the first key instead of the last one
    the offset seqlen_k - seqlen_q of the diagonal where the lengths differ
    right where there are as many queries as keys, wrong elsewhere
window-off-by-one: the window is one key too wide or too narrow
    whether the window's ends are inclusive: (left, right) keys beside the query's own
    rows are right as long as the window reaches past their sequence's ends
window-dropped: a side of the window is not applied
    the window argument (open may be -1, None or 0), and the bounds of the loop over key tiles
    rows far from the ends of a long sequence are wrong, short sequences are right
neighbour-leak: rows of a neighbouring sequence are seen
    the mask of the last key tile, and the ends that are read from cu_seqlens
    a result changes when another sequence's numbers do
offsets-shifted: rows are stored or read at wrong offsets from some sequence on
    how cu_seqlens is read: its width (int32 or int64), its first entry, off by one
    from one sequence on all rows are wrong, or stand one row further
dead-rows: rows without an allowed key are not 0
    the guard of the softmax for a row whose scores are all -inf, and the final division
    NaN, or the mean of v, in rows that see no key, where 0 is due
masked-tile-nan: rows whose first key tile is masked as a whole are NaN
    the running maximum: -inf minus -inf is NaN until a key has been seen
    NaN in rows far behind their window's first tile
# what the softmax is taken over
mask-inverted: the mask is inverted: what must be hidden is seen, and the other way round
    whether True in the mask means seen, as in scaled_dot_product_attention, or hidden
    a causal row sees the future alone; the last row sees nothing
mask-fill: masked scores are finite numbers, so that masked keys have weight
    the number that stands for -inf (-1e4, 1e-9?), its sign, and whether it is added or replaces
    small errors that grow where scores are large; rows without a key are the mean of v
partial-merge: results of parts of the keys are merged with wrong weights
    the merge of partial results: weights exp(lse of the part - lse of all), natural logs
    right where there is one part; wrong weights between parts elsewhere
dropout: weights are dropped at random
    dropout that is left on: a model in training mode, dropout_p
    weights are 0 or too large by one factor, in no pattern, other ones at the next call
score-bias: a bias is added to the scores
    ALiBi or another bias by position that is left on
    errors grow with the distance of query and key, by another slope in each head
softcap: the scores are capped, or bent by another function
    a softcap that is left on
    large scores count for less; small ones are right
softcap-dropped: the scores are not capped
    softcap on its way to the kernel: c tanh(score / c), after softmax_scale, before the mask
    rows with large scores are wrong, those with small ones nearly right
softcap-slope-omitted: the derivative of the softcap is missing
    dS times 1 - tanh^2 before the products with k and q, and the same in every tangent
    out is right; dq and dk are too large where scores are near the cap
sinks-dropped: the sinks are not in the softmax denominator
    sinks on their way to the kernel: exp(sink - row_max) in the row sum, and so in lse
    out is too large, most where few keys are seen
sinks-misplaced: the row sum has another sink than that of its head, relative to the row's maximum
    the index of the sink, by the query head; exp(sink - row_max), as of all else in the sum
    out and lse are off by a factor for every row, most where few keys are seen
denominator: the softmax denominator is not the sum of what is weighed
    the row sum: what it begins with, and whether masked keys and sinks are added to it
    out is too small in every row, most where few keys are seen
sinks-gradient: the gradient of the sinks is wrong
    dsinks = -sum over all queries of exp(sink - lse) (dout . out - dlse)
    dsinks alone is wrong
seqused-ignored: seqused_k is ignored
    the number of keys of a sequence: in the mask of the last tile, and at the diagonal's end
    keys that are not in use have weight, so out changes with what lies there
# numbers
output-scale: softmax_scale is missing, or there more than once, in dq or dk
    the epilogue: dq = s dS K and dk = s dS^T Q, once each, and not inside of the loop
    dq or dk is off by one factor everywhere; dv is right
score-scale: the scores are multiplied by a wrong factor
    softmax_scale: head_dim ** -0.5 by default, and log2(e) once where exp2 is used
    out is too sharp or too flat; rows with one key are right
lse-base-2: lse is stored in base 2
    the conversion: natural logarithm = base-2 logarithm times ln 2
    lse is 1.4427 times the right one, or out is as if scores were; the other is right
lse-without-max: lse lacks the row maximum
    lse = row_max + log(row_sum), in the scaled units of the scores
    lse differs by the row's maximum; out is right
not-normalised: the output is not divided by the row sum
    the epilogue of the forward pass
    out is too large by the row sum; lse is right
no-rescale: an accumulator is not rescaled, or wrongly, when the running maximum moves
    the online softmax: out and row_sum times exp(old max - new max) at every tile
    rows whose largest score is in a later tile are wrong; short sequences are right
no-max-subtraction: exp is taken without subtracting the row maximum
    rows with large scores overflow: subtract the maximum before exp
    inf or NaN where scores are large, right elsewhere
accumulates-in-16-bit: sums run in 16 bits
    the accumulators: float32, whatever the operands
    errors grow with the length, the slope to the right values is 1
narrow-intermediate: an intermediate is rounded to fewer bits than it must keep
    the dtype in which it is stored or multiplied, and in float16 what scales it before
    the slope to the right values is 1, and it leaves about one rounding of that dtype
head-dim-tail: the last columns of head_dim are left out
    the loop over head_dim in steps of the matmul's depth, and its tail
    right for head_dim 64 and 128, wrong for 40 or 72
softmax-backward-without-p: dS lacks the factor P
    dS = P o (dP - D)
    dq and dk are too large by about the number of keys; dv is right
delta-omitted: the row term D = dout . out of the softmax's derivative is missing
    the preprocess pass, and whether its result reaches the kernel
    dq and dk are wrong where a row sees several keys; dv is right, rows of dS do not sum to 0
delta-of-another-out: the row term D is not that of its row: of another output, or of a part of it
    which out the preprocess pass gets, and which rows and heads it reads
    dq and dk are off by a multiple of each row's mean key; dv is right
lse-gradient-dropped: the cotangent of lse is ignored
    D = dout . out - dlse
    right where dlse is 0; dq and dk lack P dlse
lse-gradient-sign: the cotangent of lse enters with the wrong sign, or twice
    D = dout . out - dlse
    dq and dk are off by twice what dlse adds
# heads, layout, tiles
gqa-head-map: query heads read the wrong key/value head
    the map of grouped heads: h // group, not h % num_heads_kv; repeat_interleave, not repeat
    head 0 is right; with one key/value head, or as many as query heads, all are
gqa-group-not-summed: dk or dv holds one head of each group, not the sum
    the store of dk and dv: heads of a group write to one place, and must add up
    dk and dv are too small; with one query head a group they are right
gradients-swapped: dk and dv are exchanged
    the order in which gradients are returned, a tuple
    two gradients are wrong, and right in each other's place
transposed: a result is stored in another layout
    the order of tokens, heads and columns: a view where a transpose was meant
    all of it is wrong, though the sorted values are right
tail-tile-dropped: the last, partial tile is left out
    the number of tiles: round up, and mask the rest
    lengths that are multiples of the tile are right
rows-not-written: some rows are never written
    the number of tiles that are launched, and the bound of the stores
    rows hold zeros, NaN or what was there before
tile-skipped: a tile of keys is skipped
    the bounds of the loop over key tiles, which leave out masked ones
    rows lack the same tile: the first, the last or the diagonal one
tile-counted-twice: a tile of keys counts twice
    the split between masked and unmasked tiles of the loop
    one tile's keys have twice their weight
tile-overwrites: a sum over tiles holds the contribution of one tile alone
    the store inside of the loop: it must add, or stand behind the loop
    right where there is one tile; elsewhere what the last or first one adds
accumulator-not-reset: a tile of a result holds the sums of the tiles before it too
    where the accumulator is cleared: in the loop over tiles, not in front of it
    the first tile of every sequence is right; the sum over all tiles is not
race: two equal calls give different numbers
    a missing barrier, or two threads that store to one place
    rows are wrong now and then, others at each call
# what is read
arguments-swapped: two arrays stand in each other's place
    the order of arguments and of saved tensors
    all results that use these two are wrong
input-layout: an input is read in another layout than it has
    the order of axes, strides and integer width of that input
    all results are wrong, those of one token or one head are right
statistics-misplaced: row statistics (lse, delta, e, W) are read at other rows' places
    the index of lse and delta: head * total_q + cu_seqlens[b] + row
    right for the first sequence or head, wrong behind it
stale-tile: a product takes rows of one operand from another tile, or in another order
    the stage or buffer that this product reads, and the barrier before it
    right with one tile; else rows are made with the tile before
softmax-axis: the softmax, or its derivative, sums over queries in place of keys
    the axis of the row maximum, the row sum and of sum(P o dP): dim=-1, not -2
    rows of P do not sum to 1, its columns do
pairs-dropped: some pairs of query and key tiles add nothing to the gradients
    the bounds of the backward loop: where the first tile starts and the last one ends
    dk and dv lack some queries, or dq some keys; out is right
gqa-reduction-map: dk and dv are summed over the query heads of another group
    the view of the heads in the reduction: (num_heads_kv, group), not the other way round
    dk and dv are wrong with several key/value heads and groups, their sum over heads is right
constant-factor: a result is a constant times the right one
    what scales it last; a workspace that is not zeroed; a sum that is taken twice
    one slope everywhere, which leaves nothing
wrong-keys: queries see other keys than they should
    the bounds of the loop over keys, and the comparison of query and key index in it
    out and lse are those of another mask
# second order
second-frozen-p: an intermediate is held constant: P has no derivative
    what the first backward pass saves: an intermediate that is no input or output
    gradients of a gradient lack all terms through P; first gradients are right
second-frozen-delta: an intermediate is held constant: the row term D has no derivative
    a detached delta
    gradients of a gradient lack the terms through D; first gradients are right
second-w-omitted: the row term W = dout . ddout is missing
    the preprocess pass of the second backward
    gq and gk are wrong, ddout is right
tangent-e-omitted: the tangent of P is not centred: e is missing or wrong
    P' = P o (E - e), where e is the row's mean of E under P
    ddout, or tout, has the row's mean too much
tangent-scale: softmax_scale is missing, or there twice, in a second derivative or a tangent
    E = s (ddq K^T + q ddk^T), and the outer s of gq and gk
    second derivatives are off by one factor
second-term-dropped: a term of a second derivative or a tangent is missing, or counts otherwise
    gq = s (dS' K + dS ddk), gk = s (dS'^T Q + dS^T ddq), P ddv in ddout, dout ddv^T in dP'
    wrong even where P is constant, or right for a direction of q and k alone
tangent-lse-missing: the tangent of lse is 0
    tlse, or ddlse, = e, the row's mean of E under P
    it is 0, tout or ddout is right
# block-sparse
sparse-not-causal: blocks are not cut at the query
    the causal mask inside of blocks: the query's own one, which is always cut, and later ones
    queries see keys behind their own position, in their own block or in later ones
sparse-duplicate-twice: a block that is named twice counts twice
    duplicates, the own block among them: they must be removed
    rows that name a block twice are wrong, others are right
sparse-padding-read: padding indices are read as blocks
    indices below 0 or past the last block name nothing; -1 is the last one to NumPy and torch
    rows with padding are wrong, or it crashes
sparse-gate-gradient-missing: the gate has no gradient
    dblock_scale: the sum over a block's keys of dS s (q . k); its own direction beyond that
    dblock_scale is None or 0, all else is right
sparse-gate-not-summed: the gate's gradient holds one head of the group, not the sum
    the reduction over heads that share a selection
    dblock_scale is too small; with one head a selection it is right
sparse-gate-ignored: the gate does not multiply the scores
    block_scale on its way to the kernel, forward and backward
    right where block_scale is 1
sparse-own-block-missing: the query's own block is left out
    include_own_block
    rows lack the keys around them; those that name their own block are right
sparse-other-heads-selection: a head uses another head's selection
    the index into the middle axis of block_indices
    with one head a selection, or one for all, it is right
sparse-queries-lost: some queries that a block lists add nothing to its dk or dv
    the bounds of the loop over the queries of a block, and how many its list may hold
    right for blocks that few queries name
sparse-list-cut: a part of the list of named blocks is not walked
    the loop over slots, from the first to the last: padding (-1) must be skipped, not end it
    rows lack a selected block, or those behind padding
sparse-gate-order: factors of blocks stand at other blocks than they belong to
    the sort of the named blocks: block_scale must be permuted with them
    the right blocks with each other's factors; right where all factors are equal
sparse-gate-on-p: block_scale is applied otherwise than as a factor of the scores
    where the factor is applied: before the softmax
    right where block_scale is 1; lse may be right elsewhere
sparse-tile-union: queries see blocks that only other queries of their tile named
    the membership test of a query where its tile walks the union of the lists
    queries see more blocks than they named; right with one query a tile
sparse-masked-block-resets: a block that is masked as a whole resets the row
    the online softmax where a block adds nothing: its maximum is -inf
    rows lose what they had seen before such a block
sparse-lists-misread: lists of blocks are read at other places, or as other numbers, than they have
    the index into block_indices, block_counts and block_scale, and what is made of a block's id
    queries see blocks that others named, or neighbours of those that they named
sparse-other-place: a query stands at another key than it should
    i + seqlen_k - seqlen_q of the query itself, where its own block and the mask are made
    right where as many keys as queries are, or for the first query of a tile
sparse-inverted-lists: dk and dv are not those of the pairs of dq: lists from blocks back to queries
    the building of those lists: counts and fills skip the same entries, and bases are exact
    out and dq are right, dk and dv are not
sparse-counts-ignored: block_counts is ignored
    slots from block_counts on name nothing
    rows see blocks from slots that they do not use
# second order, where no class above names the term
direction-ignored: a direction is taken for zeros, as if it were not given
    each of ddq, ddk and ddv, or tq, tk and tv, on its way to the kernel: a wrong name, None
    as if this part of the direction were 0
# no bug of the kernel
wrong-dtype: a result has another dtype than it must have
    the cast at the end: gradients and out in the dtype of q, lse and delta in float32
    the numbers may be right; everything is judged again after a cast
vacuous: the comparison is vacuous: zeros would pass
    data of unit size, a random cotangent, and a check that a wrong result fails
    an all-zero result would pass as well
rounding: right, but as precise as a coarser dtype than that of the inputs
    the dtype of intermediates, and whether matmuls may run in TF32
    right down to a coarser rounding than the dtype has
unknown: wrong, in a way that no known bug reproduces
    where the wrong rows lie, and which identities fail
    the numbers are wrong, and no known bug gives them
"""


def classes_of(text: str) -> dict[str, BugClass]:
    """Classes by name, of three lines each."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for of in zip(*(lines[i::3] for i in range(3)), strict=True):
        name, _, title = of[0].partition(": ")
        found[name] = BugClass(title, *(line.strip() for line in of[1:]))
    return found


CLASSES = classes_of(TEXTS)

"""What a packed problem has by tokens, by which it is changed, and taken apart."""

from dataclasses import replace
from typing import Any

from rawattn.check.diagnose.engine.question import BY_ROW, OF_SINKS, Answers, Question, side_of

LISTS = ("block_indices", "block_counts", "block_scale", "tblock_scale")
BY_TOKENS = {  # what a question has by rows of q and of k
    "q": ("q", "dout", "tq", "out", "dlse", "lse", *LISTS),
    "k": ("k", "v", "tk", "tv"),
}
BY_HEADS = ("dlse", *BY_ROW)  # (num_heads_q, tokens)


def part(
    question: Question, answers: Answers, first: int, stop: int, past: int = 0
) -> tuple[Question, Answers]:
    """Sequences from ``first`` on, and keys ``past`` them with results of 0; no sums over all."""
    changes: dict[str, Any] = {"whole": None}
    rows, kept = {}, {}
    for of in "qk":
        offsets = question.offsets(of)[first : stop + 1]
        kept[of] = int(offsets[-1] - offsets[0])
        rows[of] = slice(int(offsets[0]), int(offsets[-1]) + past * (of == "k"))
        for name in BY_TOKENS[of]:
            if (x := getattr(question, name)) is not None:
                changes[name] = x[:, rows[of]] if name in BY_HEADS else x[rows[of]]
        changes[f"cu_seqlens_{of}"] = offsets - offsets[0]
    if question.seqused_k is not None:
        changes["seqused_k"] = question.seqused_k[first:stop]
    found = {}
    for name, x in answers.items():
        if name in OF_SINKS:
            continue
        of = side_of(name)
        found[name] = x[:, rows["q"]] if name in BY_ROW else x[rows[of]]
        if past and of == "k":
            found[name] = found[name].copy()
            found[name][kept[of] :] = 0
    return replace(question, **changes), found

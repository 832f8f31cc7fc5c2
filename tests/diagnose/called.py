"""Planted bugs where something calls them: stage by stage, and with the signatures of rawattn's."""

from collections.abc import Callable
from typing import Any

from rawattn.check.candidate import Candidate
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.read.name import Readings, read
from tests.diagnose import plain
from tests.diagnose.hooks import GRADIENTS, Hooks, kernel
from tests.diagnose.plain import Array, Planted

Ask = Callable[[str], Callable[[Question], Answers] | None]


def wrong(hooks: Hooks, *stages: str) -> Planted:
    """A bug of no class, in all of these stages."""
    return Planted("", "", stages, kernel(hooks))


def asked(planted: Planted, *stages: str) -> Ask:
    """Its ``stages`` (of no name: all), each alone."""

    def ask(stage: str) -> Callable[[Question], Answers] | None:
        def of_stage(question: Question) -> Answers:
            found = plain.answers(planted, question)
            return {name: x for name, x in found.items() if name in STAGES[stage]}

        return of_stage if stage in (stages or STAGES) else None

    return ask


def told(planted: Planted, question: Question, *stages: str) -> Readings:
    """What is read off it."""
    return read(question, asked(planted, *stages))


def candidate(planted: Planted, *stages: str) -> Candidate:
    """Its dense passes, or those of ``stages``, as functions."""

    def answers(q: Array, k: Array, v: Array, offsets: Array, **options: Any) -> Answers:
        known = {n: x for n, x in options.items() if n in Question.__dataclass_fields__}
        keys = options.get("cu_seqlens_k")
        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets if keys is None else keys}
        return plain.answers(planted, Question(q, k, v, **known | given))

    def forward(*inputs: Array, **options: Any) -> tuple[Array, ...]:
        found = answers(*inputs, **options)
        return found["out"], found["lse"]

    def backward(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, cu: Array, **options: Any
    ) -> tuple[Array, ...]:
        found = answers(q, k, v, cu, **options, dout=dout, out=out, lse=lse)
        return tuple(found[name] for name in GRADIENTS)

    passes = {"forward": forward, "backward": backward}
    return Candidate("plain", "numpy", **{n: passes[n] for n in stages or passes})

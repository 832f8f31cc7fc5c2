"""What is called: plants stage by stage, or with rawattn's signatures; and the command itself."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rawattn.check.candidate import Candidate
from rawattn.check.cli import main
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.read.name import Readings, read
from tests.diagnose import plain
from tests.diagnose.plain import Array, Planted
from tests.diagnose.table import GRADIENTS, Hooks, kernel

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
    """Its passes, or those of ``stages``, as functions; dense, or with block_indices."""

    def answers(
        q: Array, k: Array, v: Array, offsets: Array, *blocks: Array, **options: Any
    ) -> Any:
        options |= {"own": options.get("include_own_block", True)}
        options |= dict(zip(("block_indices",), blocks, strict=False))
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


def in_sweeps(names: Iterable[str], every: int) -> list[Any]:
    """Parameters of which each ``every``-th is run always."""
    sweep = pytest.mark.sweep
    return [pytest.param(x, marks=[sweep] if n % every else []) for n, x in enumerate(names)]


def call(*arguments: Any) -> Result:
    """rawattn-check with these arguments; what it does not mean to raise is raised."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if not (result.exception is None or isinstance(result.exception, SystemExit)):
        raise result.exception
    return result


def said(result: Result) -> str:
    """All that was printed, without frames and line ends: paths are long."""
    plain = "".join(c for c in result.output if c not in "│╭╮╰╯─")
    return " ".join(plain.split()).replace("- ", "-")

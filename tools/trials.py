"""How often rawattn-check names the planted bug, and whether it names one where there is none.

    python tools/trials.py [--count 5] [--seed 0] [--every 1] [--workers 2] [--only CLASS ...]

Plants every class of tests/diagnose/planted/ in the plain implementations there, on random
problems; and judges right implementations on as many. They are asked, as `diff` asks a candidate.
The exit code is 0 if at least SHARE of the trials name the bug first, none names a wrong one with
high confidence, and no right implementation is accused.
"""

import argparse
import importlib
import itertools
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SHARE = 0.97
RIGHT = 300
ROOT = Path(__file__).resolve().parents[1]
PLANTED = "tests.diagnose.planted"
FILES = sorted(f"{PLANTED}.{file.stem}" for file in ROOT.joinpath(*PLANTED.split(".")).glob("*.py"))


class Trial(NamedTuple):
    """What was planted (``bug`` "" for nothing), and what was said."""

    bug: str
    variant: str
    problem: str
    named: str
    confidence: str
    alternatives: tuple[str, ...]
    also: tuple[str, ...]
    seconds: float

    @property
    def right(self) -> bool:
        if not self.bug:
            return not self.named
        return self.named in (self.bug, *self.also)

    @property
    def accuses(self) -> bool:
        """Wrong, and sure of it."""
        return not self.right and self.confidence in ("proved", "high")


def trial(file: str, index: int, seed: int) -> Trial:
    """One plant of a file on one problem."""
    module = importlib.import_module(file)
    planted = module.PLANTED[index]
    question = _problem(module, planted, seed)
    name = f"{planted.bug}: {planted.variant}"
    if planted.bug != "race":
        return _judge(planted.bug, name, planted.also, question, partial(module.answers, planted))
    calls = itertools.count()

    def call(asked: Any) -> Any:
        return module.answers(planted, asked, next(calls))

    return _judge(planted.bug, name, planted.also, question, call, again=True)


def right_trial(kind: Any, seed: int) -> Trial:
    """A right implementation on the problem of some plant."""
    module = importlib.import_module(f"{PLANTED}.first")
    for number in itertools.count(seed):
        question = _problem(module, module.PLANTED[number % len(module.PLANTED)], number)
        if question.dtype in kind.needs.dtypes:
            break
    call = partial(module.right_answers, kind)
    return _judge("", f"right: {kind.variant}", (), question, call)


def _problem(module: Any, planted: Any, seed: int) -> Any:
    """A problem that shows the plant; dtypes take turns."""
    turn = seed % 3
    return next(itertools.islice(module.problems(planted, turn + 1, seed), turn, None))


def _judge(
    bug: str,
    variant: str,
    also: tuple[str, ...],
    question: Any,
    call: Callable[[Any], Any],
    again: bool = False,
) -> Trial:
    """What is said of a function; ``again``: it gives other numbers when it is called again."""
    from rawattn.check.diagnose.engine.question import STAGES
    from rawattn.check.diagnose.judge.diagnosis import diagnose
    from rawattn.check.diagnose.read.name import read

    answers = call(question)

    def ask(stage: str) -> Any:
        def of_stage(asked: Any) -> Any:
            return {name: x for name, x in call(asked).items() if name in STAGES[stage]}

        return of_stage if any(name in answers for name in STAGES[stage]) else None

    began = time.perf_counter()
    told = read(question, ask)
    findings = diagnose(question, answers, call=call if again else None, told=told).findings
    found = [finding for finding in findings if finding.bug != "rounding"]
    seconds = time.perf_counter() - began
    q = question
    problem = f"{q.dtype.name} {q.lengths_q} {q.lengths_k} {q.q.shape} {q.k.shape}"
    if not found:
        return Trial(bug, variant, problem, "", "", (), also, seconds)
    first = found[0]
    said = first.bug, first.confidence, first.alternatives
    return Trial(bug, variant, problem, *said, also, seconds)


def _ready() -> None:
    """In a worker: the tests' modules can be imported, and matmuls keep to one thread."""
    sys.path.insert(0, str(ROOT))
    warnings.filterwarnings("error", "a search of rawattn-check failed")


def run(count: int, workers: int, only: list[str], seed: int, every: int = 1) -> list[Trial]:
    """``count`` trials of every class, over its variants in turn, and ``RIGHT`` right ones.

    every: take each n-th variant of a class alone, another one with another seed.
    """
    _ready()
    jobs: list[Any] = []
    for file in FILES:
        module = importlib.import_module(file)
        by_class: dict[str, list[int]] = {}
        for index, planted in enumerate(module.PLANTED):
            by_class.setdefault(planted.bug, []).append(index)
        for bug, indices in by_class.items():
            if only and bug not in only:
                continue
            indices = indices[seed % every % len(indices) :: every]
            turns = max(count, len(indices))
            jobs += [
                partial(trial, file, indices[i % len(indices)], seed + i) for i in range(turns)
            ]
    if not only or "right" in only:
        kinds = importlib.import_module(f"{PLANTED}.first").RIGHT
        jobs += [
            partial(right_trial, kind, seed + i + turn)
            for i, kind in enumerate(kinds)
            for turn in range(-(-RIGHT // len(kinds)))
        ]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, initializer=_ready) as pool:
        return list(map(_shown, pool.map(_call, jobs)))


def _call(job: Any) -> Trial:
    found: Trial = job()
    return found


def _shown(one: Trial) -> Trial:
    """The same, told at once if it went wrong."""
    if not one.right:
        sure = "ACCUSES" if one.accuses else "wrong"
        print(f"{sure}: {one.variant}\n  {one.problem}\n  said {one.named or 'nothing'}", end="")
        others = ", ".join(one.alternatives) or "nothing else"
        print(f", {one.confidence}, or {others} ({one.seconds:.1f} s)", flush=True)
    return one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5, help="trials of a class, at least")
    parser.add_argument("--every", type=int, default=1, help="of a class's variants, each n-th")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--only", nargs="+", default=[], metavar="CLASS", help='or "right"')
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trials = run(options.count, options.workers, options.only, options.seed, options.every)
    planted = [one for one in trials if one.bug]
    missed = Counter(one.bug for one in planted if not one.right)
    alarms = [one for one in trials if not one.bug and not one.right]
    accused = [one for one in trials if one.accuses]
    classes = len({one.bug for one in planted})
    named = len(planted) - sum(missed.values())
    slowest = max((one.seconds for one in trials), default=0.0)
    print(f"{classes} classes, {len(planted)} trials, {named} named first; missed {dict(missed)}")
    print(f"{len(trials) - len(planted)} right implementations, {len(alarms)} false alarms")
    print(f"{len(accused)} wrong with high confidence; the slowest took {slowest:.1f} s")
    if options.json:
        told = {"classes": classes, "trials": len(planted), "named": named, "missed": missed}
        told |= {"right": len(trials) - len(planted), "false_alarms": len(alarms)}
        told |= {"wrong_with_high_confidence": len(accused), "slowest_s": round(slowest, 1)}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    good = named >= SHARE * len(planted) and not alarms and not accused
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

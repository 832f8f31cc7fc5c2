"""explain, dump, harness: they exit with 1 where something is wrong. Long by options and help."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.text import Text

from rawattn.check import report
from rawattn.check.candidate import Unsupported, load
from rawattn.check.cases import DTYPES, Case, standard, with_options
from rawattn.check.diagnose.engine.question import STAGES, Question, part
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.files.npz import Saved, dump, load_two
from rawattn.check.diagnose.findings import Diagnosis, Finding, of_sides
from rawattn.check.diagnose.harness import pairs
from rawattn.check.diagnose.judge import failures
from rawattn.check.diagnose.judge.diagnosis import diagnose, of_all, sizes_of
from rawattn.check.diagnose.judge.least import of_shortest
from rawattn.check.diagnose.judge.proofs import meant, of_past, of_sinks
from rawattn.check.diagnose.logs.explain import explain_log
from rawattn.check.diagnose.read.name import packed, read_packed
from rawattn.check.diagnose.read.probe import Refused
from rawattn.check.diagnose.report import terminal
from rawattn.check.machine import default_framework, use_simulator
from rawattn.check.options import NewFile, html_option, json_option, rare_options
from rawattn.check.sparse_cases import BLOCK_SIZES, SparseCase, standard_sparse
from rawattn.check.transfer import FRAMEWORKS

OTHERS = 600  # tokens of a file's last sequences, of which what is found must be so too
LENGTHS = (20, 70, 1, 37)  # of a random problem, where no others are said
Existing = click.Path(exists=True, dir_okay=False, path_type=Path)
framework_option = click.option(
    "--framework", type=click.Choice(FRAMEWORKS), help="its arrays: torch with a GPU, else numpy."
)
Told = tuple[Diagnosis, terminal.About]


def integers(value: str) -> tuple[int, ...]:
    """Integers with commas between them, ``448,1280``; blanks and brackets do not matter."""
    try:
        return tuple(int(part) for part in value.strip("[]() ").split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of integers such as 448,1280") from error


def showing(command: Callable[..., Told]) -> Callable[..., None]:
    """What a command tells is shown and written, as three more options say; it leaves by exit."""

    @click.option("--full", is_flag=True, help="show all evidence.")
    @html_option
    @json_option
    @wraps(command)
    def shown(
        *args: Any, full: bool, html_file: Path | None, json_file: Path | None, **options: Any
    ) -> None:
        (diagnosis, about), console = command(*args, **options), report.console()
        terminal.show(console, diagnosis, about, full=full)
        terminal.facts(console, diagnosis, full=full)
        if diagnosis.findings and not full:
            console.print(Text("--full shows all evidence", "dim"))
        if html_file is not None:
            html_file.write_text(terminal.page(diagnosis, about), encoding="utf-8")
        if json_file is not None:
            text = json.dumps(terminal.as_json(diagnosis), indent=1, allow_nan=False)
            json_file.write_text(text, encoding="utf-8")
        sys.exit(0 if terminal.nothing_wrong(diagnosis) else 1)

    return shown


@contextmanager
def refused(where: str = "") -> Iterator[None]:
    """What is said wrongly is the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(f"{where}{error}") from error


@click.command("explain")
@click.argument("files", nargs=-1, type=Existing, metavar="[A.npz [B.npz]]")
@click.option("--log", type=Existing, help="a text with printed tensors, no arrays.")
@click.option(
    "--class", "class_", type=click.Choice([*terminal.KNOWN]), metavar="NAME", help="what it is."
)
@showing
def explain_command(files: tuple[Path, ...], log: Path | None, class_: str | None) -> Told:
    """Say which side is wrong, and which bug it is, from saved arrays or from a printed log.

    A.npz holds inputs and results of one run of attention, of any language: q, k, v, cu_seqlens,
    causal, dout, out, lse, dq, dk, dv, and what else there is, by these or other usual names; with
    a batch also layout (bthd, bhtd) and, where there is padding, lengths. `rawattn-check dump`
    writes such a file. A single one is compared with the float64 attention of its inputs. With
    B.npz both sides are judged; what a file does not say is as in the other, except dlse.
    """
    if bool(files) + bool(log) + bool(class_) != 1 or len(files) > 2:
        raise click.UsageError("say one or two .npz files, or --log FILE, or --class NAME")
    if class_:
        known = terminal.KNOWN[class_]
        click.echo(f"{class_}: {known.title}\n   = fix:   {known.look_at}")
        sys.exit(0)
    if log:
        with refused(f"{log}: "):
            diagnosis = explain_log(log.read_text(encoding="utf-8", errors="replace"))
        return diagnosis, terminal.About(again=_repeated("explain", "--log", log))
    sides = dict(zip("AB", (file.name for file in files), strict=False))
    return _of_files(*files), terminal.About(sides, again=_repeated("explain", *files))


@click.command("dump")
@click.argument("case", required=False)
@click.option("--list", "listing", is_flag=True, help="show the standard cases.")
@click.option("--out", "file", type=NewFile(), help="where to write; CASE.npz by default.")
@click.option("--candidate", metavar="FILE.py:NAME", help="whose results; else the reference's.")
@framework_option
@click.option("--lengths", type=integers, help="of a random case: tokens of the sequences.")
@click.option("--lengths-k", type=integers, help="their keys, where these are other numbers.")
@click.option("--heads", default=4, show_default=True, help="query heads.")
@click.option("--heads-kv", type=int, help="key/value heads; as many by default.")
@click.option("--head-dim", default=64, show_default=True)
@click.option("--head-dim-v", type=int, help="of v and out; the same by default.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
@click.option("--causal", is_flag=True)
@click.option("--window", type=integers, help="LEFT,RIGHT keys beside a query's own; -1: open.")
@click.option("--softmax-scale", type=float, help="head_dim ** -0.5 by default.")
@rare_options
@click.option("--block-size", type=click.Choice(map(str, BLOCK_SIZES)), help="block-sparse: keys.")
@click.option("--num-selected", default=4, show_default=True, help="block-sparse: blocks a query.")
@click.option(
    "--identify/--plain",
    default=None,
    help="with sequences whose results tell all of a kernel's weights, entry by entry (the default "
    "without CASE and --lengths), or the problem alone, with its sliding branch.",
)
@click.option(
    "--intermediates", "sequence", type=int, help="S, P, dP, dS (E, tP, tdS) of it, by its index."
)
@click.option("--seed", default=0, show_default=True)
def dump_command(case: str | None, listing: bool, file: Path | None, **said: Any) -> None:
    """Write inputs and results of a case to a .npz file, for `rawattn-check explain`.

    CASE is one of the standard cases of --list; without one a random problem is made. Run your
    kernel on its inputs, save the results under the same names, and let the two be explained.
    """
    every: tuple[Case, ...] = (*standard("small"), *standard_sparse("small"))
    if listing:
        for one in every:
            click.echo(f"{one}: {sizes_of(failures.question_of(one))}")
        return
    lengths, sequence, identify = (said.pop(name) for name in ("lengths", "sequence", "identify"))
    candidate, framework, seed = (said.pop(name) for name in ("candidate", "framework", "seed"))
    rare = [said.pop(name) for name in ("softcap", "sinks", "seqused")]
    if rare[-1] and not lengths and said["lengths_k"] is None:  # which tells both ends of keys
        said["lengths_k"] = tuple(n + 6 for n in LENGTHS)
    if case and lengths:
        raise click.UsageError("say a CASE (--list shows them), or --lengths of a random one")
    use_simulator()
    identify = not (case or lengths or sequence is not None) if identify is None else identify
    known = [one for one in every if case in (one.name, str(one))]
    if case and not known:
        raise click.UsageError(f"no standard case is called {case!r}; --list shows them")
    chosen = known[0] if case else _random_case(lengths or LENGTHS, **said)
    chosen = failures.small(chosen) if identify and case else chosen
    if any(rare) and isinstance(chosen, SparseCase):
        raise click.UsageError("block-sparse attention has no --softcap, --sinks or --seqused")
    chosen, whose = with_options(chosen, *rare), candidate or "the reference"
    try:
        if candidate:
            judged = load(candidate, framework or default_framework())
            chosen = judged.fit(chosen)
        question = failures.question_of(chosen, seed, clean=identify or bool(lengths))
        about = {"identify": question.batch} if identify else {}
        question = packed(question) if identify else question
        question = replace(question, out=None, lse=None)
        answers = failures.reference_answers(question)
        if candidate:
            question = replace(question, out=answers["out"], lse=answers["lse"])
            answers = failures.answers_of(judged, question)
        if sequence is not None:
            answers |= structure.intermediates(question, answers, sequence)
    except (Refused, Unsupported, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except Exception as error:  # whatever a candidate throws
        raise click.ClickException(f"{whose} raises {type(error).__name__}: {error}") from error
    path = file or Path(f"{chosen}.npz")
    dump(path, question, answers, **about)
    click.echo(f"{path}: {sizes_of(question)}")
    click.echo(f"results of {whose}: {', '.join(answers)}")


@click.command("harness")
@click.argument("compare", metavar="FILE.py:COMPARE")
@framework_option
@click.option(
    "--dtype", multiple=True, type=click.Choice(DTYPES), help="one or more; all but float64 else."
)
@showing
def harness_command(compare: str, framework: str | None, dtype: tuple[str, ...]) -> Told:
    """Show which wrong results a comparison function lets pass.

    COMPARE(x, ref) is somebody's test: it returns whether x is right, or raises AssertionError.
    What else it takes, such as tolerances, must have defaults.
    """
    with refused():
        function, of = pairs.load_compare(compare), dtype or pairs.DTYPES
        diagnosis = pairs.examine(function, framework or default_framework(), dtypes=of)
    given = ["--framework", framework] if framework else []
    given += [word for one in dtype for word in ("--dtype", one)]
    return diagnosis, terminal.About(again=_repeated("harness", compare, *given))


def _repeated(*arguments: object) -> Callable[[Finding], str]:
    """The command again, with those of its options that were given."""
    return lambda finding: shlex.join(["rawattn-check", *map(str, arguments)])


def _of_files(*files: Path) -> Diagnosis:
    """The diagnosis of one side or of two; ``facts`` say what was read, and what was not."""
    with refused():
        pair = load_two(*files)
    paths = " and ".join(saved.path for saved in pair.sides)
    questions = [question for question in pair.questions if question is not None]
    if not questions:
        notes = "".join(f"; {note}" for saved in pair.sides for note in saved.notes)
        need = "save them with the results, which are computed again from them"
        raise click.UsageError(f"{paths}: there is no q, k and v: {need}{notes}")
    if not any(saved.answers for saved in pair.sides):
        raise click.UsageError(f"{paths}: there are inputs, but no results (out, lse, dq, ...)")
    identify = max(saved.identify for saved in pair.sides)
    sides = dict(zip("AB", pair.sides, strict=False))
    of_each = zip(sides.items(), questions, strict=True)
    judged = {of[0]: _of_side(*of, question, identify) for of, question in of_each if of[1].answers}
    titles = [f"{name} ({sides[name].path})" for name in judged]
    titles += ["the float64 reference"] if len(titles) == 1 else []
    found = of_sides(" against ".join(titles), judged)
    findings, facts = list(found.findings), list(found.facts)
    if pair.apart:
        title = "the two sides had different inputs, so that comparing their results says nothing"
        look_at = "what each side was given: save both from one run, with the very inputs of it"
        where = "the inputs of A and of B"
        findings.insert(0, Finding("both", "vacuous", title, where, "proved", pair.apart, look_at))
    for name, saved in sides.items():
        there = ", ".join(saved.answers) or "inputs alone"
        facts += [f"{name} is {saved.path}: {there}", *(f"{name}: {note}" for note in saved.notes)]
    facts += pair.notes
    return replace(found, findings=tuple(findings), facts=tuple(dict.fromkeys(facts)))


def _of_side(name: str, saved: Saved, question: Question, identify: int) -> Diagnosis:
    """The diagnosis of a file; what it lacks to be judged in full is a finding. identify: as in
    Saved, of either file; then the other sequences tell of the first ones, which are judged."""
    if identify:
        with refused(f"{saved.path}: "):
            here, answers, told = read_packed(question, saved.answers, identify)
        diagnosis = diagnose(here, answers, side=name, told=told)
        tokens = np.cumsum(question.lengths_q[::-1])
        some = part(question, saved.answers, int((tokens > OTHERS).sum()), question.batch)

        def lacking(f: Finding) -> list[str]:
            gives = failures.gives(*some[::-1], f.planted, f.tensors)
            return ["other sequences of the file"] * (gives is False)

        here_gives = partial(failures.gives, answers, here)
        findings = [failures.once_more(f, here, here_gives, lacking) for f in diagnosis.findings]
        findings.sort(key=lambda f: f.rank)
        of_rows = of_all(question, saved.answers, name, findings)
        of_heads = of_sinks(question, saved.answers, name, findings)
        return replace(diagnosis, findings=(*of_rows, *of_heads))
    diagnosis = diagnose(question, saved.answers, side=name)
    forward = any("forward" in one.stages for one in diagnosis.findings)
    left_out = saved.left_out if diagnosis.findings else ()
    for option, changes in meant(question, saved.answers, left_out, forward=forward):
        other = diagnose(replace(question, **changes), saved.answers, side=name)
        if not other.findings:
            title = f"right if {option} was meant, which is not said"
            given = title, saved.path, "high", saved.notes, "what was meant: save it too"
            return replace(other, findings=(Finding(name, "vacuous", *given),))
        unknown = ([one.bug == "unknown" for one in of.findings] for of in (other, diagnosis))
        now, before = ((sum(some), len(some)) for some in unknown)
        if now < before:
            fact = f"{name}: {option} is not said, and taken: then less is wrong"
            diagnosis = replace(other, facts=(*other.facts, fact))
    found = list(diagnosis.findings)
    for stage, needed in (("backward", "dout"), ("jvp", "tq, tk or tv"), ("second", "dout or tq")):
        names = ", ".join(tensor for tensor in STAGES[stage] if tensor in saved.answers)
        if names and stage not in question.stages:
            title = f"not judged, since there is no {needed}: {names}"
            look = "what was saved: add dout (grad_out) for gradients; tq, tk, tv for a direction"
            found.append(Finding(name, "vacuous", title, saved.path, "proved", (), look))
    found += of_past(question, saved.answers, name)
    parting, facts = structure.parting(question, saved.answers, saved.matrices), diagnosis.facts
    if parting is not None:
        facts = (*facts, f"{name}, step by step: {parting.text}")
        if not found and parting.step:
            title = f"{parting.step} is wrong, and no result shows it"
            said = title, parting.step, "medium", (parting.text,), structure.MADE[parting.step]
            found.append(Finding(name, "unknown", *said))
    found[:1] = [of_shortest(question, saved.answers, f) for f in found[:1]]
    return replace(diagnosis, findings=tuple(found), facts=facts)


def _random_case(lengths: tuple[int, ...], *, heads: int, num_selected: int, **sizes: Any) -> Case:
    """sizes: what else a Case has, and some of it by other names; None where it is not said."""
    said = {name: x for name, x in sizes.items() if x is not None}
    lengths_k, heads_kv = said.get("lengths_k", lengths), said.pop("heads_kv", heads)
    window, block_size = said.get("window", (-1, -1)), said.pop("block_size", None)
    if heads_kv < 1 or heads % heads_kv:
        raise click.UsageError(f"{heads} heads are no multiple of {heads_kv} key/value heads")
    if len(lengths_k) != len(lengths) or min(lengths + lengths_k) < 0:
        of_q, of_k = (",".join(map(str, some)) for some in (lengths, lengths_k))
        texts = f"--lengths is {of_q!r}, --lengths-k {of_k!r}"
        raise click.UsageError(f"{texts}; they must be as many, and none negative")
    if len(window) != 2:
        raise click.UsageError("--window must be two integers, LEFT,RIGHT")
    said = {"head_dim_v": said["head_dim"]} | said
    said |= {"lengths_q": lengths, "lengths_k": lengths_k, "past_q": 0, "past_k": 0}
    said |= {"num_heads_kv": heads_kv, "group": heads // heads_kv, "window": window}
    if block_size is None:
        return Case("random", **said)
    said |= {"block_size": int(block_size), "sliding": sizes["window"] is not None}
    return SparseCase("random", num_selected=num_selected, **said)

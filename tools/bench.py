"""Measure rawattn beside the peers that are importable, in one run, interleaved call by call.

Every time is the median GPU time of one call, the L2 cache flushed before it. An absolute number
holds only beside the numbers of the same run. Memory is the most that a contender takes beyond the
inputs. Accuracy is that of the forward against float64, ours and the peers'.

    python tools/bench.py --suite paper --suite varlen --json bench.json
    python tools/bench.py --suite paper --accuracy         # and the accuracy; alone without a suite
    python tools/bench.py --suite paper --sustained 1      # and alone, under continuous load
    python tools/bench.py --old ../before --suite seed     # beside the sources of another checkout
    python tools/bench.py --host
    python tools/bench.py --from tools/records/h200.json \\
        --markdown README.md --markdown tools/records/README.md --plot plots
"""

import json
from pathlib import Path
from typing import Any

import click

from measure.cases import SUITES, WORK
from measure.pages import markdown_tables, splice_all
from measure.tables import old_summary, print_tables
from measure.timing import DEFAULT_PEERS, LEAD_CYCLES, Plan, measure, wanted
from rawattn.variants import METHODS

FILE = click.Path(path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--suite", "suites", multiple=True, type=click.Choice(tuple(SUITES)), help="default: all"
)
@click.option(
    "--peers",
    default=None,
    help=f"comma-separated; default: {','.join(DEFAULT_PEERS)}; none with --old; flex on request",
)
@click.option("--only", default="", help="only cases whose name contains this")
@click.option(
    "--direction",
    "directions",
    multiple=True,
    type=click.Choice(tuple(WORK)),
    help="default: those of the suite",
)
@click.option(
    "--method", "methods", multiple=True, type=click.Choice(METHODS), help="also time these"
)
@click.option("--rounds", default=15, show_default=True)
@click.option(
    "--lead",
    default=LEAD_CYCLES,
    show_default=True,
    help="GPU cycles in which the host queues a round; 0: the host's time counts too",
)
@click.option(
    "--sustained", default=0.0, help="also each contender alone, back to back, for so many seconds"
)
@click.option("--heat", default=1.0, show_default=True, help="seconds of products before those")
@click.option(
    "--budget", default=300.0, show_default=True, help="seconds after which no case starts"
)
@click.option(
    "--against",
    default="sdpa_flash,torch_varlen",
    show_default=True,
    help="the chosen peers: the fastest of them counts",
)
@click.option(
    "--accuracy", is_flag=True, help="measure the accuracy too; without --suite, nothing else"
)
@click.option("--host", is_flag=True, help="measure host times instead of the suites")
@click.option(
    "--old", "tree", type=EXISTING, help="a checkout whose rawattn is timed too, host times as well"
)
@click.option("--from", "source", type=EXISTING, help="show a JSON file or record; measure nothing")
@click.option("--json", "target", type=FILE)
@click.option(
    "--markdown",
    "pages",
    multiple=True,
    type=EXISTING,
    help="write the tables between this file's markers",
)
@click.option("--plot", "plots", type=FILE, help="draw into this folder")
def main(
    suites: tuple[str, ...],
    only: str,
    directions: tuple[str, ...],
    against: str,
    budget: float,
    accuracy: bool,
    source: Path | None,
    target: Path | None,
    pages: tuple[Path, ...],
    plots: Path | None,
    **how: Any,
) -> None:
    result: dict[str, Any]
    if source:
        result, missing = json.loads(source.read_text()), 0
    else:
        names = suites or (() if accuracy else SUITES)
        cases = [case for name in names for case in SUITES[name]() if only in case.name]
        result, missing = run(cases, directions, budget, accuracy=accuracy, **how)
    chosen = against.split(",")
    print_tables(result, chosen)
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n")
    if pages:
        splice_all(pages, markdown_tables(result, chosen))
    if plots:
        from measure.plots import plot

        for path in plot(result, plots):
            click.echo(path)
    if missing:
        raise click.ClickException(f"{missing} measurements are missing")


def run(
    cases: list[Any],
    directions: tuple[str, ...],
    budget: float,
    *,
    peers: str | None,
    accuracy: bool,
    host: bool,
    tree: Path | None,
    **plan: Any,
) -> tuple[dict[str, Any], int]:
    """What was measured, and how many measurements are missing."""
    require_gpu()
    from measure.accuracy import cases as accuracy_cases
    from measure.accuracy import measure as measure_accuracy
    from measure.beside import load_old
    from measure.host import first_call_times, host_times
    from rawattn.check.machine import describe

    try:
        old = load_old(tree) if tree else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--old") from None
    if host:
        return describe() | {"host": host_times(old), "first_call": first_call_times()}, 0
    if peers is None:
        peers = "" if old else ",".join(DEFAULT_PEERS)
    chosen = tuple(filter(None, peers.split(",")))
    rows = measure(cases, directions, Plan(peers=chosen, old=old, **plan), budget)
    result = describe() | {"bench": rows}
    missing = len(wanted(cases, directions)) - len(rows)
    if accuracy:
        result["accuracy"] = measure_accuracy(chosen, budget)
        missing += len(accuracy_cases()) - len(result["accuracy"])
    if old:
        result |= {"old": old_summary(rows), "host": host_times(old)}
    return result, missing


def require_gpu() -> None:
    """ClickException in one line where nothing can be measured."""
    try:
        import torch
    except ModuleNotFoundError:
        raise click.ClickException(
            "the benchmark needs torch: install it as its site says"
        ) from None
    if not torch.cuda.is_available():
        raise click.ClickException(
            "no CUDA device that torch can use: measure on a GPU, or show a record with --from"
        )


if __name__ == "__main__":
    main()

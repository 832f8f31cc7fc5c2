"""Measure rawattn beside the peers that are importable, in one run, interleaved call by call.

Every time is the median GPU time of one call, the L2 cache flushed before it. An absolute number
holds only beside the numbers of the same run. Memory is the most that a contender takes beyond the
inputs.

    python tools/bench.py --suite paper --suite varlen --suite seed --json bench.json
    python tools/bench.py --suite second --suite second_length --plot plots
    python tools/bench.py --suite sparse --suite sparse_local --suite sparse_length
    python tools/bench.py --host
    python tools/bench.py --from tools/records/h200.json --markdown README.md --plot plots
"""

import json
from pathlib import Path
from typing import Any

import click

from measure.cases import SUITES, WORK
from measure.host import first_call_times, host_times
from measure.plots import plot
from measure.tables import markdown_tables, print_tables, splice
from measure.timing import DEFAULT_PEERS, LEAD_CYCLES, measure, wanted
from rawattn.check.machine import describe
from rawattn.variants import METHODS


@click.command()
@click.option(
    "--suite", "suites", multiple=True, type=click.Choice(tuple(SUITES)), help="default: all"
)
@click.option(
    "--peers", default=",".join(DEFAULT_PEERS), show_default=True, help="flex too, on request"
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
    "--budget", default=300.0, show_default=True, help="seconds after which no case starts"
)
@click.option(
    "--against",
    default="sdpa_flash,torch_varlen",
    show_default=True,
    help="the chosen peers: the fastest of them counts",
)
@click.option("--host", is_flag=True, help="measure host times instead of the suites")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="show a JSON file or record; measure nothing",
)
@click.option("--json", "target", type=click.Path(path_type=Path))
@click.option(
    "--markdown",
    type=click.Path(exists=True, path_type=Path),
    help="write the tables between this file's markers",
)
@click.option("--plot", "plots", type=click.Path(path_type=Path), help="draw into this folder")
def main(
    suites: tuple[str, ...],
    peers: str,
    only: str,
    directions: tuple[str, ...],
    methods: tuple[str, ...],
    rounds: int,
    lead: int,
    budget: float,
    against: str,
    host: bool,
    source: Path | None,
    target: Path | None,
    markdown: Path | None,
    plots: Path | None,
) -> None:
    """Measure rawattn beside the peers that are importable, in one run."""
    missing = 0
    result: dict[str, Any]
    if source:
        result = json.loads(source.read_text())
    elif host:
        result = describe() | {"host": host_times(), "first_call": first_call_times()}
    else:
        cases = [case for name in suites or SUITES for case in SUITES[name]() if only in case.name]
        chosen_peers = peers.split(",") if peers else []
        rows = measure(cases, directions, chosen_peers, methods, rounds, budget, lead)
        result = describe() | {"bench": rows}
        missing = len(wanted(cases, directions)) - len(rows)
    chosen = against.split(",")
    print_tables(result, chosen)
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n")
    if markdown:
        text = markdown.read_text()
        for name, body in markdown_tables(result, chosen).items():
            text = splice(text, name, body)
        markdown.write_text(text)
    if plots:
        for path in plot(result["bench"], plots):
            click.echo(path)
    if missing:
        raise click.ClickException(f"{missing} measurements are missing")


if __name__ == "__main__":
    main()

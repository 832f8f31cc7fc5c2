"""What the subcommands of rawattn-check have in common: options, and refusals before the work."""

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from rawattn import env
from rawattn.check.compiled import arch_number
from rawattn.variants import TABLE, names_in


class NewFile(click.Path):
    """A file to write when the work is done; its folder is there beforehand."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        path = super().convert(value, param, ctx)
        if not Path(os.fsdecode(path)).parent.is_dir():
            self.fail(f"there is no folder {Path(os.fsdecode(path)).parent}: make it first", param)
        return path


def known_archs(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """The architectures, each once; refused where no row could be compiled for one."""
    try:
        for name in names:
            arch_number(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return tuple(dict.fromkeys(names))


json_option = click.option("--json", "json_file", type=NewFile(), help="write all of it.")
html_option = click.option("--html", "html_file", type=NewFile(), help="write it as one page.")
filter_option = click.option(
    "--filter", "text", default="", help="only cases and rows whose name contains this."
)
quick_option = click.option("--quick", is_flag=True, help="a few cases, and a row of each kernel.")
arch_option = click.option(
    "--arch", "archs", multiple=True, callback=known_archs, help="such as sm_90; may be repeated."
)

Command = TypeVar("Command", bound=Callable[..., Any])


def rare_options(command: Command) -> Command:
    """Options of what few problems have, for commands that choose cases."""
    softcap = click.FloatRange(min=0, min_open=True)
    for option in (
        click.option("--seqused", is_flag=True, help="some keys are not in use (seqused_k)."),
        click.option("--sinks", is_flag=True, help="a learned logit a head in the denominator."),
        click.option("--softcap", type=softcap, metavar="C", help="scores are C tanh(score / C)."),
    ):
        command = option(command)
    return command


def refuse_no_folders() -> None:
    """UsageError where a variable that names a folder names something else."""
    for variable in (env.CACHE_DIR, env.DUMP):
        path = env.value(variable)
        if path and os.path.lexists(path) and not Path(path).is_dir():
            raise click.UsageError(
                f"{variable.name} is {path!r}, which is no folder: name a folder, or unset it"
            )


def doubts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What in the environment has no effect: variables and rows that do not exist."""
    known = [variable.name for variable in env.VARIABLES]
    found = [
        f"{name} is set, but there is no such variable{_instead(name, known)}"
        for name in sorted(environ)
        if name.startswith("RAWATTN_") and name not in known
    ]
    rows = [row.name for row in TABLE]
    for name in names_in(environ.get(env.VARIANT.name, "")):
        if name not in rows:
            unknown = f"{env.VARIANT.name} names {name!r}, which is no row"
            found.append(f"{unknown} of `rawattn-check variants`{_instead(name, rows)}")
    return found


def _instead(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"; is {near[0]} meant?" if near else ""

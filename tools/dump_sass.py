"""The machine code of a row of the variants table, and how often each instruction stands in it.

    python tools/dump_sass.py forward_sm80_d128_128x64 --arch sm_90 --out sass

Needs no GPU, only cuobjdump or nvdisasm: of NVIDIA's toolkit on PATH, or of the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm in this environment.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rawattn import jit
from rawattn.check.compiled import builds
from rawattn.variants import TABLE

# What an attention kernel is read for: products, copies, atomics, exponentials, spills.
NOTABLE = {
    "HMMA": "tensor core product",
    "HGMMA": "tensor core product of a warpgroup",
    "LDSM": "ldmatrix",
    "LDGSTS": "cp.async",
    "UTMALDG": "TMA load",
    "LDS": "shared load",
    "STS": "shared store",
    "LDG": "global load",
    "STG": "global store",
    "RED": "atomic add without result",
    "REDG": "atomic add without result",
    "ATOMG": "atomic add with result",
    "MUFU": "exponential, logarithm, reciprocal",
    "SHFL": "shuffle",
    "BAR": "barrier of the CTA",
    "LDL": "spill load",
    "STL": "spill store",
}
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE
)


def histogram(sass: str) -> Counter[str]:
    """How often each opcode stands in a disassembly, modifiers left out."""
    return Counter(_INSTRUCTION.findall(sass))


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin; RuntimeError when there is no disassembler."""
    for tool, options in (("cuobjdump", ["-sass"]), ("nvdisasm", [])):
        if path := _found(tool):
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin)
                file.flush()
                command = [path, *options, file.name]
                return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    raise RuntimeError(
        "no disassembler: put cuobjdump or nvdisasm of NVIDIA's toolkit on PATH, or install "
        "nvidia-cuda-cuobjdump or nvidia-cuda-nvdisasm"
    )


def _found(tool: str) -> str | None:
    """A program on PATH or in one of NVIDIA's packages, which keep theirs in nvidia/*/bin."""
    kept = [str(folder) for path in sys.path for folder in Path(path).glob("nvidia/*/bin")]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(kept))


@click.command()
@click.argument("row", type=click.Choice([r.name for r in TABLE if r.family != "numba"]))
@click.option("--arch", default="sm_90", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="folder that gets the disassembly")
def main(row: str, arch: str, out: Path | None) -> None:
    """The instructions of ROW, as compiled for --arch, counted by opcode."""
    console = Console()
    [chosen] = [r for r in TABLE if r.name == row]
    for number, build in enumerate(builds(chosen)):
        try:
            sass = disassemble(jit.compile_build(build, arch).cubin)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        counts = histogram(sass)
        title = f"{row} {arch} {build.dtype}, {sum(counts.values())} instructions"
        table = Table("opcode", "count", "what", title=title)
        for opcode, count in counts.most_common():
            if opcode in NOTABLE:
                table.add_row(opcode, str(count), NOTABLE[opcode])
        console.print(table)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            file = out / f"{row}_{arch}_{number}.sass"
            file.write_text(sass)
            console.print(str(file))


if __name__ == "__main__":
    main()

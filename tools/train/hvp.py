"""Hessian-vector products of the packed language model's loss, by rawattn and by torch.

    python tools/train/hvp.py                               # GPU if there is one, else a tiny model
    python tools/train/hvp.py --device cpu --dtype float64 --json hvp.json

The model of train_packed.py is trained for some steps; then H v, the loss's Hessian times a random
vector, is taken by double backward and by forward over reverse. Two things are judged:

    error      the largest, over the model's weights, relative difference of a weight's part of H v
               from central finite differences of the gradient, in float64 by dense mathematics
    asymmetry  |<u, H v> - <v, H u>| / |<u, H v>| for a random u

torch's attention is the dense mathematics, sequence by sequence, as no fused attention of torch has
a second derivative. The exit code is 0 if no number is above its limit, else 1.
"""

import itertools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from models import Attention, Size, attend_math, attend_rawattn
from packing import TextPack, texts
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from train_packed import RECIPE, cross_entropy
from training import Autocast, Setting, bar, options, settle, train

SIZES = {
    "cpu": Size(2, 2, 16, tokens=192, longest=96, steps=20, learning_rate=3e-3),
    "cuda": Size(4, 4, 64, tokens=2048, longest=512, steps=100, learning_rate=1e-3),
}
ATTENTIONS = {"rawattn": attend_rawattn, "torch": attend_math}
# By dtype: of the error, which in float64 is that of the differences, and of the asymmetry.
LIMITS = {
    "float64": (1e-7, 1e-11),
    "float32": (1e-4, 1e-5),
    "bfloat16": (0.05, 0.02),
    "float16": (0.01, 0.005),
}
STEP = 3e-4  # of the differences, beside a vector as long as all weights together

Vector = dict[str, Tensor]  # a number for every weight of the model
Loss = Callable[[Vector], Tensor]


@dataclass(frozen=True)
class Outcome:
    dtype: str
    attention: str
    method: str
    error: float
    asymmetry: float

    @property
    def passed(self) -> bool:
        error, asymmetry = LIMITS[self.dtype]
        return self.error <= error and self.asymmetry <= asymmetry


def double_backward(loss: Loss, weights: Vector, v: Vector) -> Vector:
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    flat = tuple(leaves.values())
    gradient = torch.autograd.grad(loss(leaves), flat, create_graph=True)
    product = torch.autograd.grad(gradient, flat, tuple(v.values()))
    return dict(zip(weights, product, strict=True))


def forward_over_reverse(loss: Loss, weights: Vector, v: Vector) -> Vector:
    _gradient, product = torch.func.jvp(torch.func.grad(loss), (weights,), (v,))
    return product


def finite_differences(loss: Loss, weights: Vector, v: Vector) -> Vector:
    """Of fourth order: two steps to either side."""

    def gradient(steps: int) -> Vector:
        return torch.func.grad(loss)({k: w + steps * STEP * v[k] for k, w in weights.items()})

    near, far = ((gradient(n), gradient(-n)) for n in (1, 2))
    return {
        k: (8 * (near[0][k] - near[1][k]) - (far[0][k] - far[1][k])) / (12 * STEP) for k in weights
    }


METHODS = {"double backward": double_backward, "forward over reverse": forward_over_reverse}


def dot(a: Vector, b: Vector) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def combine(a: float, x: Vector, b: float, y: Vector) -> Vector:
    return {name: a * x[name].double() + b * y[name].double() for name in x}


def random_vector(weights: Vector, seed: int) -> Vector:
    """As long as all weights together, in a direction that ``seed`` alone decides."""
    generator = torch.Generator().manual_seed(seed)
    v = {k: torch.randn(w.shape, generator=generator).to(w) for k, w in weights.items()}
    return combine(math.sqrt(dot(weights, weights) / dot(v, v)), v, 0.0, v)


def judge(setting: Setting, model: nn.Module, dtypes: list[str], names: list[str]) -> list[Outcome]:
    """Every method in every dtype by every attention; weights are float64 in float64 alone."""
    size = setting.size
    pack: TextPack = next(texts(setting.seed + 1, size.tokens, size.longest, setting.device))
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    v, other = (random_vector(weights, setting.seed + i) for i in (1, 2))

    def loss_of(attend: Attention, autocast: Autocast) -> Loss:
        def loss(weights: Vector) -> Tensor:
            def forward(*inputs: Any) -> Tensor:
                return functional_call(model, weights, inputs)

            return cross_entropy(forward, pack, attend, autocast)

        return loss

    expected = finite_differences(loss_of(attend_math, nullcontext), weights, v)

    def outcome(dtype: str, name: str, method: str) -> Outcome:
        autocast = nullcontext
        if dtype in ("bfloat16", "float16"):
            autocast = partial(torch.autocast, setting.device, getattr(torch, dtype))
        loss = loss_of(ATTENTIONS[name], autocast)
        single = torch.float64 if dtype == "float64" else torch.float32

        def product(v: Vector) -> Vector:
            cast = ({k: x.to(single) for k, x in vector.items()} for vector in (weights, v))
            return METHODS[method](loss, *cast)

        hv = product(v)
        errors = combine(1.0, hv, -1.0, expected)
        # Half of u is H v itself, lest <u, H v> be a small difference of large numbers.
        u = combine(1.0, other, math.sqrt(dot(other, other) / dot(hv, hv)), hv)
        there, back = dot(u, hv), dot(v, product(u))
        return Outcome(
            dtype,
            name,
            method,
            error=max(float(errors[k].norm() / expected[k].norm()) for k in weights),
            asymmetry=abs(there - back) / abs(there),
        )

    return [outcome(*choice) for choice in itertools.product(dtypes, names, METHODS)]


def show(console: Console, outcomes: list[Outcome]) -> None:
    table = Table(title="Hessian-vector products of the language model's loss")
    for column in ("dtype", "attention", "method", "error", "limit", "asymmetry", "limit", ""):
        table.add_column(column, no_wrap=True)
    for o in outcomes:
        error, asymmetry = LIMITS[o.dtype]
        numbers = (f"{x:.1e}" for x in (o.error, error, o.asymmetry, asymmetry))
        verdict = "[green]pass[/]" if o.passed else "[red]FAIL[/]"
        table.add_row(o.dtype, o.attention, o.method, *numbers, verdict)
    console.print(table)


@click.command(help=__doc__.splitlines()[0])
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(list(LIMITS)),
    default=("float64", "float32", "bfloat16"),
    show_default=True,
)
@options
def main(dtypes: tuple[str, ...], record: Path | None, attention: str, **chosen: Any) -> None:
    setting = settle(replace(RECIPE, sizes=SIZES), dtype="float32", **chosen)
    console = Console(width=120)
    with bar(console) as progress:
        curve, model = train(RECIPE, setting, "training", attend_math, progress)
    names = list(ATTENTIONS) if attention == "both" else [attention]
    outcomes = judge(setting, model, list(dtypes), names)
    console.print(f"after {len(curve.losses)} steps, at a loss of {curve.losses[-1]:.3f}")
    show(console, outcomes)
    if record:
        rows = [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]
        result = {"size": asdict(setting.size), "torch": torch.__version__, "products": rows}
        record.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if all(outcome.passed for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()

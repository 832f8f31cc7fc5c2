"""Reading a log: tensors in torch's or NumPy's form.

What cannot be read is refused where it is surely a tensor, and skipped where it may be prose.
"""

import re
from typing import Any

import numpy as np

from rawattn.check.diagnose.logs.tensor import FAR, Printed

NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
TOKEN = re.compile(rf"\[|\]|\.\.\.|(?:true|false|{NUMBER})(?![\w.])", re.IGNORECASE)
CONTENTS = re.compile(rf"(?:{TOKEN.pattern}|[\s,])*", re.IGNORECASE)
START = re.compile(
    rf"(?:\b(?:tf|torch|np|numpy|jnp|cp|mx)\.)?\b(?P<form>tensor|array|asarray)\s*\(\s*"
    rf"(?:(?P<factor>{NUMBER})\s*\*\s*)?\[|(?<![\w\])(.'\"])\[",
    re.IGNORECASE,
)
TRAILER = re.compile(
    r"(?:\s*,\s*\w+\s*=\s*(?:'[^']*'|<[^<>]*>|\([^()]*\)|[\w.]+(?:\([^()]*\)|\[[^\[\]]*\])?))*\s*\)?"
)


def read_log(text: str) -> tuple[str, list[Printed]]:
    """The text without colours and the like, and every tensor that it prints, in torch's or NumPy's
    form.

    Raises ValueError where a tensor begins that cannot be read: cut off, ragged, not of real
    numbers.
    """
    text = _clean(text)
    found = []
    after = at = 0
    while start := START.search(text, at):
        opening, at, surely = start.end() - 1, start.end(), start["form"] is not None
        line = text.count("\n", 0, opening) + 1
        try:
            data = _data(text, opening, surely=surely)
        except ValueError as error:
            raise ValueError(f"the tensor printed at line {line}: {error}") from None
        if data is None:
            continue
        strings, layout, at = data
        flat = strings.ndim == 1 and ("," in text[opening:at] or strings.size < 2)
        if not surely and (not strings.size or flat):
            continue
        trailer = ""
        if surely and (match := TRAILER.match(text, at)):
            trailer, at = match[0], match.end()
        name = _name(text[max(after, start.start() - 2000) : start.start()])
        name = name or f"tensor of line {line}"
        found.append(_printed(name, start, strings, layout, trailer))
        after = at
    return text, found


def _clean(text: str) -> str:
    """Without colours, carriage returns, and what test runners and launchers put before lines."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r", "")
    text = re.sub(r"np\.float\d+\(([^()]*)\)", r"\1", text)
    text = text.replace("Parameter containing:", "")
    return re.sub(r"(?m)^(?:E(?=[ \t]{2})|\[rank\d+\]:|>(?= ))", "", text)


Layout = list[tuple[int, int | None]]  # by axis: entries before "...", and after it


def _data(text: str, at: int, *, surely: bool) -> tuple[np.ndarray, Layout, int] | None:
    """The numbers from ``at`` on as they are written, their layout, and where they end; None for
    what cannot be read and may be prose, or a quoted program."""
    run = CONTENTS.match(text, at)
    assert run is not None
    stack: list[list[Any]] = [[]]
    for token in TOKEN.finditer(run[0]):
        if token[0] == "[":
            stack.append([])
        elif token[0] == "]":
            stack[-2].append(stack.pop())
        else:
            stack[-1].append(token[0])
        if len(stack) == 1:
            try:
                return *_flat(stack[0][0]), at + token.end()
            except ValueError:
                if surely:
                    raise
                return None
    rest = text[run.end() : run.end() + 1000].split()
    if not rest and (surely or run[0].count("[") > 1):
        raise ValueError("it ends within its brackets")
    if rest and surely and re.match(r"[-+.\d]", rest[0]):
        raise ValueError(f"{rest[0][:20]!r} is neither a real number nor a bracket")
    return None


def _flat(node: Any) -> tuple[np.ndarray, Layout]:
    """Nested lists as an array, without the "..." in them."""
    layout: Layout = []
    row = node
    while isinstance(row, list):
        items = [item for item in row if item != "..."]
        if len(items) < len(row) - 1:
            raise ValueError("two elisions in one row")
        front = row.index("...") if len(items) < len(row) else len(row)
        layout.append((front, len(items) - front if len(items) < len(row) else None))
        row = items[0] if items else ""
    try:
        return np.array(_without(node), dtype=np.str_), layout
    except ValueError:
        raise ValueError("its rows are of different lengths") from None


def _without(node: Any) -> Any:
    listed = isinstance(node, list)
    return [_without(item) for item in node if item != "..."] if listed else node


def _printed(
    name: str, start: re.Match[str], strings: np.ndarray, layout: Layout, trailer: str
) -> Printed:
    told = dict(re.findall(r"(\w+)\s*=\s*('[^']*'|\([^()]*\)|[\w.]+)", trailer))
    sizes = tuple(int(n) for n in re.findall(r"\d+", told.get("size") or told.get("shape") or ""))
    if len(sizes) != len(layout) or 0 in sizes:
        sizes = tuple(front if back is None else FAR for front, back in layout)
    places = tuple(np.r_[:front, -(back or 0) : 0] for front, back in layout)
    given = [string.lower() for string in strings.ravel().tolist()]
    decimals = max((len(s.split("e")[0].partition(".")[2]) for s in given), default=0)
    truth = {"true": "1", "false": "0"}
    factor = float(start["factor"] or 1)
    values, units = (
        np.array(numbers, np.float64).reshape(strings.shape) * factor
        for numbers in (
            [float(truth.get(s, s)) for s in given],
            [_unit(s, decimals) for s in given],
        )
    )
    dtype = told.get("dtype", "").removeprefix("torch.").strip("'")
    if not dtype and not any(re.search(r"[.en]", s) for s in given):
        dtype = "int64"
    elif not dtype and "arr" in (start["form"] or "").lower():
        dtype = "float64"
    while values.ndim > 2 and sizes[0] == 1:
        values, units, places, sizes = values[0], units[0], places[1:], sizes[1:]
    return Printed(name, start.start(), values, units, places, sizes, dtype)


def _unit(string: str, decimals: int) -> float:
    """The step of the last digit, 0 of what has none. NumPy drops zeros at the end, so it is that
    of the longest."""
    if decimals == 0 or not re.search(r"\d", string):
        return 0.0
    return float(f"1e{int(string.partition('e')[2] or 0) - decimals}")


def _name(before: str) -> str:
    """The name that stands before a tensor, on its line or the nearest one above."""
    lines = before.split("\n")
    words = lines.pop().strip(" \t([{")
    if not words:
        words = next((line.strip() for line in lines[:-4:-1] if line.strip()), "")
        if not words.endswith((":", "=")) and len(words.split()) > 2:
            return ""
    words = re.sub(r"\([^()]*=[^()]*\)$", "", words.rstrip(" \t:=([{"))
    words = re.split(r"[:!?;,|>]\s+|\.\s+", words)[-1].strip(" \t'\"`*([{,")
    parts = words.split()
    named = re.search("[A-Za-z]", words) is not None
    return (words if len(parts) <= 4 else parts[-1]) if named else ""

"""Reading a log: tensors in torch's or NumPy's form, and labelled figures.

What cannot be read is refused where it is surely a tensor, and skipped where it may be prose.
Long because a print has many small parts, each of them a line or two.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.logs.tensor import FAR, Number, Printed

NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
TOKEN = rf"\[|\]|\.\.\.|(?:true|false|{NUMBER})(?![\w.])"
CONTENTS = re.compile(rf"(?:{TOKEN}|[\s,])*", re.IGNORECASE)
START = re.compile(
    rf"(?:\b(?:tf|torch|np|numpy|jnp|cp|mx)\.)?\b(?:tensor|array|asarray)\s*\(\s*(?P<factor>{NUMBER}\s*\*\s*)?"
    rf"(?P<call>\[|{NUMBER}(?=[\s,)]))"
    r"|(?<![\w\])(.'\"])(?P<bare>\[)",
    re.IGNORECASE,
)
TRAILER = re.compile(
    r"(?:\s*,\s*\w+\s*=\s*(?:'[^']*'|<[^<>]*>|\([^()]*\)|[\w.]+(?:\([^()]*\)|\[[^\[\]]*\])?))*\s*\)?"
)
FIGURE = re.compile(
    rf"(?P<label>[A-Za-z_|][^:=\[\]]*?)"
    rf"(?:\s*(?<![<>!=+*/-])[:=](?!=)\s*|(?<=err)\s+|(?<=error)\s+|(?<=diff)\s+|(?<=difference)\s+)"
    rf"(?:tensor\(\s*)?(?P<value>[\[(]\s*{NUMBER}[^\[\]()]*[\])]|{NUMBER}(?![\w.:]))"
    r"(?P<suffix>\s*(?:[mun]?s\b|%))?",
    re.IGNORECASE,
)


class Contents(NamedTuple):
    """What a log holds. text: without colours and the like."""

    text: str
    tensors: tuple[Printed, ...]
    figures: tuple[Number, ...]


def read_log(text: str) -> Contents:
    """Every tensor that ``text`` prints, in torch's or NumPy's form, and every labelled figure
    outside of tensors; times and headlines are left out.

    Raises ValueError where a tensor begins that cannot be read: cut off, ragged, not of real
    numbers.
    """
    text = _clean(text)
    read = _read_tensors(text)
    return Contents(text, tuple(printed for printed, _ in read), _read_figures(text, read))


def _clean(text: str) -> str:
    """Without colours, carriage returns, and what test runners and launchers put before lines."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace("\r", "")
    text = re.sub(r"np\.float\d+\(([^()]*)\)", r"\1", text)
    text = text.replace("Parameter containing:", "")
    return re.sub(r"(?m)^(?:E(?=[ \t]{2})|\[rank\d+\]:|>(?= ))", "", text)


def _read_tensors(text: str) -> list[tuple[Printed, int]]:
    """Tensors, and where each ends."""
    found = []
    after, at, line, counted = 0, 0, 1, 0
    while start := START.search(text, at):
        opening = start.start("bare") if start["bare"] else start.start("call")
        line, counted = line + text.count("\n", counted, opening), opening
        at = opening + 1
        try:
            strings, layout, end = _data(text, opening)
        except _Unreadable as unreadable:
            if unreadable.fatal or (start["call"] and not unreadable.code):
                raise ValueError(f"the tensor printed at line {line}: {unreadable}") from None
            continue
        flat = len(layout) == 1 and ("," in text[opening:end] or len(strings) < 2)
        if start["bare"] and (not strings or flat):
            at = end
            continue
        trailer = ""
        if start["call"] and (match := TRAILER.match(text, end)):
            trailer, end = match[0], match.end()
        name = _name(text[max(after, start.start() - 2000) : start.start()])
        factor = float(start["factor"].rstrip("* \t\n")) if start["factor"] else 1.0
        form = start[0].split("(")[0].strip().lower().rpartition(".")[2]
        printed = _printed(strings, layout, factor, form, trailer)
        found.append((replace(printed, name=name, line=line, start=start.start()), end))
        after = at = end
    return found


class _Unreadable(Exception):
    """fatal: whatever it is, it is no prose. code: names stand in it, as in a quoted program."""

    def __init__(self, reason: str, *, fatal: bool = False, code: bool = False) -> None:
        super().__init__(reason)
        self.fatal, self.code = fatal, code


Layout = tuple[tuple[int, int | None], ...]  # by axis: entries before "...", and after it


def _data(text: str, at: int) -> tuple[list[str], Layout, int]:
    """The numbers from ``at`` on as they are written, their layout, and where they end."""
    if text[at] != "[":
        match = re.compile(NUMBER, re.IGNORECASE).match(text, at)
        assert match is not None
        return [match[0]], (), match.end()
    run = CONTENTS.match(text, at)
    assert run is not None
    stack: list[list[Any]] = [[]]
    for token in re.finditer(TOKEN, run[0], re.IGNORECASE):
        if token[0] == "[":
            stack.append([])
        elif token[0] == "]":
            stack[-2].append(stack.pop())
        else:
            stack[-1].append(... if token[0] == "..." else token[0])
        if len(stack) == 1:
            return *_flat(stack[0][0]), at + token.end()
    rest = text[run.end() : run.end() + 1000].split()
    if not rest:
        raise _Unreadable("it ends within its brackets", fatal=run[0].count("[") > 1)
    reason = f"{rest[0][:20]!r} is neither a real number nor a bracket"
    raise _Unreadable(reason, code=not re.match(r"[-+.\d]", rest[0]))


def _flat(node: Any) -> tuple[list[str], Layout]:
    """Nested lists as one list and the layout that all of a depth share."""
    if node.count(...) > 1:
        raise _Unreadable("two elisions in one row")
    front = node.index(...) if ... in node else len(node)
    items = [item for item in node if item is not ...]
    here: Layout = ((front, len(items) - front if ... in node else None),)
    inner = [_flat(item) for item in items if isinstance(item, list)]
    if not inner:
        return items, here
    if len(inner) < len(items) or any(layout != inner[0][1] for _, layout in inner):
        raise _Unreadable("its rows are of different lengths")
    return [string for strings, _ in inner for string in strings], here + inner[0][1]


def _printed(strings: list[str], layout: Layout, factor: float, form: str, trailer: str) -> Printed:
    """Without name and place."""
    told = dict(re.findall(r"(\w+)\s*=\s*('[^']*'|\([^()]*\)|[\w.]+)", trailer))
    shape = tuple(front + (back or 0) for front, back in layout)
    given: str = told.get("size") or told.get("shape") or ""
    total = tuple(int(size) for size in re.findall(r"\d+", given))
    if len(total) >= len(layout) and 0 in total:
        shape, layout = total, tuple((size, None) for size in total)
    elided = tuple(front if back is None else FAR for front, back in layout)
    sizes = total if len(total) == len(layout) else elided
    places = tuple(np.r_[:front, -(back or 0) : 0] for front, back in layout)
    truth = {"true": "1", "false": "0"}
    values = np.array([float(truth.get(s.lower(), s)) for s in strings], np.float64).reshape(shape)
    decimals = max((_decimals(s) for s in strings), default=0)
    units = np.array([_unit(s, decimals) for s in strings], np.float64).reshape(shape)
    dtype = told.get("dtype", "").removeprefix("torch.").strip("'")
    if not dtype and any(re.search(r"[.en]", s) for s in strings):
        dtype = {"tensor": "float32", "array": "float64"}.get(form, "")
    elif not dtype:
        dtype = "bool" if any(s.lower() in truth for s in strings) else "int64"
    return Printed("", 0, 0, values * factor, units * factor, places, sizes, dtype)


def _decimals(string: str) -> int:
    mantissa = string.lower().split("e")[0]
    return len(mantissa.partition(".")[2])


def _unit(string: str, decimals: int) -> float:
    """The step of the last digit. NumPy drops zeros at the end, so it is that of the longest."""
    if decimals == 0 or not re.search(r"\d", string):
        return 0.0
    exponent = string.lower().partition("e")[2]
    return float(f"1e{int(exponent or 0) - decimals}")


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


def _read_figures(text: str, read: list[tuple[Printed, int]]) -> tuple[Number, ...]:
    """The labelled numbers outside of tensors, but for times; of several in brackets each."""
    for printed, end in reversed(read):
        text = text[: printed.start] + text[end:] if printed.values.ndim else text
    found, context = [], ""
    for line in text.split("\n"):
        if re.match(r"\s*(==|--|##|\*\*)", line):
            context = line.strip(" =-#*")
            continue
        for match in FIGURE.finditer(line):
            if match["suffix"]:
                continue
            label = match["label"].strip(" ,;\t|")
            values = re.findall(NUMBER, match["value"], re.IGNORECASE)
            for n, value in enumerate(values):
                unit = _unit(value, _decimals(value)) or 1.0  # whole numbers are counts
                zero = not re.search("[1-9]", value) and ("e" in value.lower() or unit == 0.1)
                given = float(value), 0.0 if zero else unit, context
                found.append(Number(f"{label} [{n}]" if len(values) > 1 else label, *given))
    return tuple(found)

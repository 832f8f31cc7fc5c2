"""The page of a diagnosis: sound HTML, nothing lost, nothing fetched, nothing that runs."""

import math
import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report.page import page

VOID = {"meta", "br", "hr", "link", "img", "input"}
HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'<!--"

PADDED = Finding(
    side="reference",
    bug="padded-keys",
    title="padded keys are in the softmax denominator",
    where="every sequence but the longest",
    confidence="high",
    evidence=("dv is 3.973 times too small in sequence 0", "rows of P sum to 0.25"),
    look_at="the key padding mask",
    alternatives=("padded-grad-out",),
)
SCALE = replace(PADDED, bug="output-scale", title="softmax_scale is missing", confidence="medium")
VACUOUS = replace(PADDED, side="both", bug="vacuous", title="both sides are zero")
CHECKS = (
    Check("reference", "I1", "rows of P sum to 1", 0.75, 1e-6, "FAIL", "sequences 0 and 2"),
    Check("reference", "I2", "rows of dS sum to 0", 1e-9, 1e-6, "pass"),
    Check("candidate", "I3", "first causal row: dq is 0", math.nan, math.nan, "-"),
    Check("candidate", "I12", "a second call gives the same bits", 0.0, 0.0, "vacuous"),
    Check("candidate", "I5", "<q, dq> is <k, dk>", math.inf, 1e-6, "FAIL", "head 3"),
)
LEVELS = (
    Level("dv", "all", "", 1.7, 0.3, 0.02),
    Level("dv", "sequence", "0", 3.973, 0.002, 0.02),
    Level("dv", "sequence", "1", 1.0, 0.0, 0.0),
    Level("dv", "sequence", "2", 1.43, 0.5, 0.01),
    Level("dv", "head", "0", -1.0, 0.9, 0.01),
    Level("dq", "sequence", "0", math.nan, math.nan, math.inf),
    Level("dq", "tile", "rows 0 to 63", math.inf, math.inf, math.nan),
)
SQUARE = np.where(np.tri(20) > 0, -1.5, 3.5)
MAPS = (
    Map("dv", "over head_dim", np.linspace(-3, 5, 96 * 4).reshape(96, 4), "token", "head", (0, 20)),
    Map("dS", "head 0 of sequence 0", SQUARE, "query", "key", (0,)),
)
FACTS = ("2 sequences of 20 and 76 tokens", "bfloat16, 4 heads of 64")
WHOLE = Diagnosis("explain a.npz b.npz", (PADDED, SCALE), CHECKS, LEVELS, MAPS, FACTS)


@dataclass
class Reader(HTMLParser):
    """Tags, attributes and text of a page; raises at a tag that closes what is not open."""

    source: str
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {tag}: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> inside {self.stack}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def paths(self, colour: str) -> list[dict[str, str]]:
        return [path for path in self.all("path") if path.get("class") == colour]


def verdict(source: str) -> tuple[str, str]:
    found = re.search(r'<h1 class="(\w+)">(.*?)</h1>', source)
    assert found
    return found[2], found[1]


def test_nothing_is_lost() -> None:
    text = Reader(page(WHOLE)).text
    for finding in WHOLE.findings:
        for words in (finding.where, finding.look_at, finding.confidence, finding.bug):
            assert words in text
        assert finding.title[1:] in text
        assert all(words in text for words in (*finding.evidence, *finding.alternatives))
    for check in CHECKS:
        assert all(words in text for words in (check.side, check.name, check.text, check.where))
    assert text.count("FAIL") == 2 and "vacuous" in text and "no data" in text
    for level in LEVELS:
        assert level.tensor in text and level.key in text
    assert all(each.tensor in text and each.caption in text for each in MAPS)
    assert all(words in text for words in (WHOLE.title, *FACTS))


def test_the_verdict_comes_first() -> None:
    text = Reader(page(WHOLE)).text
    places = [text.index(words) for words in ("The reference is", "Padded keys", "Where the err")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("findings", "words", "tone"),
    [
        ((), "Nothing is wrong", "right"),
        ((PADDED,), "The reference is wrong", "wrong"),
        ((PADDED, SCALE), "The reference is wrong in two ways", "wrong"),
        ((replace(PADDED, side="A"),), "A is wrong", "wrong"),
        ((replace(PADDED, side=""),), "Something is wrong", "wrong"),
        ((replace(PADDED, bug="unknown"),), "The reference is wrong", "wrong"),
        ((replace(PADDED, side="both sides"),), "Both sides are wrong", "wrong"),
        ((VACUOUS,), "Nothing was shown", "doubt"),
        ((VACUOUS, PADDED), "The reference is wrong", "wrong"),
        ((replace(PADDED, bug="rounding"),), "Nothing is wrong", "right"),
        (
            (PADDED, replace(SCALE, side="candidate"), replace(SCALE, side="b.npz")),
            "The reference, the candidate and b.npz are wrong",
            "wrong",
        ),
    ],
)
def test_verdict(findings: tuple[Finding, ...], words: str, tone: str) -> None:
    source = page(replace(WHOLE, findings=findings))
    assert verdict(source) == (words, tone)
    Reader(source)


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ((), "No identity could be checked on one side alone."),
        (("-",), "No identity could be checked on one side alone."),
        (("pass",), "Of one identity checked without a reference none fails."),
        (("pass",) * 12, "Of 12 identities checked without a reference none fails."),
        (("pass", "FAIL", "vacuous"), "Of two identities checked without a reference one fails."),
    ],
)
def test_how_many_identities_hold(verdicts: tuple[str, ...], words: str) -> None:
    checks = tuple(replace(CHECKS[0], verdict=verdict) for verdict in verdicts)
    assert words in Reader(page(replace(WHOLE, checks=checks))).text


def test_empty() -> None:
    source = page(Diagnosis("", ()))
    assert verdict(source) == ("Nothing was compared", "doubt")
    assert not Reader(source).all("h2") and len(source) < 20_000
    for part in ("checks", "levels", "maps", "facts"):
        bare = replace(Diagnosis("", ()), **{part: getattr(WHOLE, part)})
        assert verdict(page(bare)) == ("Nothing is wrong", "right")
        Reader(page(bare))


def test_nothing_is_fetched_or_run() -> None:
    source = page(WHOLE).lower()
    for words in ("http", "src=", "href", "url(", "@import", "<script", "<link", "javascript:"):
        assert words not in source


def test_hostile_text_stays_text() -> None:
    finding = Finding(*[HOSTILE] * 5, (HOSTILE,), HOSTILE, (HOSTILE,))
    hostile = Diagnosis(
        HOSTILE,
        (finding,),
        (Check(HOSTILE, HOSTILE, HOSTILE, 1.0, 1.0, HOSTILE, HOSTILE),),
        tuple(Level(HOSTILE, level, HOSTILE, 1.0, 0.0, 0.0) for level in ("sequence", HOSTILE))
        + tuple(Level(HOSTILE, "sequence", key, 1.0, 0.0, 0.0) for key in ("1", "2")),
        (Map(HOSTILE, HOSTILE, np.zeros((3, 2)), HOSTILE, HOSTILE),),
        (HOSTILE,),
    )
    source = page(hostile)
    read = Reader(source)
    assert not read.all("script") and not read.all("img") and "<!--" not in source
    assert not [name for _, attributes in read.tags for name in attributes if name[:2] == "on"]
    assert read.text.count("<script>alert(1)</script>") >= 18


def test_characters_that_hide_or_turn_text() -> None:
    source = page(Diagnosis("a\u202eb\x00c\ud800d\te\u2028f", ()))
    assert "a\ufffdb\ufffdc\ufffdd e f" in source
    source.encode()


def test_headings_in_order() -> None:
    source = page(WHOLE)
    levels = [int(n) for n in re.findall(r"<h([1-6])", source)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


def test_drawings_have_names_and_tables_have_heads() -> None:
    read = Reader(page(WHOLE))
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = read.all("svg")
    for drawing in drawings:
        named = drawing.get("aria-labelledby", "").split()
        assert drawing.get("aria-hidden") == "true" or (len(named) == 2 and set(named) <= set(ids))
    assert sum("aria-labelledby" in drawing for drawing in drawings) == 2  # dv, dS
    assert all(head.get("scope") in ("col", "row") for head in read.all("th"))


def test_not_a_number_and_infinity() -> None:
    values = np.full((4, 3), math.nan)
    values[0] = math.inf, -math.inf, 2.5
    levels = tuple(Level("dq", "sequence", str(n), math.nan, math.nan, 1.0) for n in range(3))
    read = Reader(page(replace(WHOLE, levels=levels, maps=(replace(MAPS[1], values=values),))))
    assert len(read.paths("infinite")) == 2  # and the legend
    assert "Largest error: infinite, at query 0" in read.text
    assert "Above what is allowed: 2 of 3." in read.text
    assert any("blank" in box.get("class", "").split() for box in read.all("div"))
    assert "nan" not in "".join(str(path) for path in read.all("path"))
    for given in (np.full((4, 3), math.nan), np.zeros((0, 3)), np.zeros(0)):
        read = Reader(page(replace(WHOLE, maps=(replace(MAPS[0], values=given),))))
        assert "No data." in read.text


def test_colours_of_the_map() -> None:
    powers = np.array([[-2.5, -1.5, 0.0, 0.01, 1.5, 2.5, 3.5, 400.0]])
    read = Reader(page(replace(WHOLE, maps=(Map("dq", "", powers, "head", "token"),))))
    drawn = [[path["d"] for path in read.paths(f"h{n}")][-1] for n in range(8)]
    assert drawn == [f"M{n} 0h1v1h-1z" for n in range(8)]
    assert "Largest error: 10^400 times the allowed one, at head 0, token 7." in read.text


def test_long_maps_keep_their_worst_cell_and_their_sequences() -> None:
    values = np.full((9001, 8), -1.0)
    values[4321, 5] = 2.7
    given = Map("dk", "", values, "token", "head", (0, 4321, 4321, 9001))  # two are empty
    read = Reader(page(replace(WHOLE, maps=(given,))))
    drawn = read.paths("h5")[-1]["d"]
    assert re.fullmatch(r"M4321 5h\d+v1h-\d+z", drawn)
    assert (
        "501 times the allowed one, at token 4321, head 5, which is token 0 of sequence 2"
        in read.text
    )
    assert "Reduced" in read.text
    assert [path["d"] for path in read.paths("cut")] == ["M4321 0V8"]


def test_parts_that_say_no_more_are_one_line() -> None:
    """Parts of what is right are left out; parts that all say what their whole says are one."""
    levels = (
        Level("out", "all", "all", 1.0, 1e-8, 1e-7),
        *(Level("out", "sequence", f"sequence {n}", 1.0, 1e-8, 1e-7) for n in range(3)),
        Level("dq", "all", "all", 5.66, 1e-8, 3.0),
        *(Level("dq", "head", f"head {n}", 5.66, 1e-8, 3.0) for n in range(4)),
        *(Level("dq", "sequence", f"sequence {n}", 5.66, 1e-8, 3.0) for n in range(3)),
        *(Level("dk", "head", f"kv head {n}", 5.66, 1e-8, 3.0) for n in range(2)),
    )
    given = Diagnosis("", (PADDED,), levels=levels)
    read = Reader(page(given))
    assert "all 4 alike" in read.text and "head 3" not in read.text
    assert "kv head 1" in read.text, "there is no whole to be like"
    read = Reader(page(given, full=True))
    assert "head 3" in read.text and "alike" not in read.text


def test_lines_of_several_tokens() -> None:
    given = Map("out", "", np.eye(8), "line of 3 tokens", "head", (0, 4))
    text = Reader(page(replace(WHOLE, maps=(given,)))).text
    assert "10 times the allowed one, at line 0, head 0, which is line 0 of sequence 0." in text
    assert "head (across), line of 3 tokens (down)" in text


def test_page_stays_small() -> None:
    rng = np.random.default_rng(0)
    starts = tuple(range(0, 12_000, 60))
    tensors = ("out", "lse", "dq", "dk", "dv", "ddout", "gq", "gk", "gv")
    noise = rng.normal(size=(12_000, 16)) * 3
    maps = tuple(Map(tensor, "", noise, "token", "head", starts) for tensor in tensors)
    maps += (Map("dS", "", rng.normal(size=(1024, 1024)) * 3, "query", "key"),)
    levels = tuple(
        Level(tensor, level, str(n), float(rng.normal()), 0.5, 1.0)
        for tensor in tensors
        for level in ("sequence", "head", "row", "tile")
        for n in range(500)
    )
    source = page(Diagnosis("large", (PADDED,), CHECKS, levels, maps, FACTS))
    assert len(source.encode()) < 1_000_000
    assert "worst of 4,500" in Reader(source).text

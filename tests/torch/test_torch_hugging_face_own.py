"""transformers' own tests of flash attention and of batches without padding, by rawattn's name.

They stand in its repository, not in its package: RAWATTN_TEST_TRANSFORMERS names the folder of a
checkout, of the version that is installed. Its tests want packages of their own (parameterized,
httpx, requests), but nothing is downloaded.
"""

import importlib
import os
import re
import sys
import unittest
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from rawattn.torch import hugging_face  # noqa: E402

FOLDER = os.environ.get("RAWATTN_TEST_TRANSFORMERS", "")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not FOLDER, reason="RAWATTN_TEST_TRANSFORMERS names no checkout of transformers"
    ),
]

# Folders of their tests. In bfloat16 gpt_oss may send a token to other experts than eager does.
AS_EAGER = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo3", "cohere2"),
    *("deepseek_v3", "mixtral", "exaone4", "smollm3", "mimo_v2_flash", "granite_swa", "modernbert"),
)
PACKED = (*(name for name in AS_EAGER if name != "modernbert"), "gpt_oss", "qwen3_vl")
# Of an image, whose tokens see each other both ways.
LEFT_OUT = ("Gemma3Vision2TextModelTest",)
AS_PADDED = "attention_mask_padding_matches_padding_free_with_position_ids"
TESTS = [
    *product(AS_EAGER, ["flash_attn_inference_equivalence"], [("padding_side", "left")]),
    *product(AS_EAGER, ["flash_attn_inference_equivalence"], [("padding_side", "right")]),
    *product(PACKED, [AS_PADDED], [("fa_kwargs", False), ("fa_kwargs", True)]),
]
# The packed tests take the names of a list of theirs, which decides what a model supports.
LISTED = "flash_attention_2"


def package(name: str, folder: Path) -> None:
    sys.modules[name] = module = ModuleType(name)
    module.__path__ = [str(folder)]


@pytest.fixture(scope="module", autouse=True)
def theirs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Their folder ``tests`` under a name that is not ours; one module of it says ``tests``."""
    root = Path(FOLDER).resolve()
    files = [root / "src/transformers/testing_utils.py", *(root / "tests").rglob("*.py")]
    texts = (path.read_text() for path in files)
    for mark in {name for text in texts for name in re.findall(r"\bmark\.(\w+)", text)}:
        request.config.addinivalue_line("markers", f"{mark}: of transformers")
    path = list(sys.path)
    sys.path += [str(root), str(root / "utils")]
    package("transformers_tests", root / "tests")
    package("tests.exporters", root / "tests" / "exporters")
    hugging_face.register_with_transformers()
    yield
    sys.path[:] = path
    for name in [n for n in sys.modules if n.startswith(("transformers_tests", "tests.exporters"))]:
        del sys.modules[name]


def cases(name: str, method: str) -> list[unittest.TestCase]:
    """Of the classes that have the method."""
    module = importlib.import_module(f"transformers_tests.models.{name}.test_modeling_{name}")
    own = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and hasattr(x, method)
    ]
    return [x("run") for x in own if x.__name__ not in LEFT_OUT]


@pytest.mark.parametrize(("name", "method", "option"), TESTS)
def test_theirs(
    name: str, method: str, option: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, calls = hugging_face.varlen_attn, []

    def seen(*args: Any, **given: Any) -> Any:
        calls.append(args)
        return attend(*args, **given)

    monkeypatch.setattr(hugging_face, "varlen_attn", seen)
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def load_ours(cls: type, *args: Any, attn_implementation: str, **given: Any) -> Any:
        ours = hugging_face.NAME if attn_implementation == LISTED else attn_implementation
        return load(cls, *args, attn_implementation=ours, **given)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(load_ours))
    implementation = LISTED if method == AS_PADDED else hugging_face.NAME
    for case in cases(name, method):
        case.setUp()
        for model_class in case.all_model_classes:  # it may take flash attentions of others alone
            monkeypatch.setattr(model_class, "_compatible_flash_implementations", None)
        try:
            getattr(case, method)(attn_implementation=implementation, **dict([option]))
        finally:
            case.tearDown()
            case.doCleanups()
    assert calls

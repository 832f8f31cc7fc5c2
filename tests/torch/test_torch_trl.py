"""TRL's SFTTrainer without padding: the losses of rawattn and of torch's sdpa, step by step."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers", minversion="5.0")

from rawattn.torch import hugging_face  # noqa: E402
from tests.shared.tiny_models import MODELS, VOCABULARY  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 50


def tokenizer() -> Any:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def documents() -> Any:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (64,), generator=generator).tolist()
    ids = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids})


def losses(implementation: str, padding_free: bool, folder: Path) -> list[float]:
    config = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        padding_free=padding_free,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_length=None,
        gradient_checkpointing=False,
        seed=0,
    )
    trainer = trl.SFTTrainer(
        model=MODELS["llama"].build(implementation),
        args=config,
        train_dataset=documents(),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
def test_losses_of_sdpa(tmp_path: Path) -> None:
    hugging_face.register_with_transformers()
    found = losses(hugging_face.NAME, True, tmp_path / "rawattn")
    wanted = losses("sdpa", False, tmp_path / "sdpa")
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]

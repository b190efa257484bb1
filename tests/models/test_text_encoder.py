"""Test text encoders from folders: vectors beside a plain forward pass, and refusals."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
)

from core.errors import UserError
from models.text.pretrained import MINILM_PACKAGE
from models.text.text_encoder import TextEncoder, check_encoder, load_saved
from tests.fixtures.encoders import (
    POSITIONS,
    SIZES,
    WORDS,
    encode_alone,
    make_tokenizer,
    save_bert,
)

TEXTS = [" ".join(WORDS[(i * j) % 9] for j in range(1 + i % 7)) for i in range(1, 30)]


def save_half_bert(folder: Path) -> None:
    save_bert(folder)
    AutoModel.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)


def save_llama(folder: Path) -> None:
    config = LlamaConfig(vocab_size=14, max_position_embeddings=POSITIONS, **SIZES)
    LlamaModel(config).save_pretrained(folder)
    tokenizer = make_tokenizer(padding_side="left", pad_token=None, eos_token="[SEP]")
    tokenizer.save_pretrained(folder)


def save_roberta(folder: Path) -> None:
    """Save a model with two positions fewer than its tokenizer and config say."""
    config = RobertaConfig(
        vocab_size=14, max_position_embeddings=POSITIONS, pad_token_id=1, **SIZES
    )
    RobertaModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


ENCODERS: dict[str, Callable[[Path], object]] = {
    "bert": save_bert,
    "left padding": lambda folder: save_bert(folder, padding_side="left"),
    "bfloat16": save_half_bert,
    "llama without pad token": save_llama,
    "roberta": save_roberta,
}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_vector_does_not_depend_on_the_batch(name, pooling, tmp_path):
    ENCODERS[name](tmp_path)
    texts = [*TEXTS, "red " * 40]
    vectors = TextEncoder(str(tmp_path), pooling, 256, 8).encode(texts)
    longest = POSITIONS - 2 if name == "roberta" else POSITIONS
    alone = [
        encode_alone(tmp_path, text, pooling=pooling, max_tokens=longest)
        for text in texts
    ]
    np.testing.assert_allclose(vectors, alone, atol=1e-5)


def test_a_sentence_transformers_folder_decides_on_pooling(tmp_path):
    save_bert(tmp_path)
    write_modules(tmp_path, "", "1_Pooling")
    vectors = TextEncoder(str(tmp_path), "folder", 256, 8).encode(TEXTS)
    expected = TextEncoder(str(tmp_path), "cls", 256, 8).encode(TEXTS)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors / lengths, expected, atol=1e-5)
    assert (lengths > 1.5).all()  # the folder does not normalise


def write_modules(folder: Path, *paths: str) -> None:
    """Write the modules of a sentence-transformers folder, with pooling of [CLS]."""
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": "sentence_transformers.models."
            + (path.partition("_")[2] or "Transformer"),
        }
        for i, path in enumerate(paths)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({**pooling, "pooling_mode_mean_tokens": False})
    )


def test_a_saved_encoder_gives_the_same_vectors(tmp_path):
    save_bert(tmp_path / "bert")
    encoder = TextEncoder(str(tmp_path / "bert"), "cls", 8, 4)
    (tmp_path / "saved").mkdir()
    encoder.save(tmp_path / "saved")
    loaded = load_saved(tmp_path / "saved")
    np.testing.assert_allclose(loaded.encode(TEXTS), encoder.encode(TEXTS), atol=1e-6)


def remove_layer(folder: Path) -> None:
    save_bert(folder)
    file = folder / "model.safetensors"
    weights = {k: v for k, v in load_file(file).items() if "layer.1" not in k}
    save_file(weights, file, {"format": "pt"})


def remove_tokenizer(folder: Path) -> None:
    save_bert(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()


def add_own_code(folder: Path) -> None:
    save_bert(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('code of the folder ran')")


@pytest.mark.parametrize(
    ("save", "fragment"),
    [
        (remove_layer, "lacks 16 weights"),
        (remove_tokenizer, "no tokenizer"),
        (lambda folder: save_bert(folder, vocab_size=13), "13 token embeddings"),
        (lambda folder: save_bert(folder, pad_token=None), "pad token"),
        (add_own_code, "code"),
        (lambda folder: None, "cannot load"),
    ],
)
def test_faulty_folders_are_refused_in_one_line(save, fragment, tmp_path):
    save(tmp_path)
    with pytest.raises(UserError, match=fragment) as caught:
        check_encoder(str(tmp_path), "folder", 256, 8)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec(MINILM_PACKAGE) is None,
    reason="the extra 'encoder' is not installed",
)
def test_minilm_is_read_from_its_package():
    lamp, light, tax = TextEncoder("minilm", "mean", 24, 8).encode(
        ["a red lamp", "a light for a table", "income tax"]
    )
    assert lamp @ light > lamp @ tax

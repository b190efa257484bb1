"""HLLM's item tower: documents are encoded as the encoder alone encodes them, training
starts at the frozen encoder, and encoders that do not fit are rejected.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from models.build import build_model
from models.search import hllm
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch
from models.search.encoders import pretrained_sizes
from models.search.hllm import HLLM, HLLMConfig, ItemTower
from models.storage.tables import UserError, join, read_table
from models.text.pretrained import pretrained_config
from tests.fixtures.search_tables import ITEM_MODEL, WIDTH, write_search
from tests.fixtures.training_tables import write_table

SMALL = {
    "max_history": 8,
    "text_width": 6,
    "dnn_width": 12,
    "width": 24,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 16,
}


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a pretrained encoder of random weights."""
    torch.manual_seed(3)
    path = str(tmp_path_factory.mktemp("bert"))
    AutoModel.from_config(AutoConfig.for_model(**ITEM_MODEL)).save_pretrained(path)
    return path


def encode_one_by_one(
    encoder: Any, catalogue: SearchCatalogue, pooling: str
) -> torch.Tensor:
    """Return the embeddings (I, W) of the catalogue's documents."""
    documents = catalogue.text.documents
    assert documents is not None
    embeddings = []
    for begin, end in pairwise(documents.begin.tolist()):
        tokens = documents.tokens[None, begin:end].long()
        states = encoder(input_ids=tokens).last_hidden_state[0]
        embedding = states[0] if pooling == "cls" else states.mean(0)
        embeddings.append(functional.normalize(embedding, dim=0))
    return torch.stack(embeddings)


def change_documents(catalogue: SearchCatalogue, **changes: Any) -> SearchCatalogue:
    assert catalogue.text.documents is not None
    documents = replace(catalogue.text.documents, **changes)
    return replace(catalogue, text=replace(catalogue.text, documents=documents))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("chunk_tokens", [30, hllm.MAX_CHUNK_TOKENS])
def test_a_batch_of_documents_is_encoded_as_one_by_one(
    catalogue: SearchCatalogue,
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int,
    pooling: str,
    grad: bool,
) -> None:
    monkeypatch.setattr(hllm, "MAX_CHUNK_TOKENS", chunk_tokens)
    documents = change_documents(catalogue, pooling=pooling)
    tower = ItemTower(ITEM_MODEL, documents).eval()
    item = torch.randint(24, (3, 11), generator=torch.Generator().manual_seed(0))

    with torch.set_grad_enabled(grad):
        embeddings = tower(item)

    expected = encode_one_by_one(tower.encoder, catalogue, pooling)[item]
    torch.testing.assert_close(embeddings, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_other_than_bert_is_an_item_tower_and_no_user_tower(
    catalogue: SearchCatalogue, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "distilbert",
        vocab_size=20,
        dim=WIDTH,
        n_layers=1,
        n_heads=2,
        hidden_dim=12,
        max_position_embeddings=9,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)

    tower = ItemTower(pretrained_config(str(tmp_path)), catalogue).eval()

    expected = encode_one_by_one(tower.encoder, catalogue, "cls")
    torch.testing.assert_close(tower(torch.arange(24)), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="has the model type 'distilbert'"):
        pretrained_sizes(str(tmp_path))


def test_each_document_of_a_batch_is_encoded_once(
    catalogue: SearchCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = ItemTower(ITEM_MODEL, catalogue).eval()
    encoded: list[int] = []
    encode_chunk = tower.encode_chunk

    def record_and_encode(item: torch.Tensor, longest: int) -> torch.Tensor:
        encoded.extend(item.tolist())
        return encode_chunk(item, longest)

    monkeypatch.setattr(tower, "encode_chunk", record_and_encode)
    tower(torch.tensor([[4, 7, 4], [2, 4, 7]]))
    assert sorted(encoded) == [2, 4, 7]

    # without gradients all documents are encoded at once and cached
    encoded.clear()
    with torch.no_grad():
        tower(torch.tensor([4, 4]))
        tower(torch.tensor([1, 2]))
    assert sorted(encoded) == list(range(24))


def test_gradients_do_not_depend_on_the_size_of_chunks(
    catalogue: SearchCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = ItemTower(ITEM_MODEL, catalogue).eval()
    item, weights = torch.arange(24).repeat(2), torch.randn(48, WIDTH)

    gradients = []
    for chunk_tokens in (hllm.MAX_CHUNK_TOKENS, 30):
        monkeypatch.setattr(hllm, "MAX_CHUNK_TOKENS", chunk_tokens)
        tower.zero_grad()
        (tower(item) * weights).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in tower.parameters()])  # type: ignore[union-attr]

    for gradient, chunked_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked_gradient, gradient, atol=1e-4, rtol=1e-4)


def score_without_gradients(model: Any, batch: SearchBatch) -> torch.Tensor:
    with torch.no_grad():
        return model.score(batch)


def test_training_starts_at_the_frozen_encoder_and_changes_it(
    catalogue: SearchCatalogue, batch: SearchBatch, encoder_folder: str
) -> None:
    pretrained = AutoModel.from_pretrained(encoder_folder).eval()
    with torch.no_grad():
        items = encode_one_by_one(pretrained, catalogue, "cls")
    embedded = replace(catalogue, text=replace(catalogue.text, items=items))
    frozen = HLLM(HLLMConfig(**SMALL), embedded).eval()
    config = HLLM.resolve_config(
        HLLMConfig(**SMALL, item_tower=encoder_folder), embedded
    )
    assert config == HLLM.resolve_config(config, embedded)
    model = HLLM(config, embedded).eval()
    model.load_state_dict(frozen.state_dict(), strict=False)
    model.prepare_training(embedded, {})

    before = score_without_gradients(model, batch)
    torch.testing.assert_close(
        before, score_without_gradients(frozen, batch), atol=1e-4, rtol=1e-4
    )

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()(batch)["loss"].backward()
    optimizer.step()
    model.eval()
    after = score_without_gradients(model, batch)
    assert (after - before).abs().max() > 1e-3
    # the cached documents were encoded again
    torch.testing.assert_close(after, model.score(batch).detach(), atol=1e-4, rtol=1e-4)
    pretrained_weights = pretrained.state_dict()
    for name, weight in model.item_tower.encoder.state_dict().items():
        if "layer" in name and "key.bias" not in name:
            assert not torch.equal(pretrained_weights[name], weight)

    # a trained model needs its config and weights, not the folder of the encoder
    rebuilt = build_model(HLLM.config_to_dict(config), embedded).eval()
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(score_without_gradients(rebuilt, batch), after)


def test_tokens_of_other_items_are_rejected(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path, users=4)
    tokens = read_table(join(text, "tokens"))
    shutil.rmtree(join(text, "tokens"))
    write_table(
        join(text, "tokens"),
        "tokens",
        tokens,
        {"pooling": "cls"},
        {"items": "other"},
    )
    with pytest.raises(UserError, match=r"tokens was made from other items"):
        SearchCatalogue.load(tables, text)

"""HLLM's item tower: documents are encoded as the encoder alone encodes them, training
starts at the frozen encoder, and encoders that do not fit are rejected.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from models.loaded_model import build_model
from models.search import hllm
from models.search.catalogue import SearchCatalogue
from models.search.hllm import HLLM, HLLMConfig, ItemTower
from models.search.requests import SearchBatch
from tests.fixtures.search_tables import ITEM_MODEL
from tests.fixtures.trainings import CASES

SMALL = {**CASES["hllm"], "num_layers": 1}


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
    documents = replace(catalogue.text.documents, pooling=pooling)
    text = replace(catalogue.text, documents=documents)
    tower = ItemTower(ITEM_MODEL, replace(catalogue, text=text)).eval()
    item = torch.randint(24, (3, 11), generator=torch.Generator().manual_seed(0))

    with torch.set_grad_enabled(grad):
        embeddings = tower(item)

    expected = encode_one_by_one(tower.encoder, catalogue, pooling)[item]
    torch.testing.assert_close(embeddings, expected, atol=1e-5, rtol=1e-5)


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
    model.prepare_training(embedded)

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
    rebuilt = build_model(asdict(config), embedded).eval()
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(score_without_gradients(rebuilt, batch), after)

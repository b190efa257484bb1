"""HLLM's item tower: documents as the encoder alone reads them, from frozen to trained,
and what it refuses.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
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
from tests.fixtures.search_tables import ITEM_MODEL, WIDTH, write_search
from tests.fixtures.training_tables import write

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pretrained encoder of random weights."""
    torch.manual_seed(3)
    path = str(tmp_path_factory.mktemp("bert"))
    AutoModel.from_config(AutoConfig.for_model(**ITEM_MODEL)).save_pretrained(path)
    return path


def one_at_a_time(
    encoder: Any, catalogue: SearchCatalogue, pooling: str, normalize: bool
) -> torch.Tensor:
    """(I, W) of the catalogue's documents."""
    documents, found = catalogue.text.documents, []
    assert documents is not None
    for begin, end in zip(
        documents.begin[:-1].tolist(), documents.begin[1:].tolist(), strict=True
    ):
        states = encoder(
            input_ids=documents.tokens[None, begin:end].long()
        ).last_hidden_state[0]
        pooled = states[0] if pooling == "cls" else states.mean(0)
        found.append(functional.normalize(pooled, dim=0) if normalize else pooled)
    return torch.stack(found)


def with_documents(catalogue: SearchCatalogue, **changes: Any) -> SearchCatalogue:
    assert catalogue.text.documents is not None
    documents = replace(catalogue.text.documents, **changes)
    return replace(catalogue, text=replace(catalogue.text, documents=documents))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("pooling", "normalize"), [("cls", False), ("cls", True), ("mean", True)]
)
@pytest.mark.parametrize("piece", [30, hllm.MAX_CHUNK_TOKENS])
def test_documents_are_encoded_as_one_at_a_time(
    catalogue: SearchCatalogue,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    pooling: str,
    normalize: bool,
    grad: bool,
) -> None:
    monkeypatch.setattr(hllm, "MAX_CHUNK_TOKENS", piece)
    tower = ItemTower(
        ITEM_MODEL, with_documents(catalogue, pooling=pooling, normalize=normalize)
    ).eval()
    item = torch.randint(24, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        found = tower(item)
    expected = one_at_a_time(tower.encoder, catalogue, pooling, normalize)[item]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_of_another_kind_is_an_item_tower_and_no_user_tower(
    catalogue: SearchCatalogue, tmp_path: Path
) -> None:
    sizes = {
        "vocab_size": 20,
        "dim": WIDTH,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 12,
    }
    sizes |= {"max_position_embeddings": 9}
    AutoModel.from_config(AutoConfig.for_model("distilbert", **sizes)).save_pretrained(
        tmp_path
    )
    tower = ItemTower(hllm.encoder_settings(str(tmp_path)), catalogue).eval()
    expected = one_at_a_time(tower.encoder, catalogue, "cls", False)
    torch.testing.assert_close(tower(torch.arange(24)), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="has the model type 'distilbert'"):
        pretrained_sizes(str(tmp_path))


def test_each_document_of_a_batch_is_encoded_once(
    catalogue: SearchCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = ItemTower(ITEM_MODEL, catalogue).eval()
    asked: list[int] = []
    encode_chunk = tower.encode_chunk
    monkeypatch.setattr(
        tower,
        "encode_chunk",
        lambda item, longest: (
            asked.extend(item.tolist()),
            encode_chunk(item, longest),
        )[1],
    )
    tower(torch.tensor([[4, 7, 4], [2, 4, 7]]))
    assert sorted(asked) == [2, 4, 7]
    asked.clear()
    with torch.no_grad():
        tower(torch.tensor([4, 4]))
        tower(torch.tensor([1, 2]))
    assert sorted(asked) == list(range(24))


def test_gradients_do_not_depend_on_pieces(
    catalogue: SearchCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = ItemTower(ITEM_MODEL, catalogue).eval()
    item, weights = torch.arange(24).repeat(2), torch.randn(48, WIDTH)
    found = []
    for piece in (hllm.MAX_CHUNK_TOKENS, 30):
        monkeypatch.setattr(hllm, "MAX_CHUNK_TOKENS", piece)
        tower.zero_grad()
        (tower(item) * weights).sum().backward()
        found.append([parameter.grad.clone() for parameter in tower.parameters()])  # type: ignore[union-attr]
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_training_starts_at_the_frozen_encoder_and_moves_it(
    catalogue: SearchCatalogue, batch: SearchBatch, folder: str
) -> None:
    pretrained = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        items = one_at_a_time(pretrained, catalogue, "cls", False)
    embedded = replace(catalogue, text=replace(catalogue.text, items=items))
    frozen = HLLM(HLLMConfig(**SMALL), embedded).eval()
    config = HLLM.resolve_config(HLLMConfig(**SMALL, item_tower=folder), embedded)
    assert config == HLLM.resolve_config(config, embedded)
    model = HLLM(config, embedded).eval()
    model.load_state_dict(frozen.state_dict(), strict=False)
    model.prepare_training(embedded, {})
    with torch.no_grad():
        before = model.score(batch)
        torch.testing.assert_close(before, frozen.score(batch), atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()(batch)["loss"].backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        after = model.score(batch)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(
        after, model.score(batch).detach(), atol=1e-4, rtol=1e-4
    )  # what is kept was made anew
    moved = AutoModel.from_pretrained(folder).state_dict()
    assert all(
        not torch.equal(moved[name], value)
        for name, value in model.item_tower.encoder.state_dict().items()
        if "layer" in name and "key.bias" not in name
    )
    # A finished model needs its config and weights, not the folder.
    again = build_model(HLLM.config_to_dict(config), embedded).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again.score(batch), after)


def test_what_does_not_fit_is_refused(
    catalogue: SearchCatalogue, tmp_path: Path
) -> None:
    without = replace(catalogue, text=replace(catalogue.text, documents=None))
    with pytest.raises(
        UserError, match=r"no tokens for an item tower to read; run jobs\.encode again"
    ):
        ItemTower(ITEM_MODEL, without)
    for changes in (
        {"hidden_size": 12},
        {"vocab_size": 10},
        {"max_position_embeddings": 5},
    ):
        with pytest.raises(
            UserError, match=r"give the encoder of jobs\.encode as model\.item_tower"
        ):
            ItemTower(ITEM_MODEL | changes, catalogue)
    with pytest.raises(UserError, match="cannot load the encoder"):
        HLLM.resolve_config(
            HLLMConfig(**SMALL, item_tower=str(tmp_path / "none")), catalogue
        )
    with pytest.raises(ValueError, match="which token 'pair' does not read"):
        HLLMConfig(item_tower="minilm", token="pair")


def test_tokens_of_other_items_are_refused(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path, users=4)
    tokens = read_table(join(text, "tokens"))
    shutil.rmtree(join(text, "tokens"))
    write(
        join(text, "tokens"),
        "tokens",
        tokens,
        {"pooling": "cls", "normalize": False},
        {"items": "other"},
    )
    with pytest.raises(
        UserError, match=r"tokens was made from other items; run jobs\.encode again"
    ):
        SearchCatalogue.load(tables, text)

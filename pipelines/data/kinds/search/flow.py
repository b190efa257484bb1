"""The quickstart of searches: text embeddings, then Base, HSTU, HLLM and QGS in one small size."""

from __future__ import annotations

from pipelines.data.kinds.base import Extra, Flow, Trained

FLOW = Flow(
    models=(
        Trained("base", ("search/base",)),
        Trained("hstu", ("qgs", "search/hstu", "search/small")),
        Trained("hllm", ("qgs", "search/hllm", "search/small")),
        Trained("qgs", ("qgs", "search/small")),
    ),
    epochs=4,
    extra=Extra(
        "text",
        "text",
        "encode",
        "Queries, documents and shown pairs to text embeddings",
        lambda tables, encoder, data: ["--encoder", encoder],
    ),
)

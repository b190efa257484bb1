"""The quickstart of a feed: the interleaved baseline, AttnLFA, AttnMVP, and AttnMVP that is shown no action and so
knows the items alone."""

from __future__ import annotations

from pipelines.data.kinds.base import Flow, Trained

SMALL = ("--model.num_layers", "2", "--fit.batch_size", "16", "--fit.lr", "0.002", "--fit.patience", "0")

FLOW = Flow(
    models=(
        Trained("interleaved", ("attn_mvp", "actions/interleaved"), SMALL),
        Trained("attn_lfa", ("attn_mvp", "actions/attn_lfa"), SMALL),
        Trained("attn_mvp", ("attn_mvp",), SMALL),
        Trained(
            "attn_mvp",
            ("attn_mvp", "actions/attn_mvp_no_lfa"),
            (*SMALL, "--model.action_weight", "0"),
            name="without_actions",
        ),
    ),
    epochs=10,
    events=2,
)

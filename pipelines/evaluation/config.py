"""Options of jobs.evaluate; PyTorch is not imported, to parse command lines quickly."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, AbsoluteFolder, Folder
from models.own_code import MetricName
from models.retrieval.options import AtSpeedOptions

if TYPE_CHECKING:
    from core.schemas import Inputs


RECOMMEND_NAMES = tuple(field.name for field in fields(AtSpeedOptions))
"""Names of the options of all models' `recommend`, which are options of this job."""


@dataclass(config=STRICT, kw_only=True)
class EvaluateConfig(AtSpeedOptions):
    """Options of jobs.evaluate."""

    checkpoint: AbsoluteFolder
    """Folder of a checkpoint, or of a finished run, whose best checkpoint is loaded."""
    tables: Folder
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; optional for models of
    actions."""
    split: Literal["val", "test"] | None = None
    """Split whose requests are ranked. By default test. --batch_inference of a model
    that ranks the catalogue by default predicts the next item after each user's whole
    history."""
    batch_inference: Folder | None = None
    """Write the top K items of all users, or of the requests of --split with their
    targets, to this folder as the table `recommendations`. For a model that ranks
    candidates, write the probabilities and labels of all candidates of the split as the
    table `scores`."""
    allowed: str | None = None
    """File with the ids of the items that --batch_inference may recommend: text with an
    id per line, or Parquet with a column item_id."""
    nearest: Folder | None = None
    """Write the K nearest items of each item to this Parquet file: by cosine similarity
    of SASRec's item embeddings or of the embeddings of TIGER's codes, or the neighbours
    of item_knn."""
    k: PositiveInt = 20
    """Number of items: per item with --nearest, and with --batch_inference of a model
    that ranks the catalogue per user or request."""
    metric: MetricName | None = None
    """Metric in a file of your own, such as my_file.py:MyMetric, which is measured with
    the other metrics."""
    batch_size: PositiveInt = 256
    """Requests per batch."""
    shards: PositiveInt = 1
    """Number of Ray tasks that rank the users; 1: this process ranks them, unless the
    job was submitted to a cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if there is one."""
    tracking_uri: str | None = None
    """MLflow tracking URI, if MLflow has moved since the training."""
    trust_code: bool = False
    """Whether to run code that a checkpoint contains; by default only code equal to a
    file that the same command names runs."""
    overwrite: bool = False
    """Replace the table of --batch_inference."""

    def __post_init__(self) -> None:
        if self.metric is not None:
            from models.metrics.metric import TOP, RequestMetric, find_metrics

            known = [f"{kind.name}@{TOP}" for kind in find_metrics(RequestMetric)]
            if self.metric not in known:
                raise ValueError(
                    f"metric is {self.metric!r}; input should be FILE.py:CLASS"
                )
        if self.allowed and not self.batch_inference:
            raise ValueError(
                "allowed is given without batch_inference; metrics rank the whole "
                "catalogue"
            )
        if self.nearest and self.batch_inference:
            raise ValueError("nearest is given with batch_inference")
        ignored = list(self.recommend_options())
        if self.split:
            ignored.append("split")
        if self.nearest and ignored:
            raise ValueError(
                f"{ignored[0]} is given with nearest, which ranks no requests"
            )

    @property
    def inputs(self) -> Inputs:
        """Folders of tables."""
        from core.schemas import Inputs  # takes longer than a first line may

        return Inputs(self.tables, self.sids, self.text)

    def recommend_options(self) -> dict[str, Any]:
        """Return the options of `recommend` that have a value, by name."""
        options = {name: vars(self)[name] for name in RECOMMEND_NAMES}
        return {name: value for name, value in options.items() if value is not None}

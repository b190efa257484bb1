"""The options of a comparison, apart from what compares, so that a command line is read before MLflow is imported."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Options:
    """What is compared, and what is written."""

    experiment: list[str] = field(default_factory=list)
    """MLflow experiment: family/dataset; once per experiment."""
    sweep: str | None = None
    """A sweep's trials: its name or the id of its run."""
    run: list[str] = field(default_factory=list)
    """A run: its name or id; once per run."""
    tracking_uri: list[str] = field(default_factory=list)
    """MLflow, once per store; by default MLFLOW_TRACKING_URI, else runs/mlflow.db here."""
    results: list[str] = field(default_factory=list)
    """On the line --from: files that --export has written, or folders of them, in place of MLflow; once per file."""
    export: str | None = None
    """Also write the runs to this file (.jsonl), with their sweeps: small enough to be kept in a repository."""
    markdown: str | None = None
    """Also write the tables to this file as Markdown; to a folder, a page for each experiment, with its plots."""
    html: str | None = None
    """Also write tables and plots to this file as one page, which is logged to MLflow too."""
    metric: str | None = None
    """Rows are sorted by it on test, then on val; by default the sweep's, gauc where runs have it, or ndcg@10."""
    pareto: str | None = None
    """Also draw the metric on test against requests per second to this file (.png, .svg or .pdf)."""
    benchmark: list[str] = field(default_factory=list)
    """JSON lines of jobs.benchmark, to log to MLflow and to draw on the page; once per file."""
    register: str | None = None
    """Register the best checkpoint by validation under this name in MLflow's model registry."""
    claims: bool = False
    """Also say of each numeric claim of the papers whether it holds, by the runs of the experiments, or of all."""
    claims_file: str | None = None
    """Claims and published figures; by default claims.yaml of this checkout."""
    sids: list[str] = field(default_factory=list)
    """SIDS: folders that jobs.tokenize made, to compare their tokenizers; once per folder."""

    def __post_init__(self) -> None:
        if not (self.from_mlflow or self.sids):
            raise ValueError(
                "nothing is given to compare; name an --experiment, a --sweep, a --run, --claims, or a folder of --sids"
            )
        if self.results and self.tracking_uri:
            raise ValueError(f"tracking_uri is {self.tracking_uri[0]}, but --from {self.results[0]} needs no store")
        if self.export and not (self.experiment or self.sweep or self.run):
            raise ValueError(f"export is {self.export}, but no runs are named; give --experiment, --sweep or --run")
        if self.sweep and self.run:
            raise ValueError(f"sweep is {self.sweep} and run is {self.run[0]}; give one of them")
        if self.html and not self.from_mlflow:
            raise ValueError(f"html is {self.html}, but there are no runs to show; give --experiment too")
        if (self.sweep or self.run) and len(self.tracking_uri) > 1:
            raise ValueError(f"tracking_uri is given {len(self.tracking_uri)} times; a sweep or runs are of one store")
        for name in ("pareto", "register"):
            if getattr(self, name) and (self.sweep is None and not self.run) and len(self.experiment) != 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, which is of one experiment and there are "
                    f"{len(self.experiment)}; give one --experiment, or a --sweep"
                )

    @property
    def from_mlflow(self) -> bool:
        return bool(
            self.experiment or self.sweep or self.run or self.claims or self.benchmark or self.results or self.export
        )

"""Log the metrics of a run to MLflow, each point once.

logger = Logger(run)
logger.log({"train/loss": 2.1}, step=100)
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from core.errors import UserError, one_line
from core.schemas import RunRef
from pipelines.tracking.names import to_mlflow_name
from pipelines.tracking.runs import MAX_METRICS
from pipelines.tracking.store import connect, few_retries

SEND_EVERY_S, PAUSE_S = 5.0, 30.0
"""Seconds between two requests to MLflow, and after a request that failed."""

STOP_PATIENCE_S = 3.0
"""Seconds that the end of a training waits for system metrics."""

Point = tuple[str, float, int, int]
"""Metric by MLflow's name, value, time in milliseconds, and step."""


class Logger:
    """Logger of metrics and tags of a run.

    The points that MLflow has not taken are in `unsent`, for the next checkpoint. So a
    training that continues from the checkpoint sends them, and a step that is repeated
    after a kill is not logged twice.
    """

    def __init__(
        self,
        run: RunRef,
        unsent: Iterable[Point] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Read the last points of a run.

        Args:
            run: Run to log to.
            unsent: Points of a checkpoint that MLflow may not have.
            say: Called with a line when MLflow does not take points.
        """
        self.run, self.say = run, say
        self.client = connect(run.uri)
        logged = self.client.get_run(run.run_id).data
        self.tags = logged.tags
        # step and value of each metric's last point
        self._last = {
            point.key: (point.step, point.value) for point in logged.to_proto().metrics
        }
        self._send_at = 0.0
        self.unsent = [
            point for point in unsent if point[3] > self._last.get(point[0], (-1,))[0]
        ]
        self._last |= {key: (step, value) for key, value, _, step in self.unsent}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, in a request every few seconds.

        A metric that was logged at this step or a later one is not logged again. NaN
        and infinity are not logged.
        """
        now = int(time.time() * 1000)
        for name, value in metrics.items():
            key = to_mlflow_name(name)
            if math.isfinite(value) and step > self._last.get(key, (-1,))[0]:
                self.unsent.append((key, float(value), now, step))
                self._last[key] = (step, float(value))
        if time.monotonic() >= self._send_at:
            try:
                with few_retries():
                    self._send()
                self._send_at = time.monotonic() + SEND_EVERY_S
            except MlflowException as error:
                self._send_at = time.monotonic() + PAUSE_S
                self.say(
                    f"note: MLflow takes no metrics ({one_line(error)}); "
                    f"{len(self.unsent)} points wait"
                )

    def update(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics that describe the whole run.

        A metric that was logged before is logged at a later step if its value has
        changed.
        """
        for name, value in metrics.items():
            last_step, last_value = self._last.get(to_mlflow_name(name), (-1, math.nan))
            if last_value != float(value):
                self.log({name: value}, max(step, last_step + 1))
        self.flush()

    def flush(self) -> None:
        """Send all points, with the retries of MLflow."""
        try:
            self._send()
        except MlflowException as error:
            raise UserError(
                f"MLflow at {self.run.uri} takes no metrics ({one_line(error)})",
                "resume",
            ) from error

    def tag(self, **tags: str) -> None:
        """Set tags of the run."""
        pairs = [RunTag(name, value) for name, value in tags.items()]
        self.client.log_batch(self.run.run_id, tags=pairs)

    def end(self) -> None:
        """Send all points, and end the run as FINISHED."""
        self.flush()
        self.client.set_terminated(self.run.run_id)

    def _send(self) -> None:
        """Send the points; those that MLflow does not take stay."""
        while batch := self.unsent[:MAX_METRICS]:
            self.client.log_batch(self.run.run_id, [Metric(*point) for point in batch])
            del self.unsent[: len(batch)]


@contextmanager
def log_system_metrics(run: RunRef) -> Iterator[None]:
    """Log the use of this machine's CPU, memory, disk, network and GPU in the block."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(
        run.run_id,
        sampling_interval=10,
        resume_logging=True,
        tracking_uri=run.uri,
        samples_before_logging=1,
    )
    monitor.start()
    try:
        yield
    finally:
        ending = threading.Thread(target=monitor.finish, daemon=True)
        ending.start()
        ending.join(STOP_PATIENCE_S)

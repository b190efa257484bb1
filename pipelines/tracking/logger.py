"""Log the metrics of a run to MLflow without waiting for MLflow.

logger = Logger(run)
logger.log({"train/loss": 2.1}, step=100)
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from mlflow.entities import Metric, RunTag
from mlflow.utils.autologging_utils import BatchMetricsLogger

from core.schemas import RunRef
from pipelines.tracking.curves import Curves
from pipelines.tracking.names import to_mlflow_name
from pipelines.tracking.runs import MAX_METRICS
from pipelines.tracking.store import connect


class Logger:
    """Logger of metrics and tags that sends each point of a run once.

    A thread sends all pending metrics in one request while the training continues, and
    `flush` waits for the thread. (MLflow's queue sends one request every two seconds,
    however many metrics there are.) A checkpoint stores the curves up to its step. A
    training that continues from the checkpoint sends the points that a killed process
    did not send.
    """

    def __init__(
        self,
        run: RunRef,
        curves: Curves | None = None,
        check_attempt: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the metrics of a run, and send the missing points of `curves`.

        Args:
            run: Run to log to.
            curves: Curves up to the checkpoint that the run continues from.
            check_attempt: Called before metrics are sent; raises SupersededError if a
                newer attempt logs to the run.
        """
        self.run, self.curves = run, curves or {}
        self.check_attempt = check_attempt
        self.client = connect(run.uri)
        logged = self.client.get_run(run.run_id).data
        self.tags = logged.tags
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._pending: list[Metric] = []
        self._sending: Future[None] | None = None
        # step and value of each metric's last point
        self._last: dict[str, tuple[int, float]] = {
            point.key: (point.step, point.value) for point in logged.to_proto().metrics
        }
        missing = {
            name: [point for point in points if point[0] > self._step(name)]
            for name, points in self.curves.items()
        }
        self._send(missing)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, without waiting for MLflow.

        A metric that was logged at this step or a later one is not logged again. NaN
        and infinity are not logged.
        """
        now = int(time.time() * 1000)
        finite = {
            name: (step, float(value), now)
            for name, value in metrics.items()
            if math.isfinite(value)
        }
        for name, point in finite.items():
            self.curves.setdefault(name, []).append(point)
        self._send(
            {name: [point] for name, point in finite.items() if self._step(name) < step}
        )

    def update(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics that describe the whole run, and wait for MLflow.

        A metric that was logged before is logged at a later step if its value has
        changed.
        """
        now = int(time.time() * 1000)
        changed = {
            name: value
            for name, value in metrics.items()
            if math.isfinite(value) and self._value(name) != float(value)
        }
        self._send(
            {
                name: [(max(step, self._step(name) + 1), value, now)]
                for name, value in changed.items()
            }
        )
        self.flush()

    def flush(self, timeout_s: float | None = None) -> float:
        """Wait until MLflow has stored all metrics, and return the seconds waited.

        Args:
            timeout_s: Seconds to wait at most; None: as long as it takes. Metrics that
                are still pending then are in the curves of the last checkpoint.

        Raises:
            MlflowException: If MLflow rejects the metrics or cannot be reached.
        """
        began = time.monotonic()
        if self._sending:
            with suppress(TimeoutError):
                self._thread.submit(self._drain).result(timeout_s)
        return time.monotonic() - began

    def tag(self, **tags: str) -> None:
        """Set tags of the run."""
        pairs = [RunTag(name, value) for name, value in tags.items()]
        self.client.log_batch(self.run.run_id, tags=pairs)

    def end(self, status: str = "FINISHED") -> None:
        """Send all metrics, and end the run.

        FAILED and KILLED do not change the status of a run that has ended: the workers
        of a stopped trial are lost after its end.
        """
        self.flush()
        is_running = self.client.get_run(self.run.run_id).info.status == "RUNNING"
        if status == "FINISHED" or is_running:
            self.client.set_terminated(self.run.run_id, status)

    def _step(self, name: str) -> int:
        return self._last.get(to_mlflow_name(name), (-1, 0.0))[0]

    def _value(self, name: str) -> float | None:
        return self._last.get(to_mlflow_name(name), (-1, None))[1]

    def _send(self, curves: Curves) -> None:
        """Queue the points of curves, and start the thread unless it is sending."""
        points = []
        for name, curve in curves.items():
            key = to_mlflow_name(name)
            points += [
                Metric(key, value, time_ms, step) for step, value, time_ms in curve
            ]
        with self._lock:
            self._pending += points
        if self._sending is None or self._sending.done():
            self._sending = self._thread.submit(self._drain)
        self._last.update({point.key: (point.step, point.value) for point in points})

    def _drain(self) -> None:
        """Send the pending metrics; metrics that MLflow rejects stay pending."""
        while batch := self._pending[:MAX_METRICS]:
            self.check_attempt()
            self.client.log_batch(self.run.run_id, metrics=batch)
            with self._lock:
                del self._pending[: len(batch)]


STOP_PATIENCE_S = 3.0
"""Seconds that the end of a training waits for system metrics, and a stopped training
for its own metrics: a stopped job has 25 s in all."""


class FencedMetricsLogger(BatchMetricsLogger):
    """MLflow's sender of system metrics, which sends none of an older attempt.

    Args:
        run: Run to log to.
        check_attempt: Called before metrics are sent; raises SupersededError if a newer
            attempt logs to the run, which ends MLflow's monitor.
    """

    def __init__(self, run: RunRef, check_attempt: Callable[[], None]) -> None:
        super().__init__(run.run_id, tracking_uri=run.uri)
        self.check_attempt = check_attempt

    def flush(self) -> None:
        """Send the recorded metrics."""
        self.check_attempt()
        super().flush()


@contextmanager
def log_system_metrics(
    run: RunRef, check_attempt: Callable[[], None]
) -> Iterator[None]:
    """Log the use of this machine's CPU, memory, disk, network and GPU in the block.

    Args:
        run: Run to log to.
        check_attempt: Called before metrics are sent; raises SupersededError if a newer
            attempt logs to the run.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(
        run.run_id,
        sampling_interval=10,
        resume_logging=True,
        tracking_uri=run.uri,
        samples_before_logging=1,
    )
    monitor.mlflow_logger = FencedMetricsLogger(run, check_attempt)
    monitor.start()
    try:
        yield
    finally:
        ending = threading.Thread(target=monitor.finish, daemon=True)
        ending.start()
        ending.join(STOP_PATIENCE_S)

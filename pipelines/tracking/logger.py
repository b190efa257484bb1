"""Log the metrics of one run, once each, while its training goes on.

logger = Logger(run)
logger.log({"train/loss": 2.1}, step=100)
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from mlflow.entities import Metric, RunTag

from pipelines.tracking.curves import Curves
from pipelines.tracking.names import metric_name
from pipelines.tracking.runs import BATCH, RunRef
from pipelines.tracking.store import connect


class Logger:
    """Log metrics and tags of one run; points that the run has are not logged again.

    A thread sends metrics while the training goes on, all that are pending in one
    request, and `flush` waits for it. (MLflow's own queue sends one request every two
    seconds, however many metrics there are.) A checkpoint holds the curves up to it, so
    that a run that goes on from it sends what a kill kept back.
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
            check_attempt: Called before metrics are sent; raises if a newer attempt
                logs to the run.
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
        """Log metrics at a step, unless that step was logged before.

        The call does not wait for MLflow.
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
        """Log metrics of the run as a whole, and wait for MLflow.

        A metric that was logged before is logged again, at a later step, if it changed.
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

    def flush(self) -> float:
        """Wait until MLflow has all metrics; return the seconds that took.

        Raises:
            MlflowException: if MLflow does not take them.
        """
        began = time.monotonic()
        if self._sending:
            self._thread.submit(self._drain).result()
        return time.monotonic() - began

    def tag(self, **tags: str) -> None:
        """Set tags of the run."""
        pairs = [RunTag(name, value) for name, value in tags.items()]
        self.client.log_batch(self.run.run_id, tags=pairs)

    def end(self, status: str = "FINISHED") -> None:
        """End the run; FAILED and KILLED leave a run as it is that has ended.

        A stopped trial loses its workers after its end.
        """
        self.flush()
        is_running = self.client.get_run(self.run.run_id).info.status == "RUNNING"
        if status == "FINISHED" or is_running:
            self.client.set_terminated(self.run.run_id, status)

    def _step(self, name: str) -> int:
        return self._last.get(metric_name(name), (-1, 0.0))[0]

    def _value(self, name: str) -> float | None:
        return self._last.get(metric_name(name), (-1, None))[1]

    def _send(self, curves: Curves) -> None:
        """Queue the points of curves, and start to send them if nothing is being sent."""
        points = [
            Metric(metric_name(name), value, time_ms, step)
            for name, curve in curves.items()
            for step, value, time_ms in curve
        ]
        with self._lock:
            self._pending += points
        if self._sending is None or self._sending.done():
            self._sending = self._thread.submit(self._drain)
        self._last.update({point.key: (point.step, point.value) for point in points})

    def _drain(self) -> None:
        """Send the pending metrics; metrics that MLflow does not take stay pending."""
        while batch := self._pending[:BATCH]:
            self.check_attempt()
            self.client.log_batch(self.run.run_id, metrics=batch)
            with self._lock:
                del self._pending[: len(batch)]


@contextmanager
def system_metrics(run: RunRef) -> Iterator[None]:
    """Log this machine's CPU, memory, disk, network and GPU to a run during the block."""
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
        monitor.finish()

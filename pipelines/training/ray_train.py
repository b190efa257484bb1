"""Train with the workers of Ray Train, which starts lost ones again.

run_workers(config, run, use_gpu, print)
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
import torch.distributed as dist
from pyarrow import fs
from ray import train
from ray.exceptions import RayError
from ray.train import TrainingFailedError, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

from core.errors import UserError, one_line, pluralize
from core.files import open_uri
from core.schemas import RunRef
from models.training import checkpoint
from models.training.checkpoint import Checkpoint, State
from pipelines import cluster, faults
from pipelines.tracking.store import SQLITE
from pipelines.training.config import RayOptions, TrainConfig
from pipelines.training.worker import train_worker

# How often Ray Train's controller polls its workers. A worker that reports waits for
# the next poll: by default up to 2 s, which is longer than many epochs.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

WATCH_PREEMPTION = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
"""Environment variable that starts Ray Train's process for notices of preemption."""
# The node of a local Ray is never preempted, so the process would be useless.
os.environ.setdefault(WATCH_PREEMPTION, "1" if os.environ.get("RAY_ADDRESS") else "0")

UNRESPONSIVE_S = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Environment variable with the seconds after which Ray Train ends an unresponsive
worker."""

WAIT_S = 30.0
"""Seconds without any line of the workers until a message says so."""


class RayBackend:
    """The backend of a worker of Ray Train.

    Ray Train uploads checkpoints and removes old ones.

    Args:
        folder: Folder of the run.
        lines: Queue of lines that the driver prints.
        watches: Whether to watch for notices that the node is preempted.
    """

    def __init__(self, folder: str, lines: Queue, watches: bool) -> None:
        self.folder, self.lines, self.watches = folder, lines, watches
        context = train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.device = get_device()
        num_cores = len(os.sched_getaffinity(0))
        self.threads = max(1, num_cores // context.get_local_world_size())
        self.preempted_nodes: set[str] = set()

    def find_last(self) -> Checkpoint | None:
        """Return the run's last complete checkpoint, as rank 0 finds it."""
        last = [checkpoint.last(self.folder) if self.rank == 0 else None]
        if self.world > 1:
            dist.broadcast_object_list(last, device=self.device)
        return last[0]

    def keep(self, model: nn.Module, saved: Checkpoint, state: State | None) -> None:
        """Report a checkpoint to Ray Train; every rank reports."""
        # so the score of a checkpoint that is the best is above all earlier ones
        is_best = saved.best["step"] == saved.step
        metrics = {"score": saved.step if is_best else -1, "epoch": saved.epoch}
        with TemporaryDirectory() as folder:
            files = None
            if self.rank == 0:
                checkpoint.save(folder, model, saved, state)
                files = train.Checkpoint.from_directory(folder)
            train.report(
                metrics | saved.metrics,
                checkpoint=files,
                checkpoint_dir_name=saved.folder,
            )

    def say(self, line: str) -> None:
        """Send a line to the driver; the training goes on if the queue is lost."""
        with suppress(RayError):
            self.lines.put(line)

    def should_stop(self) -> bool:
        """Return False: a stopped job loses the work since the last checkpoint."""
        return False

    def is_preempted(self) -> bool:
        """Return whether a further node has received a notice; all ranks call it."""
        if not self.watches:
            return False
        info = train.get_preemption_info()
        new = set(info.preempted_node_ids if info else []) - self.preempted_nodes
        self.preempted_nodes |= new
        return bool(new)


def run_workers(
    config: TrainConfig,
    run: RunRef,
    use_gpu: bool,
    say: Callable[[str], None],
    callbacks: Sequence[UserCallback] = (),
) -> None:
    """Train with workers of Ray Train, which starts them again when workers are lost.

    Args:
        config: Options of the training, resolved.
        run: The MLflow run.
        use_gpu: Whether each worker has a GPU.
        say: Called with lines of progress.
        callbacks: Callbacks for Ray Train.

    Raises:
        TrainingFailedError: If workers were lost more than `ray.max_failures` times.
    """
    options = config.ray
    workers, fewest = options.num_workers, options.fewest_workers
    os.environ[UNRESPONSIVE_S] = str(options.hang_minutes * 60)
    filesystem, path = open_uri(config.folder)
    snapshot = f"{path}/checkpoint_manager_snapshot.json"
    if filesystem.get_file_info(snapshot).type == fs.FileType.File:
        filesystem.delete_file(snapshot)  # workers look for the last checkpoint
    say(f"starting {pluralize(workers, 'worker')}")
    with print_lines(say) as lines:
        watches = os.environ[WATCH_PREEMPTION] != "0"
        trainer = TorchTrainer(
            partial(run_worker, config, run, lines, watches),  # type: ignore[arg-type]
            torch_config=TorchConfig(
                "nccl" if use_gpu else "gloo",
                timeout_s=round(options.hang_minutes * 60),
            ),
            # mypy reads the classes of Train V1
            scaling_config=train.ScalingConfig(  # type: ignore[call-arg]
                num_workers=(fewest, workers) if fewest < workers else workers,  # type: ignore[arg-type]
                use_gpu=use_gpu,
                resources_per_worker=worker_resources(options, use_gpu),
                placement_strategy=options.placement_strategy,
                accelerator_type=options.accelerator_type or None,
                label_selector=options.label_selector or None,
            ),
            run_config=train.RunConfig(
                name=config.name,
                storage_path=config.storage,
                checkpoint_config=train.CheckpointConfig(
                    num_to_keep=1, checkpoint_score_attribute="score"
                ),
                failure_config=train.FailureConfig(max_failures=options.max_failures),
                callbacks=[*callbacks, LossReporter(lines)],  # type: ignore[list-item]
            ),
        )
        # in the main thread, Ray Train would replace the handler of SIGINT
        thread = ThreadPoolExecutor(1)
        try:
            error = thread.submit(trainer.fit).result().return_value  # type: ignore[attr-defined]
        except TrainingFailedError as failure:
            raise faults.find_user_error(failure) or failure from None
        finally:
            thread.shutdown(wait=False)
    if error:
        raise error


def run_worker(
    config: TrainConfig,
    run: RunRef,
    lines: Queue,
    watches: bool,
) -> Exception | None:
    """Run a worker of Ray Train.

    Args:
        config: Options of the training, resolved.
        run: The MLflow run.
        lines: Queue of lines that the driver prints.
        watches: Whether nodes may be preempted.

    Returns:
        An error that another try would raise again. Ray Train retries raised errors.
    """
    try:
        backend = RayBackend(config.folder, lines, watches)
        train_worker(config, run, backend)
    except UserError as error:
        return error
    except Exception as error:
        if is_lost(error):
            raise
        # the traceback does not travel with a returned error
        return RuntimeError("".join(traceback.format_exception(error)))
    return None


def is_lost(error: Exception) -> bool:
    """Return whether an error of a worker comes from a process, node or storage."""
    kinds = (OSError, MemoryError, torch.OutOfMemoryError, torch.distributed.DistError)
    return isinstance(error, kinds) or "gloo" in str(error)


class LossReporter(UserCallback):
    """Callback of Ray Train that reports lost workers to the user.

    Args:
        lines: Queue of lines that the driver prints.
    """

    def __init__(self, lines: Queue) -> None:
        self.lines = lines

    def after_exception(
        self, run_context: Any, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Report the first error; Ray Train continues or ends the training."""
        error = next(iter(worker_exceptions.values()))
        reason = one_line(list(faults.iter_causes(error))[-1])
        self.lines.put(f"note: a worker is lost ({reason})")


@contextmanager
def print_lines(say: Callable[[str], None]) -> Iterator[Queue]:
    """Start a queue for lines of the workers, and a thread that prints them.

    The queue lives on the driver's node, whose loss ends the training anyway.
    """
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    lines = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def forward() -> None:
        with suppress(RayError):
            try:
                line = lines.get(timeout=WAIT_S)
            except Empty:
                say("the workers have not started yet; the cluster may be full")
                line = lines.get()
            while line is not None:
                say(line)
                line = lines.get()

    thread = threading.Thread(target=forward, daemon=True, name="lines")
    thread.start()
    try:
        yield lines
    finally:
        with suppress(RayError):
            lines.put(None)
            thread.join(timeout=10)
            lines.shutdown(force=True)


def worker_resources(options: RayOptions, use_gpu: bool) -> dict[str, float]:
    """Return the resources that Ray reserves for each worker."""
    needs: dict[str, float] = {"CPU": options.cpus_per_worker}
    if use_gpu:
        needs["GPU"] = 1
    if options.memory_gb:
        needs["memory"] = options.memory_gb * 2**30
    if options.accelerator_type:  # as ScalingConfig does for `accelerator_type`
        needs[f"accelerator_type:{options.accelerator_type}"] = 0.001
    return needs


def check_cluster(options: RayOptions, workers: int, use_gpu: bool, uri: str) -> None:
    """Raise UserError if the cluster can never hold the workers, or needs a server.

    The nodes of a cluster would each write a SQLite store of the tracking URI.
    """
    fewest = min(options.min_workers or workers, workers)
    cluster.check_room(fewest, worker_resources(options, use_gpu))
    nodes = sum(node["Alive"] for node in ray.nodes())
    if uri.startswith(SQLITE) and nodes > 1:
        raise UserError(
            f"the tracking URI {uri} is a file, and the cluster has {nodes} nodes",
            "tracking",
        )

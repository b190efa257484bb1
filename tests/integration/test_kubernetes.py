"""Test the files of deploy/.

KubeRay accepts all fields and their types, the operator's rules hold, and the jobs parse
the commands.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import validate
from ray.runtime_env import RuntimeEnv

from tests.integration.test_cluster_files import ROOT, load_yaml, parse_command

FILES = sorted(
    path
    for path in (ROOT / "deploy").glob("*.yaml")
    if not path.stem.startswith("cronjob")
)
CRDS = os.environ.get("KUBERAY_CRDS")

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
QUANTITY: Schema = {
    "type": ["integer", "string"],
    "pattern": r"^\d+(\.\d+)?([KMGTPE]i|[mkMGTPE])?$",
}


def object_schema(required: str = "", **types: Schema) -> Schema:
    """Return the schema of a mapping with these fields and no others."""
    return {
        "type": "object",
        "properties": types,
        "required": required.split(),
        "additionalProperties": False,
    }


def mapping_schema(value: Schema) -> Schema:
    """Return the schema of a mapping from any keys to values of one schema."""
    return {"type": "object", "additionalProperties": value}


def list_schema(item: Schema) -> Schema:
    """Return the schema of a list with at least one element."""
    return {"type": "array", "items": item, "minItems": 1}


METADATA = object_schema(
    "name", name=TEXT, labels=mapping_schema(TEXT), annotations=mapping_schema(TEXT)
)
RESOURCES = object_schema(
    "requests limits",
    requests=mapping_schema(QUANTITY),
    limits=mapping_schema(QUANTITY),
)
VARIABLES = list_schema(object_schema("name value", name=TEXT, value=TEXT))
CONTAINER = object_schema(
    "name image resources", name=TEXT, image=TEXT, env=VARIABLES, resources=RESOURCES
)
TOLERATION = object_schema(
    "operator",
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect=TEXT,
)
POD = object_schema(
    "containers",
    serviceAccountName=TEXT,
    priorityClassName=TEXT,
    terminationGracePeriodSeconds=COUNT,
    nodeSelector=mapping_schema(TEXT),
    tolerations=list_schema(TOLERATION),
    containers=list_schema(CONTAINER),
)
GROUP_FIELDS = {
    "rayStartParams": mapping_schema(TEXT),
    "template": object_schema("spec", spec=POD),
}
WORKER_GROUP = object_schema(
    "groupName minReplicas maxReplicas template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    **GROUP_FIELDS,
)
SECRET = object_schema(
    "valueFrom",
    valueFrom=object_schema(
        "secretKeyRef", secretKeyRef=object_schema("name key", name=TEXT, key=TEXT)
    ),
)
CLUSTER = object_schema(
    "rayVersion headGroupSpec",
    rayVersion=TEXT,
    authOptions=object_schema("mode", mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=object_schema(
        "version idleTimeoutSeconds",
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
    ),
    gcsFaultToleranceOptions=object_schema(
        "redisAddress", redisAddress=TEXT, redisPassword=SECRET
    ),
    headGroupSpec=object_schema("template", **GROUP_FIELDS),
    workerGroupSpecs=list_schema(WORKER_GROUP),
)
JOB = object_schema(
    "entrypoint",
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    clusterSelector=mapping_schema(TEXT),
    rayClusterSpec=CLUSTER,
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
)
SERVICE = object_schema(
    "serveConfigV2 rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER
)
ENV_VARIABLES = list_schema(
    object_schema(
        "name", name=TEXT, value=TEXT, valueFrom=SECRET["properties"]["valueFrom"]
    )
)
MOUNTS = list_schema(object_schema("name mountPath", name=TEXT, mountPath=TEXT))
SUBMITTING_CONTAINER = object_schema(
    "name image command resources",
    name=TEXT,
    image=TEXT,
    command=list_schema(TEXT),
    args=list_schema(TEXT),
    env=ENV_VARIABLES,
    resources=RESOURCES,
    volumeMounts=MOUNTS,
)
BATCH_JOB = object_schema(
    "template",
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    template=object_schema(
        "spec",
        spec=object_schema(
            "restartPolicy containers",
            restartPolicy={"enum": ["Never", "OnFailure"]},
            serviceAccountName=TEXT,
            containers=list_schema(SUBMITTING_CONTAINER),
            volumes=list_schema(
                object_schema(
                    "name configMap",
                    name=TEXT,
                    configMap=object_schema("name", name=TEXT),
                )
            ),
        ),
    ),
)
CRON_JOB = object_schema(
    "schedule jobTemplate",
    schedule=TEXT,
    concurrencyPolicy={"enum": ["Allow", "Forbid", "Replace"]},
    jobTemplate=object_schema("spec", spec=BATCH_JOB),
)
SPECS = {"RayJob": JOB, "RayCluster": CLUSTER, "RayService": SERVICE}


def forbid_unknown_fields(schema: Any) -> Any:
    """Return KubeRay's schema with unknown fields forbidden, as kubectl validates it."""
    if not isinstance(schema, dict):
        return schema
    strict = {name: forbid_unknown_fields(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        strict["additionalProperties"] = False
    return strict


def make_schema(kind: str) -> Schema:
    """Return the schema of a resource; of KubeRay's CRDs if `KUBERAY_CRDS` is set."""
    schema = object_schema(
        "spec",
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=SPECS[kind],
    )
    if CRDS:  # these leave the metadata to the API server
        crd = yaml.load(
            (Path(CRDS) / f"ray.io_{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader
        )
        (latest,) = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
        schema["properties"]["spec"] = forbid_unknown_fields(
            latest["schema"]["openAPIV3Schema"]["properties"]["spec"]
        )
    return schema


Resource = dict[str, Any]
"""A RayJob, RayCluster or RayService as its file holds it."""


def find_cluster(resource: Resource) -> dict[str, Any] | None:
    """Return the spec of the cluster that a resource starts, or None for a job on an
    existing cluster.
    """
    spec = resource["spec"]
    if resource["kind"] == "RayCluster":
        return dict(spec)
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig")


def find_groups(resource: Resource) -> list[dict[str, Any]]:
    """Return the head's group and the workers' groups."""
    cluster = find_cluster(resource)
    if cluster is None:
        return []
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def name_is_short_dns_label(resource: Resource) -> bool:
    """Check that the name is a DNS label (`validation.IsDNS1035Label`).

    Names have at most 53 characters for clusters, and 47 for other resources.
    """
    name = resource["metadata"]["name"]
    max_length = 53 if resource["kind"] == "RayCluster" else 47
    is_label = re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None
    return is_label and len(name) <= max_length


def job_has_a_cluster(resource: Resource) -> bool:
    """Check that a job starts a cluster or selects one by its name."""
    spec = resource["spec"]
    if resource["kind"] != "RayJob" or "rayClusterSpec" in spec:
        return True
    return bool(spec.get("clusterSelector", {}).get("ray.io/cluster"))


def retries_need_a_new_cluster(resource: Resource) -> bool:
    """Check that a job on an existing cluster has no retries.

    KubeRay since 1.6.0: `BackoffLimit is incompatible with ClusterSelector mode`.
    """
    spec = resource["spec"]
    return not (spec.get("clusterSelector") and spec.get("backoffLimit", 0) > 0)


def suspended_job_shuts_down(resource: Resource) -> bool:
    """Check that a suspended job starts a cluster and ends it."""
    spec = resource["spec"]
    if not spec.get("suspend"):
        return True
    return "clusterSelector" not in spec and spec.get("shutdownAfterJobFinishes", False)


def time_to_live_needs_shutdown(resource: Resource) -> bool:
    """Check that a time to live comes with a shutdown of the cluster."""
    spec = resource["spec"]
    return spec.get("shutdownAfterJobFinishes", False) or not spec.get(
        "ttlSecondsAfterFinished"
    )


def deadline_is_positive(resource: Resource) -> bool:
    """Check that the deadline is a positive number of seconds."""
    return resource["spec"].get("activeDeadlineSeconds", 1) > 0


def resources_are_set_once(resource: Resource) -> bool:
    """Check that no group has resources in both `rayStartParams` and `resources`."""
    names = {"num-cpus", "num-gpus", "memory", "resources"}
    return not any(
        group.get("resources") and names & set(group.get("rayStartParams", {}))
        for group in find_groups(resource)
    )


def labels_are_no_start_parameter(resource: Resource) -> bool:
    """Check that labels are not in `rayStartParams`."""
    return not any(
        "labels" in group.get("rayStartParams", {}) for group in find_groups(resource)
    )


def replicas_are_in_order(resource: Resource) -> bool:
    """Check that no minimum of replicas is above its maximum."""
    return all(
        group.get("minReplicas", 0) <= group.get("maxReplicas", 2**31)
        for group in find_groups(resource)[1:]
    )


def redis_is_set_only_in_its_options(resource: Resource) -> bool:
    """Check that Redis is set only in `gcsFaultToleranceOptions`."""
    cluster = find_cluster(resource)
    if cluster is None:
        return True
    head = cluster["headGroupSpec"]
    names = {
        variable["name"]
        for container in head["template"]["spec"]["containers"]
        for variable in container.get("env", [])
    }
    parameters = {"redis-password", "redis-username"} & set(head["rayStartParams"])
    variables = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & names
    return not parameters and not variables


def autoscaler_v2_restarts_no_pod(resource: Resource) -> bool:
    """Check that pods are not restarted under version 2 of the autoscaler."""
    cluster = find_cluster(resource) or {}
    if cluster.get("autoscalerOptions", {}).get("version") != "v2":
        return True
    return all(
        group["template"]["spec"].get("restartPolicy", "Never") == "Never"
        for group in find_groups(resource)
    )


def autoscaler_version_is_set_once(resource: Resource) -> bool:
    """Check that the autoscaler's version is not set twice.

    It may be in `autoscalerOptions`, or in the head's environment with autoscaling on.
    """
    cluster = find_cluster(resource)
    if cluster is None:
        return True
    containers = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    names = [v["name"] for c in containers for v in c.get("env", [])]
    if "RAY_enable_autoscaler_v2" not in names:
        return True
    version_given = "version" in cluster.get("autoscalerOptions", {})
    return cluster.get("enableInTreeAutoscaling", False) and not version_given


def token_needs_ray_2_52(resource: Resource) -> bool:
    """Check that token authentication comes with Ray 2.52 or later."""
    cluster = find_cluster(resource) or {}
    if cluster.get("authOptions", {}).get("mode") != "token":
        return True
    number = cluster.get("rayVersion", "0").split(".")[:2]
    return tuple(map(int, number)) >= (2, 52)


RULES: list[Callable[[Resource], bool]] = [
    name_is_short_dns_label,
    job_has_a_cluster,
    retries_need_a_new_cluster,
    suspended_job_shuts_down,
    time_to_live_needs_shutdown,
    deadline_is_positive,
    resources_are_set_once,
    labels_are_no_start_parameter,
    replicas_are_in_order,
    redis_is_set_only_in_its_options,
    autoscaler_v2_restarts_no_pod,
    autoscaler_version_is_set_once,
    token_needs_ray_2_52,
]


def find_broken_rules(resource: Resource) -> list[str]:
    """Return the names of the rules by which the operator refuses a resource."""
    return [rule.__name__ for rule in RULES if not rule(resource)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_follow_the_operators_rules(path: Path) -> None:
    assert find_broken_rules(load_yaml(path)) == []


def test_each_rule_refuses_a_resource_that_breaks_only_it() -> None:
    def change(path: str, *keys: str | int, value: Any) -> Resource:
        """Load a file and replace the value at a path of keys."""
        resource = copy.deepcopy(load_yaml(f"deploy/{path}.yaml"))
        parent: Any = resource
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = value
        return resource

    spec, cluster = ("rayjob-train", "spec"), ("raycluster", "spec")
    workers, head = "workerGroupSpecs", "headGroupSpec"
    pod = (0, "template", "spec")
    v2 = [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]
    redis = [{"name": "REDIS_PASSWORD", "value": "x"}]
    in_head = (head, "template", "spec", "containers", 0, "env")
    retries = change("rayjob-on-cluster", "spec", "backoffLimit", value=2)
    refused = {
        "name_is_short_dns_label": change(
            "rayjob-train", "metadata", "name", value="t" * 48
        ),
        "job_has_a_cluster": change(
            "rayjob-on-cluster", "spec", "clusterSelector", value={"app": "x"}
        ),
        "retries_need_a_new_cluster": retries,
        "suspended_job_shuts_down": change(
            "rayjob-on-cluster", "spec", "suspend", value=True
        ),
        "time_to_live_needs_shutdown": change(
            *spec, "shutdownAfterJobFinishes", value=False
        ),
        "deadline_is_positive": change(*spec, "activeDeadlineSeconds", value=0),
        "resources_are_set_once": change(
            *cluster, head, "resources", value={"CPU": "1"}
        ),
        "labels_are_no_start_parameter": change(
            *cluster, workers, 0, "rayStartParams", value={"labels": "a=b"}
        ),
        "replicas_are_in_order": change(*cluster, workers, 0, "minReplicas", value=9),
        "redis_is_set_only_in_its_options": change(*cluster, *in_head, value=redis),
        "autoscaler_v2_restarts_no_pod": change(
            *cluster, workers, *pod, "restartPolicy", value="Always"
        ),
        "autoscaler_version_is_set_once": change(*cluster, *in_head, value=v2),
        "token_needs_ray_2_52": change(*cluster, "rayVersion", value="2.51.1"),
    }
    assert list(refused) == [rule.__name__ for rule in RULES]
    for name, resource in refused.items():
        assert find_broken_rules(resource) == [name]


def test_spot_pods_have_time_to_drain_before_kubernetes_kills_them() -> None:
    """Kubernetes kills a pod after its grace period, even if Ray still drains the node
    after SIGTERM.
    """
    num_draining_groups = 0
    for path in FILES:
        for group in find_groups(load_yaml(path)):
            pod = group["template"]["spec"]
            for variable in pod["containers"][0].get("env", []):
                if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S":
                    assert (
                        float(variable["value"]) < pod["terminationGracePeriodSeconds"]
                    )
                    num_draining_groups += 1
    assert num_draining_groups == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kuberay_accepts_the_files(path: Path) -> None:
    content = load_yaml(path)
    validate(content, make_schema(content["kind"]))
    spec, metadata = content["spec"], content["metadata"]
    if content["kind"] == "RayJob":
        RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]))
        assert parse_command(spec["entrypoint"])
        # A job starts a cluster and ends it, as Kueue requires, or runs on an existing
        # one, which Kueue cannot queue.
        starts_cluster = "rayClusterSpec" in spec
        assert spec.get("shutdownAfterJobFinishes", False) == starts_cluster
        assert ("labels" in metadata) == starts_cluster
        assert ("clusterSelector" in spec) != starts_cluster
    if "clusterSelector" in spec:
        assert spec["clusterSelector"] == {
            "ray.io/cluster": load_yaml("deploy/raycluster.yaml")["metadata"]["name"]
        }
        return
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    if "labels" in metadata and cluster["enableInTreeAutoscaling"]:
        assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == load_yaml("cluster.yaml")["docker"]["image"]
        assert (
            container["resources"]["requests"].items()
            >= container["resources"]["limits"].items()
        )
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_nightly_job_is_submitted_to_the_cluster() -> None:
    content = load_yaml("deploy/cronjob-daily.yaml")
    cluster = load_yaml("deploy/raycluster.yaml")["metadata"]["name"]
    schema = object_schema(
        "spec",
        apiVersion={"const": "batch/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=CRON_JOB,
    )
    validate(content, schema)
    pod = content["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    lines = [line.strip() for line in script.replace("\\\n", " ").splitlines()]
    (line,) = [line for line in lines if line.startswith("ray job submit")]
    words = shlex.split(line)
    submit, job = words[: words.index("--")], words[words.index("--") + 1 :]
    assert submit[submit.index("--submission-id") + 1] == "$day"  # one job a day
    assert "--entrypoint-memory" in submit
    address, _, token = container["env"]
    assert address["value"] == f"http://{cluster}-head-svc:8265"
    assert token["valueFrom"]["secretKeyRef"]["name"] == cluster
    assert container["image"] == load_yaml("cluster.yaml")["docker"]["image"]
    text = submit[submit.index("--runtime-env-json") + 1]
    RuntimeEnv(**yaml.safe_load(text))
    assert job[:4] == ["python", "-m", "jobs.daily", "--config"]
    assert content["spec"]["concurrencyPolicy"] == "Forbid"

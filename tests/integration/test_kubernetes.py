"""Files of deploy/: KubeRay accepts all fields and their types, and the jobs accept the
commands.
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

from tests.integration.test_cluster_files import ROOT, load, options

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


def fields(required: str = "", **types: Schema) -> Schema:
    """Return the schema of a mapping with these fields and no others."""
    return {
        "type": "object",
        "properties": types,
        "required": required.split(),
        "additionalProperties": False,
    }


def each(value: Schema) -> Schema:
    """Return the schema of a mapping from any keys to values of one schema."""
    return {"type": "object", "additionalProperties": value}


def several(item: Schema) -> Schema:
    """Return the schema of a list with at least one element."""
    return {"type": "array", "items": item, "minItems": 1}


METADATA = fields("name", name=TEXT, labels=each(TEXT), annotations=each(TEXT))
RESOURCES = fields("requests limits", requests=each(QUANTITY), limits=each(QUANTITY))
VARIABLES = several(fields("name value", name=TEXT, value=TEXT))
CONTAINER = fields(
    "name image resources", name=TEXT, image=TEXT, env=VARIABLES, resources=RESOURCES
)
TOLERATION = fields(
    "operator",
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect=TEXT,
)
POD = fields(
    "containers",
    serviceAccountName=TEXT,
    priorityClassName=TEXT,
    terminationGracePeriodSeconds=COUNT,
    nodeSelector=each(TEXT),
    tolerations=several(TOLERATION),
    containers=several(CONTAINER),
)
GROUP = {"rayStartParams": each(TEXT), "template": fields("spec", spec=POD)}
WORKERS = fields(
    "groupName minReplicas maxReplicas template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    **GROUP,
)
SECRET = fields(
    "valueFrom",
    valueFrom=fields(
        "secretKeyRef", secretKeyRef=fields("name key", name=TEXT, key=TEXT)
    ),
)
CLUSTER = fields(
    "rayVersion headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields("mode", mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        "version idleTimeoutSeconds",
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
    ),
    gcsFaultToleranceOptions=fields(
        "redisAddress", redisAddress=TEXT, redisPassword=SECRET
    ),
    headGroupSpec=fields("template", **GROUP),
    workerGroupSpecs=several(WORKERS),
)
JOB = fields(
    "entrypoint",
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    clusterSelector=each(TEXT),
    rayClusterSpec=CLUSTER,
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
)
SERVICE = fields(
    "serveConfigV2 rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER
)
ENV = several(
    fields("name", name=TEXT, value=TEXT, valueFrom=SECRET["properties"]["valueFrom"])
)
MOUNTS = several(fields("name mountPath", name=TEXT, mountPath=TEXT))
SUBMITTING = fields(
    "name image command resources",
    name=TEXT,
    image=TEXT,
    command=several(TEXT),
    args=several(TEXT),
    env=ENV,
    resources=RESOURCES,
    volumeMounts=MOUNTS,
)
ONCE = fields(
    "template",
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    template=fields(
        "spec",
        spec=fields(
            "restartPolicy containers",
            restartPolicy={"enum": ["Never", "OnFailure"]},
            serviceAccountName=TEXT,
            containers=several(SUBMITTING),
            volumes=several(
                fields("name configMap", name=TEXT, configMap=fields("name", name=TEXT))
            ),
        ),
    ),
)
NIGHTLY = fields(
    "schedule jobTemplate",
    schedule=TEXT,
    concurrencyPolicy={"enum": ["Allow", "Forbid", "Replace"]},
    jobTemplate=fields("spec", spec=ONCE),
)
SPECS = {"RayJob": JOB, "RayCluster": CLUSTER, "RayService": SERVICE}


def forbid_unknown_fields(schema: Any) -> Any:
    """Return KubeRay's schema with unknown fields forbidden, as kubectl validates it."""
    if not isinstance(schema, dict):
        return schema
    only = (
        {"additionalProperties": False}
        if isinstance(schema.get("properties"), dict) and "type" in schema
        else {}
    )
    return {name: forbid_unknown_fields(value) for name, value in schema.items()} | only


def make_schema(kind: str) -> Schema:
    schema = fields(
        "spec",
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=SPECS[kind],
    )
    if CRDS:  # they leave the metadata to the API server
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
    """Return the spec of the cluster that a resource starts, or None for a job on a
    cluster that is there.
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
    """Names have at most 53 characters for a cluster and 47 for a resource that starts
    one (`validation.IsDNS1035Label`).
    """
    name = resource["metadata"]["name"]
    longest = 53 if resource["kind"] == "RayCluster" else 47
    return len(name) <= longest and bool(
        re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    )


def job_has_a_cluster(resource: Resource) -> bool:
    spec = resource["spec"]
    if resource["kind"] != "RayJob" or "rayClusterSpec" in spec:
        return True
    return bool(spec.get("clusterSelector", {}).get("ray.io/cluster"))


def retries_need_a_cluster_of_their_own(resource: Resource) -> bool:
    """KubeRay since 1.6.0: `BackoffLimit is incompatible with ClusterSelector mode`."""
    spec = resource["spec"]
    return not (spec.get("clusterSelector") and spec.get("backoffLimit", 0) > 0)


def suspended_job_shuts_down(resource: Resource) -> bool:
    spec = resource["spec"]
    if not spec.get("suspend"):
        return True
    return "clusterSelector" not in spec and spec.get("shutdownAfterJobFinishes", False)


def time_to_live_needs_shutdown(resource: Resource) -> bool:
    spec = resource["spec"]
    return spec.get("shutdownAfterJobFinishes", False) or not spec.get(
        "ttlSecondsAfterFinished"
    )


def deadline_is_positive(resource: Resource) -> bool:
    return resource["spec"].get("activeDeadlineSeconds", 1) > 0


def resources_stand_in_one_place(resource: Resource) -> bool:
    """Resources are not in both `rayStartParams` and the group's `resources`."""
    names = {"num-cpus", "num-gpus", "memory", "resources"}
    return not any(
        group.get("resources") and names & set(group.get("rayStartParams", {}))
        for group in find_groups(resource)
    )


def labels_are_no_start_parameter(resource: Resource) -> bool:
    return not any(
        "labels" in group.get("rayStartParams", {}) for group in find_groups(resource)
    )


def replicas_are_in_order(resource: Resource) -> bool:
    return all(
        group.get("minReplicas", 0) <= group.get("maxReplicas", 2**31)
        for group in find_groups(resource)[1:]
    )


def redis_stands_in_its_options_alone(resource: Resource) -> bool:
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


def autoscaler_2_restarts_no_pod(resource: Resource) -> bool:
    cluster = find_cluster(resource) or {}
    if cluster.get("autoscalerOptions", {}).get("version") != "v2":
        return True
    return all(
        group["template"]["spec"].get("restartPolicy", "Never") == "Never"
        for group in find_groups(resource)
    )


def autoscaler_version_stands_in_one_place(resource: Resource) -> bool:
    """The version is not in both `autoscalerOptions` and the head's environment, where
    it needs autoscaling.
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
    cluster = find_cluster(resource) or {}
    if cluster.get("authOptions", {}).get("mode") != "token":
        return True
    number = cluster.get("rayVersion", "0").split(".")[:2]
    return tuple(map(int, number)) >= (2, 52)


RULES: list[Callable[[Resource], bool]] = [
    name_is_short_dns_label,
    job_has_a_cluster,
    retries_need_a_cluster_of_their_own,
    suspended_job_shuts_down,
    time_to_live_needs_shutdown,
    deadline_is_positive,
    resources_stand_in_one_place,
    labels_are_no_start_parameter,
    replicas_are_in_order,
    redis_stands_in_its_options_alone,
    autoscaler_2_restarts_no_pod,
    autoscaler_version_stands_in_one_place,
    token_needs_ray_2_52,
]


def broken_rules(resource: Resource) -> list[str]:
    """Return the names of the rules by which the operator refuses a resource."""
    return [rule.__name__ for rule in RULES if not rule(resource)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_operator_validates_it(path: Path) -> None:
    assert broken_rules(load(path)) == []


def test_the_rules_refuse_what_the_operator_refuses() -> None:
    def change(path: str, *keys: str | int, value: Any) -> Resource:
        resource = copy.deepcopy(load(f"deploy/{path}.yaml"))
        place: Any = resource
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return resource

    spec, cluster = ("rayjob-train", "spec"), ("raycluster", "spec")
    workers, head = "workerGroupSpecs", "headGroupSpec"
    pod = (0, "template", "spec")
    v2 = [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]
    redis = [{"name": "REDIS_PASSWORD", "value": "x"}]
    in_head = (head, "template", "spec", "containers", 0, "env")
    one = change("rayjob-on-cluster", "spec", "backoffLimit", value=2)
    refused = {
        "name_is_short_dns_label": change(
            "rayjob-train", "metadata", "name", value="t" * 48
        ),
        "job_has_a_cluster": change(
            "rayjob-on-cluster", "spec", "clusterSelector", value={"app": "x"}
        ),
        "retries_need_a_cluster_of_their_own": one,
        "suspended_job_shuts_down": change(
            "rayjob-on-cluster", "spec", "suspend", value=True
        ),
        "time_to_live_needs_shutdown": change(
            *spec, "shutdownAfterJobFinishes", value=False
        ),
        "deadline_is_positive": change(*spec, "activeDeadlineSeconds", value=0),
        "resources_stand_in_one_place": change(
            *cluster, head, "resources", value={"CPU": "1"}
        ),
        "labels_are_no_start_parameter": change(
            *cluster, workers, 0, "rayStartParams", value={"labels": "a=b"}
        ),
        "replicas_are_in_order": change(*cluster, workers, 0, "minReplicas", value=9),
        "redis_stands_in_its_options_alone": change(*cluster, *in_head, value=redis),
        "autoscaler_2_restarts_no_pod": change(
            *cluster, workers, *pod, "restartPolicy", value="Always"
        ),
        "autoscaler_version_stands_in_one_place": change(*cluster, *in_head, value=v2),
        "token_needs_ray_2_52": change(*cluster, "rayVersion", value="2.51.1"),
    }
    assert list(refused) == [rule.__name__ for rule in RULES]
    for name, resource in refused.items():
        assert broken_rules(resource) == [name]


def test_spot_pods_live_as_long_as_rays_notice() -> None:
    """Kubernetes kills a pod after its grace period, even if Ray still drains the node
    after SIGTERM.
    """
    noticed = 0
    for path in FILES:
        for group in find_groups(load(path)):
            pod = group["template"]["spec"]
            for variable in pod["containers"][0].get("env", []):
                if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S":
                    assert (
                        float(variable["value"]) < pod["terminationGracePeriodSeconds"]
                    )
                    noticed += 1
    assert noticed == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kuberay_takes_it(path: Path) -> None:
    content = load(path)
    validate(content, make_schema(content["kind"]))
    spec, about = content["spec"], content["metadata"]
    if content["kind"] == "RayJob":
        RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]))
        assert options(spec["entrypoint"])
        # A job starts a cluster and ends it, as Kueue asks for, or goes to one that is
        # there, which Kueue cannot queue.
        assert (
            ("rayClusterSpec" in spec)
            == spec.get("shutdownAfterJobFinishes", False)
            == ("labels" in about)
        )
        assert ("clusterSelector" in spec) != ("rayClusterSpec" in spec)
    if "clusterSelector" in spec:
        assert spec["clusterSelector"] == {
            "ray.io/cluster": load("deploy/raycluster.yaml")["metadata"]["name"]
        }
        return
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    if "labels" in about and cluster["enableInTreeAutoscaling"]:
        assert about["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == load("cluster.yaml")["docker"]["image"]
        assert (
            container["resources"]["requests"].items()
            >= container["resources"]["limits"].items()
        )
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_nightly_job_goes_to_the_cluster() -> None:
    content, cluster = (
        load("deploy/cronjob-daily.yaml"),
        load("deploy/raycluster.yaml")["metadata"]["name"],
    )
    validate(
        content,
        fields(
            "spec",
            apiVersion={"const": "batch/v1"},
            kind=TEXT,
            metadata=METADATA,
            spec=NIGHTLY,
        ),
    )
    (container,) = content["spec"]["jobTemplate"]["spec"]["template"]["spec"][
        "containers"
    ]
    (script,) = container["args"]
    (line,) = (
        line.strip()
        for line in script.replace("\\\n", " ").splitlines()
        if line.strip().startswith("ray job submit")
    )
    words = shlex.split(line)
    submit, job = words[: words.index("--")], words[words.index("--") + 1 :]
    assert submit[submit.index("--submission-id") + 1] == "$day"  # one job a day
    assert "--entrypoint-memory" in submit
    address, _, token = container["env"]
    assert address["value"] == f"http://{cluster}-head-svc:8265"
    assert token["valueFrom"]["secretKeyRef"]["name"] == cluster
    assert container["image"] == load("cluster.yaml")["docker"]["image"]
    text = submit[submit.index("--runtime-env-json") + 1]
    RuntimeEnv(**yaml.safe_load(text))
    assert job[:4] == ["python", "-m", "jobs.daily", "--config"]
    assert content["spec"]["concurrencyPolicy"] == "Forbid"

"""The files of deploy/ hold only fields that KubeRay takes, in their types, and commands that the jobs take.

The fields are those of KubeRay 1.5.1 that the files set, written by hand, as its own schemas have megabytes. With
KUBERAY_CRDS=FOLDER, a folder of KubeRay's `ray.io_*.yaml` (helm-chart/kuberay-operator/crds), those take their place.
"""

from __future__ import annotations

import os
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
    """These fields and no others."""
    return {
        "type": "object",
        "properties": types,
        "required": required.split(),
        "additionalProperties": False,
    }


def each(value: Schema) -> Schema:
    """Any keys, with such values."""
    return {"type": "object", "additionalProperties": value}


def several(item: Schema) -> Schema:
    """A list of one or more."""
    return {"type": "array", "items": item, "minItems": 1}


METADATA = fields("name", name=TEXT, labels=each(TEXT), annotations=each(TEXT))
RESOURCES = fields("requests limits", requests=each(QUANTITY), limits=each(QUANTITY))
CONTAINER = fields("name image resources", name=TEXT, image=TEXT, resources=RESOURCES)
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


def closed(schema: Any) -> Any:
    """KubeRay's schema as the API server reads it for kubectl: a field that it does not name is an error."""
    if not isinstance(schema, dict):
        return schema
    only = (
        {"additionalProperties": False}
        if isinstance(schema.get("properties"), dict) and "type" in schema
        else {}
    )
    return {name: closed(value) for name, value in schema.items()} | only


def schema_of(kind: str) -> Schema:
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
        schema["properties"]["spec"] = closed(
            latest["schema"]["openAPIV3Schema"]["properties"]["spec"]
        )
    return schema


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kuberay_takes_it(path: Path) -> None:
    content = load(path)
    validate(content, schema_of(content["kind"]))
    spec, about = content["spec"], content["metadata"]
    if content["kind"] == "RayJob":
        RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]))
        assert options(spec["entrypoint"])
        # A job starts a cluster and ends it, as Kueue asks for, or goes to one that is there, which Kueue cannot queue.
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
    submit, job = (
        container["command"][: (at := container["command"].index("--"))],
        container["command"][at + 1 :],
    )
    assert f"--address=http://{cluster}-head-svc:8265" in submit
    assert container["env"][1]["valueFrom"]["secretKeyRef"]["name"] == cluster
    assert container["image"] == load("cluster.yaml")["docker"]["image"]
    (text,) = (
        word.partition("=")[2]
        for word in submit
        if word.startswith("--runtime-env-json")
    )
    RuntimeEnv(**yaml.safe_load(text))
    assert job[:4] == ["python", "-m", "jobs.daily", "--config"]
    assert content["spec"]["concurrencyPolicy"] == "Forbid"

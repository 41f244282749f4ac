"""``deploy/kubernetes``: valid by the API's schemas, and the parts fit together and to the server."""

import copy
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from octavo.serving import cli, flags
from octavo.serving.supervisor import STOP_MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
GUIDE = ROOT / "docs" / "deployment.md"
KUBECTL = shutil.which("kubectl")
VERSIONS = ("1.30", "1.37")
"""Oldest and newest Kubernetes checked against."""
OVERLAYS = ("base", "gpu", "monitoring", "autoscaling", "leader-worker-set")
NO_RESOURCES = ("kustomization.yaml", "prometheus-adapter-values.yaml", "deployment-patch.yaml")
FILES = [file for file in sorted(FOLDER.rglob("*.yaml")) if file.name not in NO_RESOURCES]
CUSTOM = {
    "monitoring.coreos.com/v1 ServiceMonitor": {"selector", "endpoints"},
    "monitoring.coreos.com/v1 PrometheusRule": {"groups"},
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        *("replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"),
    },
}
"""Kinds whose schemas are not Kubernetes' own, and the fields of their ``spec`` that are used here."""


def load(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def kind_of(resource: dict) -> str:
    return f"{resource['apiVersion']} {resource['kind']}"


def problems(resource: dict, version: str) -> list[str]:
    """What Kubernetes' schemas have against a resource; for kinds that are not its own, against the pods in it."""
    kind = kind_of(resource)
    if kind in CUSTOM:
        found = [f"{kind}: {name}" for name in set(resource["spec"]) ^ CUSTOM[kind]]
        if "leaderWorkerTemplate" in resource["spec"]:
            template = resource["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            resource = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        else:
            return found
    else:
        found = []
    try:
        kubernetes_validate.validate(resource, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        found.append(error.message)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_valid(file, version):
    assert not problems(yaml.safe_load(file.read_text(encoding="utf-8")), version)


def mutate(resource: dict, path: tuple, value: object) -> dict:
    changed = copy.deepcopy(resource)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


POD = ("spec", "template", "spec")
FAULTS = [
    ("base/deployment.yaml", ("spec", "replicas"), "three"),
    ("base/deployment.yaml", ("spec", "strategi"), {}),
    ("base/deployment.yaml", (*POD, "containers", 0, "livenessProbe", "httpGet", "pth"), "/live"),
    ("base/deployment.yaml", (*POD, "containers", 0, "ports", 0, "containerPort"), "http"),
    ("base/persistent-volume-claim.yaml", ("spec", "accessModes"), "ReadWriteMany"),
    ("autoscaling/horizontal-pod-autoscaler.yaml", ("spec", "minReplicas"), "3"),
    ("monitoring/service-monitor.yaml", ("spec", "endpoint"), []),
    (
        "leader-worker-set/leader-worker-set.yaml",
        ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "container"),
        [],
    ),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_faults_are_found(number):
    file, path, value = FAULTS[number]
    resource = mutate(load(file), path, value)
    assert problems(resource, VERSIONS[-1])


def merge(value: object, patch: object) -> object:
    """A strategic merge patch: mappings key by key, containers by their names, everything else replaced."""
    if not isinstance(value, dict) or not isinstance(patch, dict):
        return patch
    merged = {**value}
    for key, changed in patch.items():
        if key == "containers":
            old = {container["name"]: container for container in value[key]}
            assert {container["name"] for container in changed} <= set(old)
            new = {container["name"]: container for container in changed}
            merged[key] = [merge(container, new.get(name, {})) for name, container in old.items()]
        else:
            merged[key] = merge(value[key], changed) if key in value else changed
    return merged


def pods() -> dict[str, dict]:
    deployment, group = load("base/deployment.yaml"), load("leader-worker-set/leader-worker-set.yaml")
    patched = merge(deployment, load("gpu/deployment-patch.yaml"))
    return {
        "base": deployment["spec"]["template"],
        "gpu": patched["spec"]["template"],
        "leader-worker-set": group["spec"]["leaderWorkerTemplate"]["workerTemplate"],
    }


def gpu_container() -> dict:
    return load("gpu/deployment-patch.yaml")["spec"]["template"]["spec"]["containers"][0]


def test_the_leader_worker_set_has_the_pods_of_the_gpu_overlay():
    """Labels, user, tolerations, spread, volumes; and of the container image, options, secrets, probes, limits."""
    assert pods()["leader-worker-set"] == pods()["gpu"]
    # So that two empty pods would not pass.
    spec = pods()["leader-worker-set"]["spec"]
    assert [one["key"] for one in spec["tolerations"]] == ["nvidia.com/gpu"]
    assert spec["topologySpreadConstraints"]


@pytest.mark.parametrize("name", ["base", "gpu", "leader-worker-set"])
def test_the_pod_reads_the_secret_of_the_guide(name):
    [command] = re.findall(r"kubectl create secret generic .*", GUIDE.read_text(encoding="utf-8"))
    secret = command.split()[4]
    keys = re.findall(r"--from-literal=([a-z-]+)=", command)
    variables = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in pods()[name]["spec"]["containers"][0]["env"]}
    assert set(variables) == {"OCTAVO_API_KEY", "HF_TOKEN"}
    assert {one["name"] for one in variables.values()} == {secret}
    assert sorted(one["key"] for one in variables.values()) == sorted(keys)
    assert all(one["optional"] is True for one in variables.values())


@pytest.mark.parametrize("name", ["base", "gpu", "leader-worker-set"])
def test_the_pod_fits_the_server(name):
    template = pods()[name]
    [container] = template["spec"]["containers"]
    args = cli.make_parser().parse_args(["serve", *container["args"]])
    assert not flags.refused_options(args)
    options = flags.server_options(args, [])
    assert options.port == container["ports"][0]["containerPort"]
    assert options.public_metrics
    [command, wait_s] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed_s = float(wait_s) + options.shutdown_timeout_s + STOP_MARGIN_S
    assert needed_s + 5 <= template["spec"]["terminationGracePeriodSeconds"] <= needed_s + 30

    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/live", "liveness": "/live", "readiness": "/health"}
    # Out of the Service before the pod's last request would be refused.
    readiness = container["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= float(wait_s)
    assert template["metadata"]["labels"].items() >= {"app.kubernetes.io/name": "octavo"}.items()
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/data", "/tmp"}


def test_the_parts_select_each_other():
    label = {"app.kubernetes.io/name": "octavo"}
    service, budget = load("base/service.yaml"), load("base/pod-disruption-budget.yaml")
    deployment, monitor = load("base/deployment.yaml"), load("monitoring/service-monitor.yaml")
    assert service["spec"]["selector"] == label
    assert budget["spec"]["selector"]["matchLabels"] == label
    assert deployment["spec"]["selector"]["matchLabels"] == label
    assert monitor["spec"]["selector"]["matchLabels"] == label
    assert load("base/kustomization.yaml")["labels"][0]["pairs"] == label  # the Service gets it, for the monitor
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    [claim] = [one for one in deployment["spec"]["template"]["spec"]["volumes"] if "persistentVolumeClaim" in one]
    name = load("base/persistent-volume-claim.yaml")["metadata"]["name"]
    assert claim["persistentVolumeClaim"]["claimName"] == name
    assert gpu_container()["name"] == deployment["spec"]["template"]["spec"]["containers"][0]["name"]
    # What runs on one machine cannot use a second pod of its group.
    assert load("leader-worker-set/leader-worker-set.yaml")["spec"]["leaderWorkerTemplate"]["size"] == 1


def test_the_autoscaler_asks_for_a_metric_that_there_is():
    scaler = load("autoscaling/horizontal-pod-autoscaler.yaml")["spec"]
    [rule] = load("autoscaling/prometheus-adapter-values.yaml")["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    assert scaler["scaleTargetRef"]["name"] == load("base/deployment.yaml")["metadata"]["name"]
    assert rule["name"]["matches"] in rule["seriesQuery"]
    source = (ROOT / "serving" / "metrics.py").read_text(encoding="utf-8")
    assert f'"{rule["name"]["matches"].removeprefix("vllm:")}"' in source


def test_the_operators_rules_are_those_of_prometheus():
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert load("monitoring/prometheus-rule.yaml")["spec"] == alerts


def test_kustomizations_name_every_file():
    for overlay in OVERLAYS:
        kustomization = load(f"{overlay}/kustomization.yaml")
        patches = [one["path"] for one in kustomization.get("patches", []) if "path" in one]
        named = {*kustomization["resources"], *patches}
        files = {file.name for file in (FOLDER / overlay).glob("*.yaml")}
        assert files - named <= {"kustomization.yaml", "prometheus-adapter-values.yaml"}
        assert all((FOLDER / overlay / name).exists() for name in named)
    assert {file.parent.name for file in FILES} | {"gpu"} == set(OVERLAYS)


IMAGES = {"base": "0.1.0-cpu", "gpu": "0.1.0-cuda12", "leader-worker-set": "0.1.0-cuda12"}


def guide_commands(start: str) -> list[str]:
    """The commands of the guide's Kubernetes section that begin so."""
    section = GUIDE.read_text(encoding="utf-8").split("## 4. Kubernetes")[1]
    return [line for line in section.splitlines() if line.startswith(start)]


def renamed(image: str, folder: Path) -> str:
    """What kustomize's ``images:`` of a folder makes of an image: rules apply to names as they are at that moment."""
    name, tag = re.fullmatch(r"(.+?)(:[^/:]+)?", image).groups()
    for rule in yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["images"]:
        if rule["name"] == name:
            name = rule.get("newName", name)
            tag = f":{rule['newTag']}" if "newTag" in rule else tag
    return name + (tag or "")


@pytest.fixture
def pushed(tmp_path) -> Path:
    """A copy of the manifests in which the guide's command has put in a registry, one with a port in its name."""
    shutil.copytree(FOLDER, tmp_path / "deploy" / "kubernetes")
    [command] = guide_commands("sed ")
    script = f"REGISTRY=registry.internal:5000/me\n{command.split(' # ')[0]}"
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, timeout=30)
    return tmp_path / "deploy" / "kubernetes"


@pytest.mark.parametrize("overlay", IMAGES)
def test_the_guide_leads_to_the_image_of_each_overlay(pushed, overlay):
    [container] = pods()[overlay]["spec"]["containers"]
    expected = f"registry.internal:5000/me/octavo:{IMAGES[overlay]}"
    assert renamed(container["image"], pushed / overlay) == expected
    # Without an image of its own in the patch, the GPU overlay would keep what the base has made of it.
    base = renamed(pods()["base"]["spec"]["containers"][0]["image"], pushed / "base")
    assert renamed(base, pushed / "gpu") == base
    if KUBECTL is not None:
        result = subprocess.run([KUBECTL, "kustomize", pushed / overlay], capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, result.stderr
        assert re.findall(r"\bimage: (\S+)", result.stdout) == [expected]


def test_the_guide_builds_and_pushes_the_images_that_the_overlays_want():
    built = re.findall(r"^docker build .*-t (octavo:\S+)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    tagged = [line.split() for line in guide_commands("docker tag")]
    for words in tagged:
        source, target = words[2:4]
        assert source in built
        assert target == f"$REGISTRY/octavo:{version}-{source.removeprefix('octavo:')}"
        assert words[4:] == ["&&", "docker", "push", target]
    assert {words[3].rpartition(":")[2] for words in tagged} == set(IMAGES.values())
    assert {load(f"{overlay}/kustomization.yaml")["images"][0]["newTag"] for overlay in IMAGES} == set(IMAGES.values())


def test_the_guide_says_what_the_autoscaler_needs():
    replicas = load("base/deployment.yaml")["spec"]["replicas"]
    before = GUIDE.read_text(encoding="utf-8").split("Before the autoscaler is used")[1]
    assert f"remove `replicas: {replicas}` from `deploy/kubernetes/base/deployment.yaml`" in before.split("\n\n")[0]


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: kustomizations are not built")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize(overlay):
    command = [str(KUBECTL), "kustomize", str(FOLDER / overlay)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    built = list(yaml.safe_load_all(result.stdout))
    assert built
    assert not [one for resource in built for one in problems(resource, VERSIONS[-1])]
    if overlay == "gpu":
        [deployment] = [one for one in built if one["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert re.search(r"/octavo:.*-cuda12$", container["image"])
        assert container["readinessProbe"]
    if overlay == "leader-worker-set":
        assert "Deployment" not in {one["kind"] for one in built}

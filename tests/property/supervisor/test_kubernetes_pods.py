"""From options and an agent's plan to its pod: names, limits, security, templates."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.launcher import AgentPlan, AgentState
from commutator_kubernetes.config import KubernetesLauncherConfig, PodOptions
from commutator_kubernetes.pods import ENDING, merged, plan_object, plan_of, pod_of, state_of

Json = dict[str, Any]
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
WORDS = st.from_regex(r"[A-Za-z0-9._-]{1,70}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
PLANS = st.builds(
    AgentPlan,
    name=WORDS,
    engine=WORDS,
    generation=st.from_regex(r"[0-9a-f]{1,12}", fullmatch=True),
    module=st.just("m"),
    files=st.dictionaries(WORDS, st.text(max_size=10), max_size=3),
    grace_s=st.floats(0, 1000),
)
OPTIONS = st.builds(
    PodOptions,
    cpus=st.floats(0, 256),
    memory=st.none() | st.just("64Gi"),
    gpus=st.integers(0, 16),
    gpu_resource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu"]),
    shm=st.none() | st.just("16Gi"),
)


def config_with(engine: str, options: PodOptions, **fields: Any) -> KubernetesLauncherConfig:
    return KubernetesLauncherConfig(
        kind="kubernetes", cluster="c", image="i:1", resources={engine: options}, **fields
    )


def both(plan: AgentPlan, config: KubernetesLauncherConfig) -> tuple[Json, Json]:
    """The plan's object as it would be stored, and the pod."""
    stored = plan_object(plan, config)
    stored["metadata"]["uid"] = "u"
    return stored, pod_of(plan, config, stored)


@given(PLANS, OPTIONS, st.none() | st.just("sa"))
def test_a_pod_is_legal_restricted_and_what_was_asked(
    plan: AgentPlan, options: PodOptions, account: str | None
) -> None:
    stored, pod = both(plan, config_with(plan.engine, options, service_account=account))
    assert pod == both(plan, config_with(plan.engine, options, service_account=account))[1]
    json.dumps([stored, pod])
    assert plan_of(stored) == plan
    assert NAME.fullmatch(pod["metadata"]["name"])
    assert pod["metadata"]["name"] == stored["metadata"]["name"]
    assert all(LABEL.fullmatch(value) for value in pod["metadata"]["labels"].values())
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert spec["automountServiceAccountToken"] == (account is not None)
    limits = container["resources"].get("limits", {})
    assert limits.get(options.gpu_resource, "0") == str(options.gpus)
    assert limits.get("memory") == options.memory
    assert spec["terminationGracePeriodSeconds"] > plan.grace_s
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["volumes"]}
    assert ("shm" in mounted) == (options.shm is not None)


@given(PLANS, PLANS)
def test_different_agents_have_different_objects(one: AgentPlan, other: AgentPlan) -> None:
    config = config_with("x", PodOptions())
    names = {plan_object(plan, config)["metadata"]["name"] for plan in (one, other)}
    assert len(names) == len({one.name, other.name})


@given(st.dictionaries(st.text(max_size=3), JSON), st.dictionaries(st.text(max_size=3), JSON))
def test_merging_keeps_all_of_theirs_and_what_they_leave(ours: Json, theirs: Json) -> None:
    found = merged(ours, theirs)
    assert found.keys() == ours.keys() | theirs.keys()
    assert merged(ours, {}) == ours
    assert merged({}, theirs) == theirs
    assert merged(found, theirs) == found, "a second time changes nothing"
    for name, value in theirs.items():
        if not isinstance(value, dict | list):
            assert found[name] == value


def test_a_template_reaches_the_container_by_its_name() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "containers": [
                {"name": "agent", "env": [{"name": "A", "value": "1"}, {"name": "POD_IP"}]},
                {"name": "beside", "image": "b"},
            ],
        },
    }
    plan = AgentPlan(name="w-0", engine="w", generation="a", module="m", grace_s=1)
    _, pod = both(plan, config_with("w", PodOptions(template=template)))
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["commutator.dev/cluster"] == "c"
    agent, beside = pod["spec"]["containers"]
    assert beside == {"name": "beside", "image": "b"}
    assert agent["command"][:2] == ["python", "-m"]
    assert [one["name"] for one in agent["env"]] == ["POD_IP", "POD_NAME", "POD_UID", "A"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"kind": "Pod"}, "expected only metadata and spec"),
        ({"metadata": {"name": "x"}}, r"metadata\.name is set"),
        ({"metadata": {"labels": {"commutator.dev/cluster": "x"}}}, "cluster is set"),
        ({"spec": {"restartPolicy": "Always"}}, r"spec\.restartPolicy is set"),
        ({"spec": {"containers": [{"name": "agent", "command": []}]}}, r"containers\.command"),
        ({"spec": {"containers": [{"image": "x"}]}}, "a name in each"),
        ({"spec": [1]}, "expected mappings"),
    ],
)
def test_what_would_break_the_launcher_is_refused_by_name(template: Json, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PodOptions(template=template)


def test_states_are_told_in_the_clusters_own_words() -> None:
    plan = AgentPlan(name="w-0", engine="w", generation="a", module="m", grace_s=1)
    stored, pod = both(plan, config_with("w", PodOptions()))

    def told(**status: Any) -> tuple[AgentState, str | None]:
        agent = state_of(stored, {**pod, "status": status})
        return agent.state, agent.cause

    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    assert told(containerStatuses=[{"name": "agent", "state": waiting}]) == (
        AgentState.WAITING,
        "ImagePullBackOff: no such image",
    )
    assert told(
        phase="Running", containerStatuses=[{"name": "agent", "state": {}, "lastState": ended}]
    ) == (AgentState.RUNNING, "OOMKilled with status 137")
    assert told(phase="Succeeded")[0] is AgentState.FAILED
    assert told(phase="Running", podIP="10.0.0.1") == (AgentState.RUNNING, None)
    assert told()[1] == "the cluster has not started its pod yet"
    deleted = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "t"}}
    assert state_of(stored, deleted).state is AgentState.WAITING
    stored["metadata"]["annotations"][ENDING] = "true"
    assert state_of(stored, None).state is AgentState.ENDING

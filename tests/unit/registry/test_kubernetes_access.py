"""Where the API server is found, and as whom it is asked."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commutator.errors import ConfigError
from commutator_kubernetes import access
from commutator_kubernetes.view import object_name

CONFIG = {
    "current-context": "a",
    "contexts": [{"name": "a", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
    "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443/"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}


def changed(**user: object) -> dict[str, object]:
    return {**CONFIG, "users": [{"name": "u", "user": user}]}


def test_a_kubeconfig_is_read(tmp_path: Path) -> None:
    (tmp_path / "crt").write_bytes(b"C")
    data = changed(
        **{"client-certificate": "crt", "client-key-data": base64.b64encode(b"K").decode()}
    )
    found = access.read_kubeconfig(data, tmp_path)
    assert (found.server, found.namespace) == ("https://10.0.0.1:6443", "n")
    assert found.certificate == (b"C", b"K")
    assert found.verified


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed(exec={"command": "x"}), "kubectl proxy"),
        ({**CONFIG, "current-context": "b"}, "no context 'b'"),
        ({**CONFIG, "clusters": []}, "no cluster 'k'"),
        (changed(**{"client-key-data": ""}), "client-certificate and client-key"),
        ([], "expected a kubeconfig"),
    ],
    ids=["a program", "no context", "no cluster", "half a certificate", "a list"],
)
def test_what_cannot_be_used_says_why(data: object, says: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=says):
        access.find_access(str(tmp_path / "config"), {})


def test_a_pod_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token is read again, as the kubelet renews it; and a kubeconfig that is named wins."""
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(f"{name}\n")
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = access.find_access(None, pod)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "namespace")
    assert found.read_token() == "token"
    (tmp_path / "token").write_text("next")
    assert found.read_token() == "next"
    (tmp_path / "config").write_text(yaml.safe_dump(CONFIG))
    assert access.find_access(str(tmp_path / "config"), pod).namespace == "n"


def test_without_a_file_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        access.find_access(None, {"HOME": "/no/such"})


def test_names_of_objects_are_legal_and_differ() -> None:
    texts = ["c-w-0", "c-W-0", "c-w_0", "c-w.0", "c-" + "x" * 80, "c-" + "x" * 81, "-"]
    names = [object_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert names[0] == "c-w-0"
    for name in names:
        assert len(name) <= 63
        assert name.strip("-") == name == name.lower()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_manifests_are_printed() -> None:
    def printed(*arguments: str) -> list[dict[str, object]]:
        argv = [sys.executable, "-m", "commutator_kubernetes", *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return list(yaml.safe_load_all(done.stdout))

    assert [one["metadata"]["name"] for one in printed("crds")] == [  # type: ignore[index]
        "commutatormembers.commutator.dev",
        "commutatordocuments.commutator.dev",
    ]
    (role,) = printed("role", "r")
    assert role["kind"] == "Role"

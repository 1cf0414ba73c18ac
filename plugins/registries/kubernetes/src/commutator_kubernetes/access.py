"""How the API server is reached: from inside a pod, or as a kubeconfig says."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from commutator.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token, which it renews, and the API server's authority."""


@frozen(kw_only=True)
class Access:
    """Where the API server is, and as whom it is asked."""

    server: str
    """Its URL, without a path."""
    namespace: str = "default"
    """The one to use where the configuration names none."""
    authority: str | None = None
    """PEM of who signs the server's certificate; None: those that this machine trusts."""
    verified: bool = True
    """Whether the server's certificate is checked at all."""
    token: str | None = None
    """A bearer token that does not change."""
    token_file: Path | None = None
    """A file with one that does."""
    certificate: tuple[bytes, bytes] | None = None
    """A client's certificate and its key, PEM."""

    def read_token(self) -> str | None:
        """The token as it is now. Raises OSError."""
        if self.token_file is not None:
            return self.token_file.read_text(encoding="utf-8").strip()
        return self.token

    def ssl_context(self) -> ssl.SSLContext | None:
        """For ``server``; None for plain HTTP. Raises OSError, of which ssl.SSLError is one."""
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cadata=self.authority)
        if not self.verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            # Python loads certificates from files only.
            with tempfile.TemporaryDirectory(prefix="commutator-") as folder:
                files = [Path(folder) / name for name in ("crt", "key")]
                for file, content in zip(files, self.certificate, strict=True):
                    file.touch(mode=0o600)
                    file.write_bytes(content)
                context.load_cert_chain(files[0], files[1])
        return context


def find_access(kubeconfig: str | None, environ: Mapping[str, str] = os.environ) -> Access:
    """The access that is configured, or else a pod's own, or else that of ``kubectl``.

    Raises ConfigError.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and host and SERVICE_ACCOUNT.is_dir():
        return _of_pod(host, environ.get("KUBERNETES_SERVICE_PORT", "443"))
    default = Path(environ.get("HOME", "/")) / ".kube" / "config"
    path = Path(kubeconfig or environ.get("KUBECONFIG") or default)
    try:
        return read_kubeconfig(yaml.safe_load(path.read_text(encoding="utf-8")), path.parent)
    except OSError as error:
        problem = (
            f"{path}: {error.strerror or error}; outside of a pod, name a kubeconfig file by "
            "`kubeconfig`, or by the variable KUBECONFIG"
        )
        raise ConfigError([problem], "Kubernetes") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: {error}"], "Kubernetes") from error


def _of_pod(host: str, port: str) -> Access:
    try:
        return Access(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            namespace=(SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip(),
            authority=(SERVICE_ACCOUNT / "ca.crt").read_text(encoding="utf-8"),
            token_file=SERVICE_ACCOUNT / "token",
        )
    except OSError as error:
        raise ConfigError([f"the pod's service account: {error}"], "Kubernetes") from error


def read_kubeconfig(data: Any, folder: Path) -> Access:
    """The access of a kubeconfig's current context; ``folder``: where its paths begin.

    Raises ValueError for one that says it another way, and OSError for files that are missing.
    """
    if not isinstance(data, dict):
        raise ValueError("expected a kubeconfig")  # noqa: TRY004 - a wrong value in a file
    context = _named(data, "contexts", str(data.get("current-context") or ""), "context")
    cluster = _named(data, "clusters", str(context.get("cluster")), "cluster")
    user = _named(data, "users", str(context.get("user")), "user")
    foreign = next((name for name in ("exec", "auth-provider", "username") if name in user), None)
    if foreign is not None:
        raise ValueError(
            f"user {context.get('user')}: `{foreign}` is not supported; run `kubectl proxy`, and "
            "name a kubeconfig whose server is http://127.0.0.1:8001"
        )
    server = str(cluster.get("server", "")).rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise ValueError(f"cluster {context.get('cluster')}: expected a URL as server")
    authority = _content(cluster, "certificate-authority", folder)
    certificate = _content(user, "client-certificate", folder)
    key = _content(user, "client-key", folder)
    if (certificate is None) != (key is None):
        raise ValueError("expected client-certificate and client-key, or neither")
    token_file = user.get("tokenFile")
    return Access(
        server=server,
        namespace=str(context.get("namespace") or "default"),
        authority=None if authority is None else authority.decode(),
        verified=not cluster.get("insecure-skip-tls-verify"),
        token=user.get("token"),
        token_file=None if token_file is None else folder / token_file,
        certificate=None if certificate is None or key is None else (certificate, key),
    )


def _named(data: dict[str, Any], plural: str, name: str, kind: str) -> dict[str, Any]:
    for one in data.get(plural) or []:
        if one.get("name") == name and isinstance(one.get(kind), dict):
            return dict(one[kind])
    raise ValueError(f"there is no {kind} {name!r}")


def _content(part: dict[str, Any], name: str, folder: Path) -> bytes | None:
    """What stands in the file, or in base64 beside it."""
    if (inline := part.get(f"{name}-data")) is not None:
        return base64.b64decode(inline)
    return None if (path := part.get(name)) is None else (folder / path).read_bytes()

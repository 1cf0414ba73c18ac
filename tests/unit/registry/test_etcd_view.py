"""What keys in etcd mean for watchers, and which options make sense."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from commutator.contract.registry import WorkerDown, WorkerUp
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.trust import RunSecret, adopt
from commutator_etcd.config import EtcdConfig, EtcdTls
from commutator_etcd.follower import Follower, Listing, WatchMessage
from commutator_etcd.view import ClusterView, Desired, Gone, Keys, encoded
from commutator_testing.registries import make_worker

KEYS = Keys("c")
WORKER, DESIRED, GONE = KEYS.worker("a-0"), KEYS.desired("a-0"), KEYS.gone("a-0")
RECORD = make_worker("a-0", instance="i")


def up(view: ClusterView, record: Any = RECORD, now_s: float = 0.0) -> list[Any]:
    return list(view.apply({WORKER: encoded(WORKER, record)}, now_s))


def test_the_reason_counts_for_the_instance_that_gave_it() -> None:
    view = ClusterView(KEYS)
    assert up(view) == [WorkerUp(record=RECORD)]
    gone = encoded(GONE, Gone(reason="stopped", instance="i"))
    left = [WorkerDown(worker_id="a-0", reason="stopped")]
    assert view.apply({WORKER: None, GONE: gone}, 0.0) == left
    assert view.due_s() == inf
    up(view, make_worker("a-0", instance="j"))
    assert view.apply({WORKER: None}, 5.0) == []
    assert view.overdue(5.9) == []
    assert view.due_s() == 6.0
    assert view.overdue(6.0) == [WorkerDown(worker_id="a-0", reason="lease expired")]
    assert (view.due_s(), view.records) == (inf, {})


def test_whether_a_key_is_back_is_asked_without_waiting_for_the_next_heartbeat() -> None:
    follower = Follower(resync_s=60.0)
    follower.listed(Listing(1, {}), 0.0, 0.0)
    assert follower.tick(0.0)
    follower.received(WatchMessage(1, progress=True), 0.1)
    follower.confirm_by(0.6)
    assert (follower.due_s(), follower.tick(0.5), follower.tick(0.6)) == (0.6, False, True)
    follower.received(WatchMessage(1), 0.7)
    assert follower.confirmed_s == 0.0, "only an answer confirms"
    follower.received(WatchMessage(1, progress=True), 0.8)
    assert follower.confirmed_s == 0.6


def test_a_key_that_comes_back_at_once_was_never_away() -> None:
    view = ClusterView(KEYS)
    up(view)
    assert view.apply({WORKER: None}, 1.0) == []
    assert list(view.missing()) == ["a-0"]
    assert up(view, now_s=1.5) == []
    assert view.overdue(9.0) == []
    assert list(view.records) == ["a-0"]


def test_who_takes_a_name_that_lapsed_did_not_make_its_holder_fail() -> None:
    view = ClusterView(KEYS)
    up(view)
    view.apply({WORKER: None}, 1.0)
    other = make_worker("a-0", port=2, instance="j")
    lapsed = WorkerDown(worker_id="a-0", reason="lease expired")
    assert up(view, other, now_s=1.5) == [lapsed, WorkerUp(record=other)]


def test_another_instance_at_the_same_address_is_another_process() -> None:
    view = ClusterView(KEYS)
    up(view)
    again = make_worker("a-0", instance="j")
    assert up(view, again) == [WorkerDown(worker_id="a-0", reason="failed"), WorkerUp(record=again)]
    assert up(view, again) == [], "nothing changed"


def test_what_is_desired_comes_before_and_outlives_the_worker() -> None:
    view = ClusterView(KEYS)
    wanted = encoded(DESIRED, Desired(draining=True, role=Role.PREFILL))
    assert view.apply({DESIRED: wanted}, 0.0) == []
    (change,) = up(view)
    assert (change.record.draining, change.record.role) == (True, Role.PREFILL)
    (change,) = view.apply({DESIRED: None}, 0.0)
    assert change == WorkerUp(record=RECORD)


def test_keys_that_others_put_there_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    view = ClusterView(KEYS)
    assert view.apply({KEYS.prefix + b"news/1": b"?", KEYS.prefix + b"workers": b"?"}, 0.0) == []
    assert caplog.text == ""
    with adopt(RunSecret.new()):
        foreign = encoded(WORKER, RECORD)
    assert view.apply({WORKER: foreign}, 0.0) == []
    assert "runtime.secret" in caplog.text
    malformed = encoded(WORKER, {"worker_id": 7})
    assert view.apply({WORKER: malformed}, 0.0) == []
    assert "worker_id" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"endpoints": ()}, "at least one"),
        ({"endpoints": ("localhost:2379",)}, "expected http://HOST:PORT"),
        ({"endpoints": ("http://localhost",)}, "expected http://HOST:PORT"),
        ({"endpoints": ("http://localhost:port",)}, "expected http://HOST:PORT"),
        ({"endpoints": ("http://localhost:1", "https://localhost:1")}, "either http or https"),
        ({"endpoints": ("https://localhost:1",)}, "need `tls`"),
        ({"tls": EtcdTls(ca_file="ca.pem")}, "needs https"),
        ({"endpoints": ("http://10.0.0.1:2379",)}, "10.0.0.1:2379 is on another host"),
        ({"cluster": "a/b"}, "expected letters"),
    ],
)
def test_options_that_make_no_sense(options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EtcdConfig(kind="etcd", **options)


def test_plain_text_between_hosts_must_be_asked_for() -> None:
    config = EtcdConfig(kind="etcd", endpoints=("http://10.0.0.1:2379",), insecure=True)
    assert not config.encrypted
    assert EtcdConfig(kind="etcd", endpoints=("http://[::1]:2379",)).call_timeout_s > 0


def test_certificates_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="cert_file and key_file"):
        EtcdTls(ca_file="ca.pem", cert_file="cert.pem")


async def test_a_certificate_that_cannot_be_read_is_an_error_of_the_configuration() -> None:
    from commutator_etcd.registry import EtcdRegistry

    tls = EtcdTls(ca_file="/no/such/ca.pem")
    config = EtcdConfig(kind="etcd", endpoints=("https://127.0.0.1:1",), tls=tls)
    with pytest.raises(ConfigError, match=r"registry\.tls\.ca_file: /no/such/ca\.pem: No such"):
        EtcdRegistry(config)

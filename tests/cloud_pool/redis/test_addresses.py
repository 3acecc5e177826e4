"""Addresses of Redis deployments, and what a configuration may point to."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.redis.config import RedisConfig, parse_redis, shown_address, with_url
from causeway_server.cloud_pool.storage.config import JobsConfig, with_shared_redis
from causeway_server.router.errors import ConfigError

SENTINELS = "redis+sentinel://a:1,b/causeway/2"
CLUSTER = "redis+cluster://a:1,b,[::1]:3"


def test_urls_name_a_server_sentinels_or_a_cluster() -> None:
    assert parse_redis("redis://a:1/0", "redis").topology == "server"
    assert parse_redis("unix:///run/redis.sock", "redis").topology == "server"
    sentinels = parse_redis(SENTINELS, "redis")
    assert (sentinels.topology, sentinels.hosts) == ("sentinel", (("a", 1), ("b", 26379)))
    assert (sentinels.master, sentinels.database, sentinels.tls) == ("causeway", 2, False)
    cluster = parse_redis(CLUSTER.replace("redis+", "rediss+"), "redis")
    assert (cluster.topology, cluster.hosts) == ("cluster", (("a", 1), ("b", 6379), ("::1", 3)))
    assert cluster.tls


@pytest.mark.parametrize(
    ("address", "key", "reason"),
    [
        ("http://a", "redis", "redis\\+sentinel://"),
        ("redis+sentinel://a:1", "redis", "Name the master"),
        ("redis+sentinel://a:1/m/x", "redis", "Name the master"),
        ("redis+sentinel://a:x/m", "redis", "'a:x' is not of the form `host:port`"),
        ("redis+cluster://a:1/0", "redis", "no numbered databases"),
        ("redis+cluster://me:secret@a:1", "redis", "password_file"),
        (RedisConfig(url="redis://a", username="me"), "redis.username", "Set `password_file`"),
        (RedisConfig(url="redis://a", ca_file="x"), "redis.ca_file", "rediss"),
        (RedisConfig(url="rediss://a", cert_file="x"), "redis.cert_file", "together"),
        (
            RedisConfig(url="redis://a", sentinel_password_file="x"),
            "redis.sentinel_password_file",
            "does not name Sentinels",
        ),
    ],
)
def test_a_wrong_address_names_its_key_and_what_to_write(address: str | RedisConfig, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        parse_redis(address, "redis")
    assert raised.value.where == key
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@a:1/0?password=secret", "redis://a:1/0"),
        (f"{CLUSTER}/", f"{CLUSTER}/"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_a_message_shows_no_password(url: str, shown: str) -> None:
    assert shown_address(RedisConfig(url=url)) == shown_address(url) == shown


@pytest.mark.parametrize("address", ["redis+cluster://a:1", "{url: 'redis+cluster://a:1'}"])
def test_jobs_on_a_cluster_are_refused_at_start(tmp_path: Path, address: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"jobs:\n  redis: {address}\n")
    with pytest.raises(ConfigError, match=r"jobs.redis.*Jobs do not run on a Redis Cluster.*redis\+sentinel"):
        load_config(path, Flags())


def test_a_shared_cluster_has_no_jobs() -> None:
    """The other parts may use it: jobs need a Redis of their own then."""
    assert with_shared_redis(JobsConfig(), CLUSTER).redis == ""
    assert with_shared_redis(JobsConfig(), SENTINELS).redis == SENTINELS
    assert with_shared_redis(JobsConfig(redis="redis://j"), CLUSTER).redis == "redis://j"


def test_acceptance_waits_for_a_replica_where_there_are_sentinels() -> None:
    assert JobsConfig(redis="redis://a").replicas_to_wait_for == 0
    assert JobsConfig(redis=SENTINELS).replicas_to_wait_for == 1
    assert JobsConfig(redis=SENTINELS, replicas=2).replicas_to_wait_for == 2
    assert JobsConfig(redis="redis://a", replicas=1).replicas_to_wait_for == 1


def test_files_are_relative_to_the_configuration_and_a_flag_changes_the_url_alone(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("redis: {url: 'rediss://a', username: me, password_file: secret, ca_file: ca.pem}\n")
    config = load_config(path, Flags(redis="rediss://b")).redis
    assert isinstance(config, RedisConfig)
    assert (config.url, config.username) == ("rediss://b", "me")
    assert (config.password_file, config.ca_file) == (str(tmp_path / "secret"), str(tmp_path / "ca.pem"))
    assert with_url("", "redis://c") == "redis://c"


def test_an_unknown_key_of_a_redis_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("redis: {url: 'redis://a', pasword_file: x}\n")
    with pytest.raises(ConfigError, match="pasword_file"):
        load_config(path, Flags())


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    from causeway_server.cloud_pool.redis.connect import open_redis

    address = RedisConfig(url="redis://a", password_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent") as raised:
        open_redis(address, "cache.redis")
    assert raised.value.where == "cache.redis.password_file"

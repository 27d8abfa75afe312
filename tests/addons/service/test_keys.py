"""Keys, the list of clients, and who may be served where."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from gatespace.addons.service import keys
from gatespace.errors import UsageError


def test_a_pair_of_keys(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = keys.write_keys(tmp_path / "new" / "server.one")
    finally:
        os.umask(before)
    assert [file.name for file in files] == ["server.one.key", "server.one.pub"]
    assert stat.S_IMODE(files.secret.stat().st_mode) == 0o600
    pair = keys.read_pair(files.secret)
    assert pair.public == zmq.curve_public(pair.secret) == keys.read_public(files.public)
    assert keys.read_public(pair.public.decode()) == pair.public
    assert pair.secret.decode() not in repr(pair)
    secret = files.secret.read_bytes()
    with pytest.raises(UsageError, match="not written over"):
        keys.write_keys(tmp_path / "new" / "server.one")
    files.secret.unlink()
    with pytest.raises(UsageError, match="not written over"):  # the public one alone
        keys.write_keys(tmp_path / "new" / "server.one")
    assert not files.secret.exists()
    assert keys.read_pair(keys.write_keys(tmp_path / "other").secret).secret + b"\n" != secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read(mode: int, tmp_path: Path) -> None:
    file = keys.write_keys(tmp_path / "a").secret
    file.chmod(mode)
    with pytest.raises(UsageError, match="owner only") as caught:
        keys.read_pair(file)
    assert "chmod 600" in caught.value.instead


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b'"' * 40, b"\xff" * 40, b"x" * 2_000_000])
def test_files_that_are_no_keys(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.key"
    file.write_bytes(content)
    file.chmod(0o600)
    for read in (keys.read_pair, keys.read_public, keys.read_allowed):
        with pytest.raises(UsageError) as caught:
            read(file)
        assert content.decode("latin-1")[:40] not in str(caught.value) or not content
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UsageError):
            keys.read_pair(missing)


def test_the_list_of_clients(tmp_path: Path) -> None:
    pairs = [keys.read_pair(keys.write_keys(tmp_path / name).secret) for name in "abc"]
    public = [pair.public.decode() for pair in pairs]
    # Z85 has the character that comments begin with.
    odd = "#" + public[2][1:]
    file = tmp_path / "allowed"
    file.write_text(f"# who may come in\n\n{public[0]}\n  {public[1]}  the other machine\n#\n{odd}\n")
    assert keys.read_allowed(file) == {key.encode() for key in (public[0], public[1], odd)}
    assert keys.read_allowed(tmp_path) == {key.encode() for key in public}
    file.write_text(f"{public[0]}\nnonsense\n")
    with pytest.raises(UsageError, match="not a key") as caught:
        keys.read_allowed(file)
    assert "line 2" in str(caught.value)
    file.write_text("# nobody\n")
    with pytest.raises(UsageError, match="allows no client"):
        keys.read_allowed(file)


def test_both_sides(tmp_path: Path) -> None:
    mine, yours = keys.write_keys(tmp_path / "mine"), keys.write_keys(tmp_path / "yours")
    served = keys.server_keys(mine.secret, yours.public)
    assert served.callback(keys.DOMAIN, keys.read_public(yours.public))
    assert not served.callback(keys.DOMAIN, keys.read_public(mine.public))
    assert not served.callback("another", keys.read_public(yours.public))
    assert keys.client_keys(None, None) is None
    found = keys.client_keys(yours.secret, str(mine.public))
    assert found == keys.client_keys(str(yours.secret), served.pair.public.decode())
    assert found is not None
    assert found.server == served.pair.public
    for half in ((yours.secret, None), (None, mine.public)):
        with pytest.raises(UsageError, match="needs"):
            keys.client_keys(*half)


@pytest.mark.parametrize(
    ("address", "tcp", "loopback"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555", True),
        ("zmq://127.1.2.3:0", "tcp://127.1.2.3:0", True),
        ("tcp://localhost:*", "tcp://127.0.0.1:0", True),
        ("tcp://[::1]:5", "tcp://[::1]:5", True),
        ("tcp://0.0.0.0:5", "tcp://0.0.0.0:5", False),
        ("tcp://*:5", "tcp://0.0.0.0:5", False),
        ("tcp://[::]:5", "tcp://[::]:5", False),
        ("tcp://10.0.0.7:5", "tcp://10.0.0.7:5", False),
        ("tcp://eth0:5", "tcp://eth0:5", False),
        ("tcp://127.0.0.1.example.org:5", "tcp://127.0.0.1.example.org:5", False),
    ],
)
def test_without_keys_on_this_machine_only(address: str, tcp: str, loopback: bool) -> None:
    assert keys.check_bind(address, secured=True).tcp == tcp
    if loopback:
        assert keys.check_bind(address, secured=False).tcp == tcp
    else:
        with pytest.raises(UsageError, match="this machine only") as caught:
            keys.check_bind(address, secured=False)
        assert "keygen" in caught.value.instead


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5",
        "ipc:///tmp/x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "tcp://a b:5",
        "tcp://h:5;tcp://g:6",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="not the address"):
        keys.check_bind(address, secured=True)
    with pytest.raises(UsageError, match="address"):
        keys.service_address(address)


@pytest.mark.parametrize(
    "address", ["zmq://*:5", "zmq://h:*", "zmq://h:0", "zmq://h:5/model", "vllm://h:5", "tcp://h:5"]
)
def test_clients_need_a_real_address(address: str) -> None:
    with pytest.raises(UsageError, match="address"):
        keys.service_address(address)
    assert keys.service_address("zmq://host-1.example.org:80").tcp == "tcp://host-1.example.org:80"

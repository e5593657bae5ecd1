"""The host tier in a file: private, locked, sized at once, and of no use to whoever comes after."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_tier_cases import B, D, H, create, ids, kv

from nano_oasis.memory.formats import HostTierError
from nano_oasis.memory.host_file import FILE_NAME


def test_the_file_is_private_locked_preallocated_and_removed(tmp_path):
    path = tmp_path / FILE_NAME
    with create(path=str(tmp_path)) as tier:  # a folder
        status = path.stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == tier.nbytes and status.st_blocks * 512 >= tier.nbytes
        assert tier.discarded is None
        with pytest.raises(HostTierError, match="in use by another engine"):
            create(path=str(path))
        tier.store(ids(3), *kv(1))  # the refused one did no harm
        assert path.exists()
    assert not path.exists()


CHILD = """
import sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from host_tier_cases import create, kv
tier = create(path={path!r})
keys, values = kv(12)
while True:  # write-through, until killed
    tier.store(torch.arange(12), keys, values)
    print("stored", flush=True)
"""


def test_killed_during_write_through_then_clean(tmp_path):
    path = tmp_path / "tier.kv"
    code = textwrap.dedent(CHILD.format(tests=str(Path(__file__).parent), path=str(path)))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "stored\n"
            with pytest.raises(HostTierError, match="in use by another engine"):
                create(path=str(path))
        finally:
            child.send_signal(signal.SIGKILL)
    left = path.read_bytes()
    assert kv(12)[0][1, 4].numpy().tobytes() in left  # the dead process did leave KV behind
    for blocks, reason in ((12, "not cleanly closed by session"), (7, "another version or geometry")):
        path.write_bytes(left)
        with create(blocks, path=str(path)) as tier:
            assert reason in tier.discarded
            assert not any(path.read_bytes()[4096:])  # none of it is there now
            out = [torch.ones(blocks, B, H, D), torch.ones(blocks, B, H, D)]
            tier.load(1, torch.arange(blocks), *out)
            assert not out[0].any() and not out[1].any()
        assert not path.exists()


def test_a_damaged_header_of_ours_is_discarded(tmp_path):
    path = tmp_path / "tier.kv"
    path.write_bytes(b"nano_oasis host KV tier\n{broken" + b"\xff" * 9000)
    with create(path=str(path)) as tier:
        assert "damaged" in tier.discarded
        assert not any(path.read_bytes()[4096:])


def test_a_foreign_file_is_refused_and_not_touched(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"important")
    with pytest.raises(HostTierError, match="is not a host KV file; move it"):
        create(path=str(path))
    assert path.read_bytes() == b"important"


def test_paths_that_cannot_be_files(tmp_path):
    with pytest.raises(HostTierError, match=r"missing/tier\.kv: cannot open .*No such file"):
        create(path=str(tmp_path / "missing" / "tier.kv"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostTierError, match="not a plain file"):
        create(path=str(tmp_path / "fifo"))


def test_disk_too_small_names_both_sizes_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "tier.kv"
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    with pytest.raises(HostTierError, match=r"tier\.kv: .* needs \d+ bytes .* has 12288 .* --host-kv-memory"):
        create(path=str(path))
    assert not path.exists()


def test_disk_that_fills_up_while_allocating(tmp_path, monkeypatch):
    """A real refusal by the system (a file size limit), then the error of a full disk."""
    path = tmp_path / "tier.kv"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(HostTierError, match=r"tier\.kv: File too large"):
            create(path=str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostTierError, match=r"tier\.kv: No space left on device"):
        create(path=str(path))
    assert not path.exists()


def test_a_file_cut_short_while_in_use_is_an_error_not_a_crash(tmp_path):
    path = tmp_path / "tier.kv"
    with create(path=str(path)) as tier:
        os.truncate(path, 4096)
        out = [torch.empty(1, B, H, D), torch.empty(1, B, H, D)]
        for call in (
            lambda: tier.store(ids(0), *kv(1)),
            lambda: tier.store_layer(0, ids(0), *out),
            lambda: tier.load(0, ids(0), *out),
            lambda: tier.load_into(0, ids(0), ids(0), *out),
        ):
            with pytest.raises(HostTierError, match=r"tier\.kv: .* 4096 bytes instead of"):
                call()

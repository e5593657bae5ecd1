"""The comparison with other servers: the command lines, and a comparison of two servers of a tiny model.

Owns: benchmarks/peers. Must not know: speed, the peers themselves, which are not installed here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from make_checkpoints import make_hf
from make_tokenizers import write_bpe_folder

PEERS = Path(__file__).parent.parent / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch):
    """The modules compare and servers, as the script sees them."""
    monkeypatch.syspath_prepend(str(PEERS))
    import compare
    import servers

    yield compare, servers
    for name in ("compare", "servers"):
        del sys.modules[name]


def test_every_server_is_told_port_and_room(peers):
    _, servers = peers
    for name, server in servers.SERVERS.items():
        words = server.command(8123, servers.Load(streams=3, tokens=500))
        assert "8123" in words and all(isinstance(w, str) for w in words), name
    assert "1536" in servers.SERVERS["llamacpp-f32"].command(8123, servers.Load(3, 500))  # 3 of 512


def test_our_own_command_lines_are_understood(peers):
    from nano_oasis.serve import build_parser

    _, servers = peers
    for name, server in servers.SERVERS.items():
        if name.startswith("ours"):
            args = build_parser().parse_args(server.command(8123, servers.Load(3, 500))[3:])
            assert (args.port, args.max_num_seqs, args.max_model_len) == (8123, 3, 500)


def test_a_peer_that_is_not_there_is_named(peers, monkeypatch, capsys):
    compare, servers = peers
    missing = servers.Server(lambda port, load: ["false"], Path("/nowhere/peer"))
    monkeypatch.setitem(servers.SERVERS, "missing", missing)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--servers", "missing"])
    assert compare.main() == 1
    assert "missing needs /nowhere/peer" in capsys.readouterr().err


def test_a_peer_that_dies_is_named(peers, monkeypatch, capsys):
    compare, servers = peers
    monkeypatch.setitem(servers.SERVERS, "dead", servers.Server(lambda port, load: ["false"]))
    monkeypatch.setattr(sys, "argv", ["compare.py", "--servers", "dead"])
    assert compare.main() == 1
    assert "dead ended before it was ready" in capsys.readouterr().err


def test_two_servers_take_turns_and_are_gone_afterwards(peers, tmp_path, monkeypatch, capsys):
    compare, servers = peers
    make_hf("llama", tmp_path, vocab_size=640)
    write_bpe_folder(tmp_path)

    def command(port, load):
        words = servers.SERVERS["ours"].command(port, load)
        return [*words, "--model", str(tmp_path), "--num-device-blocks", "64"]

    pids = []
    wait = compare.Running._wait
    monkeypatch.setattr(compare.Running, "_wait", lambda self: pids.append(self.process.pid) or wait(self))
    for name in ("a", "b"):
        monkeypatch.setitem(servers.SERVERS, name, servers.Server(command))
    out = tmp_path / "out.json"
    words = ["--servers", "a,b", "--streams", "2", "--input-len", "10", "--output-len", "4", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--output", str(out)])
    assert compare.main() == 0
    shown = capsys.readouterr()
    lines = [x.split(":")[0] for x in shown.err.splitlines() if x.startswith("pass")]
    assert lines == [f"pass {i}, {name}" for i in range(3) for name in ("a", "b")]
    assert "2 streams after 10 words" in shown.out
    figures = json.loads(out.read_text())
    assert [f["server"] for f in figures["results"]] == ["a", "b"]
    assert all(len(f["passes"]) == 3 and f["passes"][0]["output_tokens"] == 8 for f in figures["results"])
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

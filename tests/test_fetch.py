"""Fetching from a stand-in hub on this machine: whole, cut, wrong, refused, offline, and the draft head by ranges."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlx.core as mx
import pytest
from huggingface_hub import constants

import engine.fetch as fetching
from engine.checkpoint import MTP_FILE, CheckpointError, inspect, load
from engine.config import ModelConfig
from engine.fetch import FetchError, cached, fetch, main
from engine.synthetic import make_weights, tiny_config, write_checkpoint

REPO, RAW = "someone/tiny-4bit", "someone/tiny"
COMMIT = "38740b847e4c" + "0" * 28
TINY = tiny_config(2, hidden_size=128, experts=8)


class Hub:
    """A hub with a few repositories that can misbehave on demand."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refuse = 0  # status for everything
        self.cut: dict[str, int] = {}  # bytes to send before closing the connection, by file, once
        self.listed: dict[str, int] = {}  # false sizes in the file list
        self.ranges = True
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format, *args):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        class Server(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                """A client that hangs up is part of these tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def sent(self, name: str) -> list[str | None]:
        """Ranges of the GET requests for a file."""
        return [span for verb, path, span, _ in self.asked if verb == "GET" and path.endswith(name)]

    def answer(self, to: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(to.path).path)
        self.asked.append((to.command, path, to.headers.get("Range"), to.headers.get("Authorization")))
        parts = path.strip("/").split("/")
        if self.refuse:
            return self.reply(to, self.refuse, b"{}", body)
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = self.repos.get(repo)
        if files is None:
            return self.reply(to, 404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        if parts[0] != "api":
            return self.file(to, files, parts[-1], body)
        if parts[4] == "commits":
            entry = {"id": COMMIT, "title": "", "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
            return self.reply(to, 200, json.dumps([entry]).encode(), body)
        if parts[4] == "revision" and parts[5] in (COMMIT, "main"):
            siblings = [self.sibling(name, data) for name, data in files.items()]
            info = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self.reply(to, 200, json.dumps(info).encode(), body)
        return self.reply(to, 404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})

    def sibling(self, name: str, data: bytes) -> dict:
        made = {"rfilename": name, "size": self.listed.get(name, len(data)), "blobId": "0" * 40}
        if name.endswith(".safetensors"):
            made["lfs"] = {"size": made["size"], "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
        return made

    def file(self, to: BaseHTTPRequestHandler, files: dict[str, bytes], name: str, body: bool) -> None:
        if name not in files:
            return self.reply(to, 404, b"", body, {"X-Error-Code": "EntryNotFound"})
        data = files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        span = to.headers.get("Range")
        status = 200
        if span and self.ranges:
            first, last = (int(x or len(data) - 1) for x in span.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            data, status = data[first : last + 1], 206
        self.reply(to, status, data, body, headers, self.cut.pop(name, None) if body else None)

    @staticmethod
    def reply(to, status, data, body, headers=None, cut=None) -> None:
        to.send_response(status)
        for key, value in (headers or {}).items():
            to.send_header(key, value)
        to.send_header("Content-Length", str(len(data)))
        to.end_headers()
        if body:
            to.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            to.close_connection = True


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """A packed checkpoint without a draft head, and the raw one it came from, as files in memory."""
    folder = tmp_path_factory.mktemp("hub")
    weights = make_weights(TINY, 5, mtp=True)
    write_checkpoint(folder / "mlx", TINY, weights, shard_bytes=200_000)
    write_checkpoint(folder / "raw", TINY, weights, layout="hf", mtp=True, shard_bytes=700_000)
    made = {
        name: {f.name: f.read_bytes() for f in (folder / at).iterdir()} for name, at in ((REPO, "mlx"), (RAW, "raw"))
    }
    made[REPO] |= {"README.md": b"# tiny", "picture.png": bytes(100)}
    return made


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    made = Hub()
    made.repos = {name: dict(files) for name, files in repositories.items()}
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "MODEL", REPO)
    monkeypatch.setattr(fetching, "MTP_MODEL", RAW)
    monkeypatch.setattr(fetching, "PINNED", {REPO: COMMIT[:12], RAW: COMMIT[:8]})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield made
    made.server.shutdown()
    made.server.server_close()


def shard(hub: Hub, repo: str = REPO, at: int = 1) -> str:
    return sorted(name for name in hub.repos[repo] if name.endswith(".safetensors"))[at]


def partials(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("models--*/blobs/*.partial"))


# -- the model -----------------------------------------------------------------------------------


def test_whole_checkpoint_lands_in_the_cache(hub, tmp_path, capsys):
    assert cached() is None
    assert main([]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "cache" / "models--someone--tiny-4bit" / "snapshots" / COMMIT
    assert load(path).info["layout"] == "mlx"
    wanted = {name for name in hub.repos[REPO] if not name.endswith((".md", ".png"))}
    assert {f.name for f in path.iterdir()} == wanted
    assert cached() == path and not partials(tmp_path)


def test_a_copy_that_is_there_asks_nobody(hub):
    path = fetch()
    hub.asked.clear()
    hub.server.shutdown()
    assert fetch() == path and fetch(REPO, COMMIT) == path and fetch(REPO, COMMIT[:7]) == path
    assert hub.asked == []


def test_main_branch_by_name(hub):
    path = fetch(REPO, "main")
    assert cached(REPO, "main") == path
    assert cached(REPO, "other") is None


def test_a_damaged_copy_is_no_copy(hub):
    path = fetch()
    target = (path / shard(hub)).resolve()
    with target.open("r+b") as file:
        file.truncate(1000)
    assert cached() is None
    fetch()
    assert cached() == path and target.stat().st_size == len(hub.repos[REPO][shard(hub)])


def test_a_cut_connection_goes_on_from_there(hub, tmp_path):
    name = shard(hub)
    hub.cut[name] = 30_000
    assert cached() is None and load(fetch()).info["layout"] == "mlx"
    size = len(hub.repos[REPO][name])
    assert hub.sent(name) == [f"bytes=0-{size - 1}", f"bytes=30000-{size - 1}"]


def test_a_stopped_fetch_goes_on_in_the_next(hub, tmp_path, monkeypatch):
    name = shard(hub)
    size = len(hub.repos[REPO][name])
    monkeypatch.setattr(fetching, "_ATTEMPTS", 1)
    hub.cut[name] = 30_000
    with pytest.raises(FetchError, match="goes on from where it stopped"):
        fetch()
    assert 30_000 in [p.stat().st_size for p in partials(tmp_path)]
    hub.asked.clear()
    fetch()
    assert hub.sent(name) == [f"bytes=30000-{size - 1}"]
    assert not partials(tmp_path)


def test_changed_bytes_are_found_by_their_hash(hub, tmp_path):
    name = shard(hub)
    fetch()
    shutil.rmtree(tmp_path / "cache")
    blobs = tmp_path / "cache" / "models--someone--tiny-4bit" / "blobs"
    blobs.mkdir(parents=True)
    wrong = blobs / f"{hashlib.sha256(hub.repos[REPO][name]).hexdigest()}.partial"
    wrong.write_bytes(bytes(1000))
    with pytest.raises(FetchError, match=rf"{name}: SHA-256 is .*fetch again"):
        fetch()
    assert not wrong.exists()
    assert fetch() == cached()


def test_sizes_that_disagree_with_the_list(hub):
    name = shard(hub)
    hub.listed[name] = len(hub.repos[REPO][name]) + 10
    with pytest.raises(FetchError, match=rf"{name}: has [\d,]+ bytes, the hub's list says [\d,]+"):
        fetch()


def test_an_index_that_promises_more_than_the_shards_hold(hub):
    index = json.loads(hub.repos[REPO]["model.safetensors.index.json"])
    index["metadata"]["total_size"] *= 2
    hub.repos[REPO]["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(FetchError, match=r"promises [\d,]+ bytes of tensors"):
        fetch()
    assert hub.sent(shard(hub)) == []


def test_an_index_that_names_an_absent_shard(hub):
    name = shard(hub)
    del hub.repos[REPO][name]
    with pytest.raises(FetchError, match=f"names {name}, which the repository does not hold"):
        fetch()


def test_not_enough_disk(hub, monkeypatch):
    needed = sum(len(d) for n, d in hub.repos[REPO].items() if not n.endswith((".md", ".png")))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed - 1))
    with pytest.raises(FetchError, match=f"needs {needed:,} bytes, .* has {needed - 1:,} free; .*HF_HOME"):
        fetch()
    assert hub.sent(shard(hub)) == []


def test_a_disk_that_fills_up_on_the_way(hub, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/blob")

    monkeypatch.setattr(fetching, "_pull", full)
    assert main([]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "fetch: /cache/blob: No space left on device; set HF_HOME"


def test_bytes_that_are_there_need_no_room(hub, tmp_path, monkeypatch):
    name = shard(hub)
    monkeypatch.setattr(fetching, "_ATTEMPTS", 1)
    hub.cut[name] = 30_000
    with pytest.raises(FetchError, match="goes on"):
        fetch()
    left = fetching._missing_bytes(fetching._store(REPO), fetching._listing(REPO, COMMIT).values(), COMMIT)
    total = sum(len(d) for n, d in hub.repos[REPO].items() if not n.endswith((".md", ".png")))
    assert 0 < left <= total - 30_000


def test_a_server_without_ranges(hub):
    hub.ranges = False
    with pytest.raises(FetchError, match="does not send byte ranges"):
        fetch()


def test_another_fetch_at_work(hub, tmp_path):
    name = shard(hub)
    blobs = tmp_path / "cache" / "models--someone--tiny-4bit" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{hashlib.sha256(hub.repos[REPO][name]).hexdigest()}.partial").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another fetch is writing it"):
            fetch()


def test_what_arrives_must_be_a_checkpoint(hub):
    document = json.loads(hub.repos[REPO]["config.json"])
    hub.repos[REPO]["config.json"] = json.dumps(document | {"model_type": "llama"}).encode()
    with pytest.raises(CheckpointError, match="llama"):
        fetch()


# -- refusals ------------------------------------------------------------------------------------


def one_line(capsys, *parts: str) -> None:
    text = capsys.readouterr().err.strip()
    assert "\n" not in text and text.startswith("fetch: "), text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("status, hint", [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (503, "same command again")])
def test_a_hub_that_refuses(hub, capsys, status, hint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hub.refuse = status
    assert main([]) == 2
    one_line(capsys, REPO, hint)


def test_no_such_repository(hub, capsys):
    assert main(["--model", "someone/nothing"]) == 2
    one_line(capsys, "someone/nothing", "no such repository", "HF_TOKEN")


@pytest.mark.parametrize("revision, part", [("abcdef012345", "has no commit abcdef012345"), ("v9", "no such revision")])
def test_no_such_revision(hub, capsys, revision, part):
    assert main(["--model", f"{REPO}@{revision}"]) == 2
    one_line(capsys, REPO, part, "REVISION")


def test_no_repository_name(hub, capsys):
    assert main(["--model", "a/b/c"]) == 2
    one_line(capsys, "a/b/c", "OWNER/NAME")


def test_a_repository_without_weights(hub, capsys):
    hub.repos["someone/gguf"] = {"model.gguf": b"GGUF", "config.json": b"{}"}
    assert main(["--model", "someone/gguf"]) == 2
    one_line(capsys, "someone/gguf", "no *.safetensors")


def test_offline_without_a_copy(hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([]) == 2
    one_line(capsys, "HF_HUB_OFFLINE", "no complete copy")
    assert hub.asked == []


def test_offline_with_a_copy(hub, monkeypatch):
    path = fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == path


def test_nobody_answers(hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main([]) == 2
    one_line(capsys, "cannot reach http://127.0.0.1:9")


def test_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch()
    sent = {auth for verb, path, _, auth in hub.asked if path.endswith(".safetensors") and verb == "GET"}
    assert sent == {"Bearer hf_secret"}


def test_settings_come_from_the_environment(hub, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment.pop("HF_HUB_CACHE", None)
    call = [sys.executable, "-m", "engine", "fetch", "--model", f"{REPO}@{COMMIT}"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip().splitlines()[-1])
    assert path.is_relative_to(tmp_path / "home") and inspect(path).layout == "mlx"


# -- the draft head ------------------------------------------------------------------------------


def test_draft_head_is_packed_like_the_trunk(hub):
    folder = fetch()
    assert not inspect(folder).has_mtp
    hub.asked.clear()
    assert fetch(what="mtp") == folder
    held = load(folder)
    head, source = held.weights.mtp, make_weights(TINY, 5, mtp=True).mtp
    assert head is not None and source is not None
    assert held.info["mtp_gains"] == "as stored"
    assert mx.array_equal(head.norm_hidden, source.norm_hidden)  # shifted back exactly once
    assert head.layer.experts.gate.bits == 8 and head.layer.experts.shared_gate.bits == 8
    assert head.fc.bits == 4 and head.layer.experts.up_proj.bits == 4
    dense = source.layer.experts.up_proj.dense(mx.bfloat16)
    for got, wanted in zip(
        (head.layer.experts.up_proj.weight, head.layer.experts.up_proj.scales), mx.quantize(dense, 64, 4)
    ):
        assert mx.array_equal(got, wanted)
    assert sorted(f.name for f in folder.iterdir() if f.name.startswith("mtp")) == [MTP_FILE]


def test_draft_head_reads_only_its_own_bytes(hub):
    folder = fetch()
    hub.asked.clear()
    fetch(what="mtp")
    spans = [s for verb, path, s, _ in hub.asked if verb == "GET" and path.endswith(".safetensors")]
    assert all(spans)
    read = sum(int(s.split("-")[1]) - int(s.removeprefix("bytes=").split("-")[0]) + 1 for s in spans if s)
    head = sum(a.nbytes for n, a in load_raw(hub).items() if n.startswith("mtp."))
    assert head < read < head + 30_000
    hub.asked.clear()
    assert fetch(what="mtp") == folder and hub.asked == []


def load_raw(hub: Hub) -> dict[str, mx.array]:
    arrays = {}
    for name, data in hub.repos[RAW].items():
        if name.endswith(".safetensors"):
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            for key, entry in header.items():
                if key != "__metadata__":
                    arrays[key] = mx.zeros(entry["shape"], mx.bfloat16)
    return arrays


def test_draft_head_goes_on_after_a_cut(hub, monkeypatch):
    folder = fetch()
    name = shard(hub, RAW, -1)
    holding = {
        f
        for k, f in json.loads(hub.repos[RAW]["model.safetensors.index.json"])["weight_map"].items()
        if k.startswith("mtp.")
    }
    assert name in holding
    monkeypatch.setattr(fetching, "_ATTEMPTS", 1)
    pull = fetching._pull
    calls = []

    def stumble(url, sink, *rest):
        calls.append(url)
        if len(calls) == 5:
            hub.cut[url.rsplit("/", 1)[1]] = 7
        return pull(url, sink, *rest)

    monkeypatch.setattr(fetching, "_pull", stumble)
    with pytest.raises(FetchError, match="goes on from where it stopped"):
        fetch(what="mtp")
    left = (folder / "mtp.partial").stat().st_size
    assert left > 0 and not (folder / MTP_FILE).exists()
    monkeypatch.setattr(fetching, "_pull", pull)
    hub.asked.clear()
    fetch(what="mtp")
    read = sum(
        int(s.split("-")[1]) - int(s.removeprefix("bytes=").split("-")[0]) + 1
        for verb, path, s, _ in hub.asked
        if verb == "GET" and path.endswith(".safetensors") and s
    )
    head = sum(a.nbytes for n, a in load_raw(hub).items() if n.startswith("mtp."))
    assert read < head + 30_000 - left / 2
    again = load(folder).weights.mtp
    assert again is not None and mx.array_equal(again.norm, make_weights(TINY, 5, mtp=True).mtp.norm)


def test_draft_head_without_a_trunk(hub, capsys):
    assert main(["mtp"]) == 2
    one_line(capsys, REPO, "python -m engine fetch")


def test_draft_head_into_a_folder(hub, tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "mine", TINY, seed=5, bits=None)
    assert main(["mtp", "--into", str(folder)]) == 0
    head = load(folder).weights.mtp
    assert head is not None and head.fc.bits is None  # a dense trunk gets a dense head


def test_draft_head_of_another_size_is_refused(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "mine", tiny_config(2, hidden_size=64, experts=8), seed=5)
    with pytest.raises(CheckpointError, match=r"mtp.* tensor mtp\..* shape \[8, 128, 128\]"):
        fetch(what="mtp", into=folder)
    assert not (folder / MTP_FILE).exists()


def test_a_repository_without_a_draft_head(hub, capsys, monkeypatch):
    fetch()
    capsys.readouterr()
    assert main(["mtp", "--model", REPO]) == 2
    one_line(capsys, "has no mtp.* tensors", RAW)


def test_real_draft_head_takes_475_megabytes():
    real = ModelConfig()
    wide, hidden = 512, real.hidden_size
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (8192, hidden),
        "layers.0.self_attn.k_proj": (512, hidden),
        "layers.0.self_attn.v_proj": (512, hidden),
        "layers.0.self_attn.o_proj": (hidden, 4096),
        "layers.0.mlp.gate": (256, hidden),
        "layers.0.mlp.shared_expert_gate": (1, hidden),
        "layers.0.mlp.switch_mlp.gate_proj": (256, wide, hidden),
        "layers.0.mlp.switch_mlp.up_proj": (256, wide, hidden),
        "layers.0.mlp.switch_mlp.down_proj": (256, hidden, wide),
        "layers.0.mlp.shared_expert.gate_proj": (wide, hidden),
        "layers.0.mlp.shared_expert.up_proj": (wide, hidden),
        "layers.0.mlp.shared_expert.down_proj": (hidden, wide),
    }
    total = 2 * (5 * hidden + 2 * 256)  # gains
    for name, shape in shapes.items():
        # Unevaluated: only the shapes are wanted.
        parts = fetching._pack(f"mtp.{name}.weight", mx.zeros(shape, mx.bfloat16))
        total += sum(a.nbytes for a in parts.values())
    assert total == 475_389_056

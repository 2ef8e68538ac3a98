"""Published files, from a server that resumes, breaks off, or sends the wrong thing; and from folders without a network."""
import fcntl
import hashlib
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bump.experiments import Input
from bump.files import Published, download, fetch, find_published
from bump.runner import fetch_inputs

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT, with ranges; what else it does is told by the path."""

    requests = []  # (path, first byte asked for)

    def do_GET(self):
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        first = not any(path == self.path for path, _ in self.requests)
        self.requests.append((self.path, start))
        body = b"<!DOCTYPE html><title>Sign in</title>" if "page" in self.path else CONTENT
        if "gone" in self.path or start > len(CONTENT) - 1:
            self.send_error(404 if "gone" in self.path else 416)
            return
        if "changed" in self.path:
            body = CONTENT[:-1] + b"x"
        if "whole" in self.path:  # ignores ranges
            start = 0
        self.send_response(206 if start else 200)
        if "unsized" not in self.path:
            self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        breaks = "unsized" in self.path or "never" in self.path or ("breaks" in self.path and first)
        self.wfile.write(body[start:300_000 if breaks else None])
        if breaks:
            self.close_connection = True

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A function from a path on the server to the published file, which is kept in an empty folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Server, "requests", [])
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    yield lambda path, sha256=SHA256: Published("net.bin", f"http://127.0.0.1:{server.server_port}/{path}", 1, sha256)
    server.shutdown()
    server.server_close()


def test_a_download_is_verified_and_done_once(serve, tmp_path):
    assert fetch(serve("good")).read_bytes() == CONTENT
    assert fetch(serve("good")) == tmp_path / "net.bin" and len(Server.requests) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["net.bin"]


def test_a_broken_connection_is_taken_up(serve):
    assert fetch(serve("breaks")).read_bytes() == CONTENT
    assert [start for _, start in Server.requests] == [0, 300_000]


def test_an_interrupted_download_goes_on_in_the_next_run(serve, tmp_path):
    (tmp_path / ".net.bin.partial").write_bytes(CONTENT[:500_000])
    assert fetch(serve("good")).read_bytes() == CONTENT and Server.requests == [("/good", 500_000)]


def test_one_that_was_only_not_renamed_is_not_asked_for_again(serve, tmp_path):
    (tmp_path / ".net.bin.partial").write_bytes(CONTENT)
    assert fetch(serve("good")).read_bytes() == CONTENT and Server.requests == []


def test_a_server_without_ranges(serve, tmp_path):
    (tmp_path / ".net.bin.partial").write_bytes(CONTENT[:500_000])
    assert fetch(serve("whole")).read_bytes() == CONTENT


def test_without_a_checksum_a_download_starts_afresh(serve, tmp_path):
    (tmp_path / ".net.bin.partial").write_bytes(b"of another version")
    assert fetch(serve("good", "")).read_bytes() == CONTENT and Server.requests == [("/good", 0)]


@pytest.mark.parametrize("path, sha256", [("changed", SHA256), ("page", SHA256), ("page", ""), ("unsized", SHA256), ("unsized", "")])
def test_something_else_is_not_kept(serve, tmp_path, path, sha256):
    with pytest.raises(ValueError, match=f"what http://127.0.0.1:[0-9]+/{path} sent is not net.bin .*nothing was kept"):
        fetch(serve(path, sha256))
    assert list(tmp_path.iterdir()) == []


def test_a_partial_file_of_something_else_is_given_up(serve, tmp_path):
    """As long as the whole, so that the server has nothing to add."""
    (tmp_path / ".net.bin.partial").write_bytes(CONTENT[::-1])
    with pytest.raises(ValueError, match="is not net.bin .*nothing was kept"):
        fetch(serve("good"))
    assert list(tmp_path.iterdir()) == [] and fetch(serve("good")).read_bytes() == CONTENT


def test_two_processes_do_not_write_to_one_file(serve, tmp_path):
    with open(tmp_path / ".net.bin.partial", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(CONTENT[:1000])
        other.flush()
        for sha256 in (SHA256, ""):
            with pytest.raises(OSError, match="another process is downloading net.bin; wait for it"):
                fetch(serve("good", sha256))
    assert (tmp_path / ".net.bin.partial").read_bytes() == CONTENT[:1000] and Server.requests == []
    assert fetch(serve("good")).read_bytes() == CONTENT


def test_a_search_path_that_names_a_file(serve, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path / "file"))
    monkeypatch.setattr("bump.files.cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(NotADirectoryError, match="file is a file; BUMP_WEIGHTS must name folders"):
        fetch(serve("good"))


@pytest.mark.parametrize("path, kind, kept", [("gone", OSError, []), ("never-ends", ConnectionError, [(".net.bin.partial", 300_000)])])
def test_what_does_not_arrive_is_no_file(serve, tmp_path, path, kind, kept):
    with pytest.raises(OSError, match="net.bin could not be downloaded from http://.* bytes have arrived; run again to go on") as caught:
        download(serve(path))
    assert type(caught.value) is kind
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == kept


def test_without_a_checksum_nothing_is_promised(serve):
    with pytest.raises(ConnectionError, match="bytes have arrived; run again$"):
        download(serve("never-ends", ""))


@pytest.fixture
def preset_with(monkeypatch):
    """A function that lets every preset read these published files and nothing else."""
    def replaced(*items):
        inputs = [Input(f"file {i}", item.url, lambda item=item: find_published(item), item.sha256, item) for i, item in enumerate(items)]
        monkeypatch.setattr("bump.runner.preset_inputs", lambda preset: inputs)
    return replaced


def test_make_fetch_gets_what_it_can_and_says_what_it_cannot(serve, preset_with, capsys):
    private = Published("third.bin", "", 1, source="its authors")
    preset_with(serve("page"), replace(serve("gone"), name="lost.bin"), replace(serve("good"), name="second.bin"), private)
    with pytest.raises(SystemExit, match="lacks 3 inputs"):
        fetch_inputs("quick")
    told = capsys.readouterr().out
    assert "sent is not net.bin" in told and "third.bin (1 MB" in told and "to be had from its authors" in told
    assert "lost.bin could not be downloaded" in told and "second.bin" not in told
    assert [path for path, _ in Server.requests] == ["/page", "/gone", "/good"]


def test_make_fetch_gives_up_without_a_network(preset_with, tmp_path, monkeypatch, capsys):
    """One attempt for a host, not one for each file; and all of them are told."""
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    tried = []
    def refuse(url, *_, **__):
        tried.append(url)
        raise OSError("no route to host")
    monkeypatch.setattr("bump.files.http_get", refuse)
    preset_with(*(Published(f"{i}.bin", f"http://{'elsewhere' if i == 2 else 'nowhere'}/{i}", 1, SHA256) for i in range(4)))
    with pytest.raises(SystemExit, match="lacks 4 inputs"):
        fetch_inputs("quick")
    assert tried == ["http://nowhere/0", "http://elsewhere/2"] and "0.bin could not be downloaded" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_needs_no_network(serve, tmp_path, monkeypatch):
    """And one that differs is an error, not a reason to download."""
    (tmp_path / "second").mkdir()
    (tmp_path / "second/net.bin").write_bytes(CONTENT)
    monkeypatch.setenv("BUMP_WEIGHTS", f"{tmp_path}:{tmp_path / 'second'}")
    assert fetch(serve("good")) == tmp_path / "second/net.bin"
    (tmp_path / "net.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="net.bin differs from the published net.bin .* delete it and get it again from http"):
        fetch(serve("good"))
    assert Server.requests == []

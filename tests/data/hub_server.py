"""A model hub on the loopback address, with faults to order."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class Hub:
    """One repository at one commit; `main` points at it."""

    repo_id: str
    files: dict[str, bytes]
    served: dict[str, bytes] = field(default_factory=dict)
    """content that goes out in place of the true one"""
    cut_once: set[str] = field(default_factory=set)
    """files whose next transfer stops in the middle"""
    down: set[str] = field(default_factory=set)
    """files that answer 500 once their transfer was cut"""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, file or route, Range header)"""
    url: str = ""

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def is_lfs(self, name: str) -> bool:
        return name.endswith((".safetensors", ".bin", "tokenizer.json"))

    def etag(self, name: str) -> str:
        content = self.files[name]
        return hashlib.sha256(content).hexdigest() if self.is_lfs(name) else git_sha1(content)

    def info(self) -> dict[str, object]:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, object] = {
                "rfilename": name, "size": len(content), "blobId": git_sha1(content),
            }
            if self.is_lfs(name):
                entry["lfs"] = {"sha256": self.etag(name), "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"id": self.repo_id, "modelId": self.repo_id, "sha": COMMIT, "private": False,
                "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                "cardData": {"license": "apache-2.0"}, "siblings": siblings}

    def ranges_of(self, name: str) -> list[str | None]:
        return [span for method, path, span in self.requests if (method, path) == ("GET", name)]

    def names_asked(self) -> set[str]:
        return {path for _, path, _ in self.requests}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        prefix = f"/{hub.repo_id}/resolve/{COMMIT}/"
        if path in (f"/api/models/{hub.repo_id}/revision/{r}" for r in ("main", COMMIT)):
            hub.requests.append((self.command, "info", None))
            self.reply(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})
        elif path.startswith(prefix) and path.removeprefix(prefix) in hub.files:
            self.send_file(path.removeprefix(prefix))
        else:
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})

    def send_file(self, name):
        hub, span = self.hub, self.headers.get("Range")
        hub.requests.append((self.command, name, span))
        content = hub.served.get(name, hub.files[name])
        if self.command == "GET" and name in hub.down and name not in hub.cut_once:
            self.reply(500, b"", {})
            return
        start = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if hub.is_lfs(name):
            headers["X-Linked-Etag"] = f'"{hub.etag(name)}"'
            headers["X-Linked-Size"] = str(len(content))
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if span else 200, content[start:], headers, name=name)

    def reply(self, status, body, headers, *, name=""):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.cut_once:
            self.hub.cut_once.discard(name)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.wfile.write(body)

"""An OpenAI-compatible server on loopback that plays a script."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str, int], Any]


def reply(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion as the API sends it."""
    content = {"role": "assistant", "content": text, **message}
    return {"choices": [{"index": 0, "message": content, "finish_reason": finish}]}


class Server(ThreadingHTTPServer):
    """Answers by ``script(prompt, tries)``: the prompt's text, and how often it came before.

    What the script returns is sent as JSON with status 200; a pair is (status, JSON); text is
    sent as it is; bytes are announced as twice as many and then the connection is cut.
    """

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.payloads: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/chat/completions"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the play."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = payload["messages"][-1]["content"]
        if isinstance(prompt, list):  # Anthropic's form
            prompt = prompt[0]["text"]
        with self.server.lock:
            self.server.payloads.append(payload)
            tries = self.server.tries[prompt]
            self.server.tries[prompt] += 1
        answer = self.server.script(prompt, tries)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        text = body if isinstance(body, str) else None
        data = body if isinstance(body, bytes) else (text or json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if text else "application/json")
        self.send_header("Content-Length", str(len(data) * (1 + isinstance(body, bytes))))
        self.end_headers()
        self.wfile.write(data)
        if isinstance(body, bytes):
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Keeps the log out of the tests' output."""


@contextmanager
def serve(script: Script) -> Iterator[Server]:
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

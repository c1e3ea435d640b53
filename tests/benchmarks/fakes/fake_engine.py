"""An adapter of an engine that gives tokens out of nothing. The option ``fault`` says what it does wrong."""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.cpu.engine import Answer, Command

DISTRIBUTIONS = ("pytest",)


class Offline:
    def __init__(self, setup):
        print("fake engine: words to stdout")
        self.fault = setup.options.get("fault")
        if self.fault == "no start":
            raise OSError("no such weights")
        if self.fault == "helper":
            print("helper", subprocess.Popen(["sleep", "60"]).pid, flush=True)

    def run(self, items, streams):
        if self.fault == "hang" or (self.fault == "hang later" and len(items) == 1):
            time.sleep(60)
        if self.fault == "exit":
            sys.exit(3)
        short = 1 if self.fault == "short" else 0
        return [Answer(0.0, [(0.01 * i, 1) for i in range(1, item.max_tokens + 1 - short)]) for item in items]

    def close(self):
        print("fake engine: closed")


def serve(setup, python, port):
    return Command([python, __file__, str(port), json.dumps(setup.options)])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options = {}

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "fake"}]}), "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and body["temperature"] == 0 and isinstance(body["prompt"][0], int)
        count = body["max_tokens"] - (1 if self.options.get("fault") == "short" else 0)
        events = [{"choices": [{"text": "x"}]}] * count
        events.append({"choices": [{"text": "", "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}})
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n",
                    "text/event-stream")

    def answer(self, text, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    Handler.options = json.loads(sys.argv[2])
    if Handler.options.get("fault") == "no start":
        sys.exit("no such weights")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

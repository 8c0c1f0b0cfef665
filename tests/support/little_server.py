"""A small inference server with vLLM's endpoints, in its own process, for tests of everything around such a server.

    python -m tests.support.little_server --model DIR --uds PATH [--die-after REQUESTS] [--sick]

It runs a real transformers model, returns real completions with their log-probabilities, and loads weights through
the real worker extension. It lacks vLLM itself: the engine, the fused parameters, the speed.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import socketserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from diloco.rl.server_extension import WeightsExtension


class LittleWorker(WeightsExtension):
    """The parts of a vLLM worker that the extension uses."""

    def __init__(self, directory: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model_config = SimpleNamespace(model=directory, dtype=torch.float32, hf_config=self.model.config)
        self.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace())
        self.device = torch.device("cpu")

    def reload_weights(self, weights_iterator: Any) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights_iterator:
            parameters[name].copy_(tensor)

    @torch.no_grad()
    def completed(self, asked: dict[str, Any], index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(asked.get("seed", 0) + index)
        ids, logprobs = list(asked["prompt"]), []
        eos = self.model.config.eos_token_id
        reason = "length"
        for _ in range(asked["max_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            values = torch.log_softmax(logits / asked.get("temperature", 1.0), -1)
            token = int(torch.multinomial(values.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(values[token]))
            if token == eos:
                reason = "stop"
                break
        return {
            "index": index,
            "finish_reason": reason,
            "token_ids": ids[len(asked["prompt"]) :],
            "logprobs": {"token_logprobs": logprobs},
        }


class SocketServer(socketserver.UnixStreamServer):
    """An HTTP server on a Unix socket."""

    # Of the requests of all threads of a client.
    request_queue_size = 128


def handler_of(
    worker: LittleWorker, arguments: argparse.Namespace
) -> type[http.server.BaseHTTPRequestHandler]:
    left = [arguments.die_after]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            card = {"id": arguments.model, "max_model_len": worker.model.config.max_position_embeddings}
            self.answer({"data": [card]} if path == "/v1/models" else None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = json.loads(body) if body else {}
            path = urlsplit(self.path).path
            if path == "/collective_rpc":
                result = getattr(worker, asked["method"])(**asked["kwargs"])
                self.answer({"results": [result]})
            elif path == "/v1/completions":
                if arguments.sick:
                    os.kill(os.getpid(), signal.SIGKILL)
                if arguments.die_after:
                    left[0] -= 1
                    if left[0] == 0 and not died_before(arguments.marks):
                        os.kill(os.getpid(), signal.SIGKILL)
                self.answer({"choices": [worker.completed(asked, n) for n in range(asked.get("n", 1))]})
            else:
                self.answer(None)

        def answer(self, content: Any) -> None:
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    return Handler


def died_before(marks: Path) -> bool:
    """Whether an earlier server has died here; records a death for the next call."""
    if marks.exists():
        return True
    marks.touch()
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument(
        "--die-after", type=int, default=0, help="SIGKILL in the middle of this request, once"
    )
    parser.add_argument("--marks", type=Path, default=Path("died"))
    parser.add_argument("--sick", action="store_true", help="healthy, and dead at the first request")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # A child process that outlives a killed server, as one of vLLM's does.
    if os.fork() == 0:
        signal.pause()
    worker = LittleWorker(arguments.model)
    with SocketServer(arguments.uds, handler_of(worker, arguments)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()

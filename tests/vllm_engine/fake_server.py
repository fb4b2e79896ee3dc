"""What TRL's client needs of a vLLM server: the completions depend on the prompt alone.

TRL sends weights by NCCL, so a real server cannot be trained against on CPU. `skip_nccl` leaves
that part out and nothing else.
"""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LENGTH = 6  # tokens of a completion
SERVED = {
    "vllm_mode": "server",
    "vllm_server_timeout": 0.0,
    "vllm_importance_sampling_correction": False,  # it would drop tokens that no model drew
    "lopti_eta": None,
    "lopti_quantile": 0.5,  # so that both phases have tokens, unlikely as these all are
}

GET = {
    "/health": {},
    "/v1/models": {"data": [{"id": "fake"}]},
    "/get_world_size": {"world_size": 1},
    "/server_info": {
        "vllm_config": {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
    },
}


def complete(prompt: list[int], n: int) -> list[dict]:
    rng = random.Random(str(prompt))
    choices = []
    for _ in range(n):
        ids = [rng.randrange(10, 500) for _ in range(LENGTH)]
        tokens = [f"token_id:{i}" for i in ids]
        choices.append(
            {
                "prompt_token_ids": prompt,
                "token_ids": ids,
                "logprobs": {
                    "tokens": tokens,
                    "token_logprobs": [-1.0] * LENGTH,
                    "top_logprobs": [{token: -1.0} for token in tokens],
                },
            }
        )
    return choices


class FakeServer:
    """Up within `with`. Vanishes at the `dies_at`-th POST of `dies_in`, or is busy that often."""

    def __init__(self, port=0, health=200, dies_in=None, dies_at=1, busy=0):
        self.health, self.dies_in, self.dies_at, self.busy = health, dies_in, dies_at, busy
        self.posts = []
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.http.server_close()

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                self.answer(GET[path], server.health if path == "/health" else 200)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                server.posts.append(self.path)
                if server.busy:
                    server.busy -= 1
                    return self.answer({}, 503)
                if self.path == server.dies_in and server.posts.count(self.path) == server.dies_at:
                    server.http.socket.close()  # no more connections; this one gets no answer
                    self.close_connection = True
                    return None
                choices = []
                if self.path == "/v1/completions":
                    for prompt in body["prompt"]:
                        choices += complete(prompt, body["n"])
                return self.answer({"choices": choices, "success": True})

            def answer(self, content, status=200):
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        return Handler


def skip_nccl(setattr=setattr):
    """Let TRL's client do everything but the transfer, and retry without the minute's wait."""
    from trl.generation import vllm_client

    def consume(iterator, **kwargs):
        for _ in iterator:
            pass

    setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    setattr(vllm_client, "packed_nccl_broadcast_producer", consume)
    retries = vllm_client.Retry

    def fast(**settings):
        return retries(**{**settings, "backoff_factor": 0.01})

    setattr(vllm_client, "Retry", fast)

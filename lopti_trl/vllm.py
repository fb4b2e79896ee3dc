"""What TRL leaves out around its vLLM engine: early checks, a seed, and an end when it dies."""

import http.client
import time
import urllib.error
import urllib.request
import warnings

from trl import GRPOConfig
from trl.import_utils import is_vllm_available

# serves as TRL 1.16 asks for
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --max-logprobs -1 "
    '--weight-transfer-config \'{"backend": "nccl"}\''
)


def require_vllm(args: GRPOConfig) -> None:
    """Raise before the model loads what TRL finds only afterwards: no usable vLLM, no server.

    Raises:
        ImportError: vLLM is missing, or of a version that TRL does not support.
        ConnectionError: no server within `vllm_server_timeout` seconds.
    """
    if not args.use_vllm:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = is_vllm_available()
    if not is_available:
        raise ImportError(
            "use_vllm=True, but vLLM is not installed. Install it (pip install 'lopti-trl[vllm]'), "
            "or set use_vllm to false."
        )
    if caught:  # TRL names its range and the version that is here, and would go on
        raise ImportError(
            f"{caught[0].message} Do so (pip install 'lopti-trl[vllm]'), or set use_vllm to false."
        )
    if args.vllm_mode == "server" and args.process_index == 0:
        wait_for_server(args)


def server_url(args: GRPOConfig) -> str:
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


def wait_for_server(args: GRPOConfig) -> None:
    url, deadline = server_url(args), time.monotonic() + args.vllm_server_timeout
    while (problem := what_is_wrong(f"{url}/health")) is not None:
        if time.monotonic() >= deadline:
            raise ConnectionError(
                f"No vLLM server is up at {url} after {args.vllm_server_timeout:g} s: {problem}. "
                f"Start one ({SERVE}), or set vllm_server_base_url (or vllm_server_host="
                f"{args.vllm_server_host} and vllm_server_port={args.vllm_server_port}) to where "
                "it is. vllm_server_timeout says how long to wait."
            )
        time.sleep(1)


def what_is_wrong(url: str) -> str | None:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        return str(error)
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    return None


class SharedFailure:
    """TRL's client of a vLLM server, with failures that every process learns of.

    TRL calls it on the first process while the others wait for the completions, for ever if it
    raises. This one raises nothing: once a call failed, there are no completions.
    """

    def __init__(self, client):
        self.client = client
        self.failure: Exception | None = None

    def __getattr__(self, name):
        return getattr(self.client, name)

    def _attempt(self, method, *args, **kwargs):
        if self.failure is not None:
            return None
        try:
            return method(*args, **kwargs)
        except Exception as error:
            self.failure = error

    def update_named_params(self, metadata, named_params):
        self._attempt(self.client.update_named_params, metadata, named_params)
        for _ in named_params:  # every process takes part in gathering and unmerging them
            pass

    def reset_prefix_cache(self):
        self._attempt(self.client.reset_prefix_cache)

    def generate(self, **kwargs):
        nothing = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        return self._attempt(self.client.generate, **kwargs) or nothing

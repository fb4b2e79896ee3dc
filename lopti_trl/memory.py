"""How much memory a GRPO run takes: closed formulas on the model's sizes, before any weight loads.

P = parameters, P_t = trainable ones, n = processes, T = tokens of a micro-batch (padding included),
h / i / q / v / V = width of the hidden state / MLP / queries / keys / vocabulary, L = sequence
length. Results are in bytes per GPU unless said otherwise; 1 GB = 1e9 bytes. Every number is an
upper estimate of what is alive at once, for a dense decoder with SDPA or flash attention.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

TILE_TOKENS, TILE_VOCABULARY = 4096, 32768  # of TRL's fused head: kernels/chunked_logprob.py
REDUCE_BUCKET, LIVE_PARAMETERS = 500_000_000, 1_000_000_000  # DeepSpeed's defaults, in elements
VLLM_OVERHEAD = 1.5e9  # activations and CUDA graphs of an engine: a guess, models differ


class ModelSize(NamedTuple):
    """What the formulas need of a model, counted on the meta device."""

    parameters: int
    trainable: int
    quantizable: int  # weights of linear layers but the head: what bitsandbytes packs
    largest_layer: int  # parameters of a decoder layer
    layers: int
    hidden: int
    intermediate: int
    queries: int  # heads * head_dim
    keys: int  # key-value heads * head_dim
    heads: int
    vocabulary: int
    tied: bool  # head and embedding are one matrix
    max_length: int


class Setting(NamedTuple):
    """What the formulas need of a recipe and its launch, per process."""

    sharding: str  # none, ddp, fsdp, zero1, zero2 or zero3
    processes: int
    weight_bytes: int  # of a loaded weight: 4 or 2
    compute_bytes: int  # under autocast: 4 or 2
    optimizer_bytes: float  # per trainable parameter that is kept in fp32
    micro_batch: int
    prompt_length: int
    completion_length: int
    checkpointing: bool
    rollouts: int  # completions of a rollout batch on one process
    adapter: bool = False
    dropout: bool = False  # in the adapter
    bits: int = 16  # of the base weights; 4 or 8 if quantized
    reference: bool = False  # a second model for the KL term
    offload_weights: bool = False
    offload_optimizer: bool = False

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    @property
    def sequence(self) -> int:
        return self.prompt_length + self.completion_length


def measure_model(config: PretrainedConfig, peft_config=None) -> ModelSize:
    """Exact parameter counts: the model is built without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    layers = max(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len
    )
    parameters = trainable = model.num_parameters()
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    if peft_config is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, peft_config)
        trainable, parameters = model.get_nb_trainable_parameters()
    text = config.get_text_config()
    if not getattr(text, "intermediate_size", None):
        raise ValueError(f"{text.model_type} is no dense decoder with an intermediate_size")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelSize(
        parameters=parameters,
        trainable=trainable,
        quantizable=linear,
        largest_layer=largest,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        queries=text.num_attention_heads * head_dim,
        keys=key_heads * head_dim,
        heads=text.num_attention_heads,
        vocabulary=text.vocab_size,
        tied=bool(config.tie_word_embeddings),
        max_length=text.max_position_embeddings,
    )


def quantized_bytes(bits: int) -> float:
    """Bytes of a quantized weight: NF4 is 4 bits and an fp32 scale per 64 weights."""
    return {4: 0.5 + 4 / 64, 8: 1.0}[bits]


def weight_bytes(size: ModelSize, setting: Setting) -> float:
    """Frozen and trainable weights as held between steps.

    Without sharding P b; FSDP2 shards (P - P_t) b + 4 P_t over n, since accelerate keeps trainable
    ones in fp32; ZeRO holds 16-bit copies: 2 P, and ZeRO-3 2 P / n.
    """
    frozen, trainable = size.parameters - size.trainable, size.trainable
    base = float(setting.weight_bytes)
    if setting.sharding.startswith("zero"):
        base = own = float(setting.compute_bytes)
    elif setting.bits < 16:
        own = 2.0  # TRL casts adapters of a quantized model to bf16
    elif setting.adapter or setting.sharding == "fsdp":
        own = 4.0  # PEFT and accelerate cast what trains to fp32
    else:
        own = base
    total = frozen * base + trainable * own
    if setting.bits < 16:
        total -= size.quantizable * (base - quantized_bytes(setting.bits))
    if setting.offload_weights:
        return 0.0
    return total / (setting.processes if setting.sharding in ("fsdp", "zero3") else 1)


def reference_bytes(size: ModelSize, setting: Setting) -> float:
    """The frozen model of the KL term: like the policy's weights, without gradients."""
    if not setting.reference:
        return 0.0
    base = setting.compute_bytes if setting.sharding.startswith("zero") else setting.weight_bytes
    sharded = setting.sharding in ("fsdp", "zero3")
    return size.parameters * base / (setting.processes if sharded else 1)


def gradient_bytes(size: ModelSize, setting: Setting) -> float:
    """Gradients at their largest, in the optimizer step.

    none P_t b, DDP twice that (its buckets are copies), FSDP2 4 P_t / n; ZeRO-1 4 P_t, ZeRO-2
    (2 + 4) P_t / n, ZeRO-3 4 P_t / n: DeepSpeed's own estimators, estimate_zero*_model_states.
    """
    own = 2 if setting.bits < 16 else 4 if setting.adapter else setting.weight_bytes
    per_parameter = {
        "none": own,
        "ddp": 2 * own,
        "fsdp": 4 / setting.processes,
        "zero1": 4,
        "zero2": 6 / setting.processes,
        "zero3": 4 / setting.processes,
    }[setting.sharding]
    if setting.offload_weights or (setting.offload_optimizer and setting.sharding != "zero1"):
        return 0.0
    return size.trainable * per_parameter


def optimizer_bytes(size: ModelSize, setting: Setting) -> float:
    """AdamW's two moments, in the parameters' type; ZeRO adds fp32 master weights.

    none and DDP 8 P_t (4 P_t for 16-bit parameters), FSDP2 8 P_t / n, ZeRO (8 + 4) P_t / n.
    """
    moments = setting.optimizer_bytes
    if setting.offload_optimizer or setting.offload_weights:
        return 0.0
    if setting.sharding.startswith("zero"):
        return size.trainable * (moments + 4) / setting.processes
    if setting.sharding == "fsdp":
        return size.trainable * moments / setting.processes
    halved = setting.bits < 16 or (setting.weight_bytes == 2 and not setting.adapter)
    return size.trainable * (min(moments, 4) if halved else moments)


def working_bytes(size: ModelSize, setting: Setting) -> float:
    """Copies of parameters that the update makes.

    Autocast keeps 16-bit casts of fp32 weights during a forward pass; FSDP2 gathers two layers, the
    embedding and the head; ZeRO fills a reduce bucket, and ZeRO-3 keeps up to 1e9 parameters.
    """
    c = setting.compute_bytes
    matrices = size.vocabulary * size.hidden * (1 if size.tied else 2)
    if setting.sharding == "fsdp":
        return c * (2 * size.largest_layer + matrices)
    if setting.sharding.startswith("zero"):
        bucket = c * min(size.trainable, REDUCE_BUCKET)
        return bucket + c * min(size.parameters, LIVE_PARAMETERS) * (setting.sharding == "zero3")
    if setting.weight_bytes > c and not setting.checkpointing:
        return float(c * size.parameters)  # the graph holds the casts until the backward pass
    casts = setting.weight_bytes > c or (setting.adapter and setting.bits == 16)
    return float(c * size.trainable * casts)


def layer_bytes_per_token(size: ModelSize, setting: Setting) -> float:
    """What one decoder layer keeps for its backward pass, in bytes per token.

    a h + c (4 i + 4 q) + 4 heads + 8 + c L for compute type c: two RMSNorms in fp32 and the inputs
    of the linear layers (a = 16; 26 if the hidden state is fp32 and casts are made; 24 without
    autocast), gate, activation, up and product of the MLP, queries, repeated keys and values, the
    attention's output, log-sum-exp, norms and the padding mask. Counted with saved_tensors_hooks.
    Adapters keep an input of their own for every linear layer, with dropout in fp32 too.
    """
    c, h, i, q = setting.compute_bytes, size.hidden, size.intermediate, size.queries
    norms_and_inputs = {(2, 2): 16, (4, 2): 26, (4, 4): 24}[hidden_state_bytes(setting), c]
    total = norms_and_inputs * h + c * (4 * i + 4 * q) + 4 * size.heads + 8 + c * setting.sequence
    if setting.adapter:
        total += 6 * h + (4 * (5 * h + q + i) if setting.dropout else 0)
    return total


def hidden_state_bytes(setting: Setting) -> int:
    """The residual stream is fp32 if autocast works on fp32 weights."""
    sharded = setting.sharding == "fsdp" or setting.sharding.startswith("zero")
    return setting.compute_bytes if sharded else max(setting.weight_bytes, setting.compute_bytes)


def activation_bytes(size: ModelSize, setting: Setting) -> float:
    """Activations of a micro-batch at the start of its backward pass.

    With checkpointing the input of every layer and the insides of one; without, the insides of all.
    On top: the final norm, and gradients in flight of twice the MLP's and the hidden state's width.
    """
    layer = layer_bytes_per_token(size, setting)
    if setting.checkpointing:
        stored = size.layers * size.hidden * hidden_state_bytes(setting) + layer
    else:
        stored = size.layers * layer
    in_flight = 2 * setting.compute_bytes * (size.intermediate + size.hidden)
    return setting.tokens * (stored + 6 * size.hidden + in_flight)


def head_bytes(size: ModelSize, setting: Setting) -> float:
    """TRL's fused head on one micro-batch: no (tokens, V) logits, but tiles of 4096 x 32768.

    Tile, scored hidden states and their fp32 gradient; if the head trains, its fp32 gradient 4 V h.
    """
    scored = setting.micro_batch * setting.completion_length
    tile = min(scored, TILE_TOKENS) * min(size.vocabulary, TILE_VOCABULARY)
    total = tile * setting.compute_bytes
    total += scored * size.hidden * (hidden_state_bytes(setting) + 4)
    return total + (0 if setting.adapter else 4 * size.vocabulary * size.hidden)


def kv_bytes_per_token(size: ModelSize, element_bytes: int = 2) -> int:
    """Keys and values of one token in every layer: 2 layers v bytes."""
    return 2 * size.layers * size.keys * element_bytes


def engine_weight_bytes(size: ModelSize, setting: Setting, tensor_parallel: int = 1) -> float:
    """vLLM's copy of the merged weights, 16 bits each or quantized as the policy's."""
    total = 2.0 * (size.parameters - (size.trainable if setting.adapter else 0))
    if setting.bits < 16:
        total -= size.quantizable * (2 - quantized_bytes(setting.bits))
    return total / tensor_parallel


def gathered_bytes(size: ModelSize, setting: Setting, whole_model: bool) -> float:
    """Weights that ZeRO-3 and FSDP2 gather for a rollout: all of them, or two layers at a time."""
    if setting.sharding not in ("zero3", "fsdp"):
        return 0.0
    piece = max(2 * size.largest_layer, size.vocabulary * size.hidden)
    return float(setting.compute_bytes * (size.parameters if whole_model else piece))


def checkpoint_bytes(size: ModelSize, setting: Setting, weights_only: bool = False) -> float:
    """One checkpoint on disk, all processes together: the model, then what resuming needs.

    Model: P b, ZeRO's 2 P, or the adapter. Optimizer: two moments; ZeRO 12 P_t and the 16-bit
    weights once more.
    """
    zero = setting.sharding.startswith("zero")
    one_process = setting._replace(
        sharding="none", processes=1, offload_weights=False, offload_optimizer=False
    )
    own = setting.compute_bytes if zero else setting.weight_bytes
    if setting.adapter or setting.sharding == "fsdp":
        own = 4
    model = own * size.trainable
    if weights_only:
        return model
    if zero:
        return model + size.trainable * (setting.optimizer_bytes + 4 + setting.compute_bytes)
    return model + optimizer_bytes(size, one_process)


class Engine(NamedTuple):
    """vLLM beside the trainer on the same GPUs."""

    share: float  # bytes of a GPU that it may take
    sleeps: bool  # gives them back during the update
    tensor_parallel: int
    length: int  # tokens of its longest sequence


class Row(NamedTuple):
    """One line of the memory table: bytes per GPU during the update and during a rollout."""

    name: str
    update: float
    rollout: float
    of: str  # what the number is made of, for a reader


def memory_table(
    size: ModelSize, setting: Setting, engine: Engine | None, generates: bool, gathers: bool
) -> list[Row]:
    """`generates`: with transformers' generate; `gathers`: the whole model around a rollout."""
    cache = kv_bytes_per_token(size, hidden_state_bytes(setting))
    tokens = setting.rollouts * setting.sequence if generates else 0
    share = engine.share if engine else 0.0
    lasting = (
        ("weights", weight_bytes(size, setting), f"{size.parameters / 1e9:.3g}e9 parameters"),
        ("reference", reference_bytes(size, setting), "the frozen model of the KL term"),
        (
            "gradients",
            gradient_bytes(size, setting),
            f"{size.trainable / 1e6:,.3f}e6 trainable parameters",
        ),
        ("optimizer", optimizer_bytes(size, setting), "moments and master weights"),
    )
    checkpointing = "with" if setting.checkpointing else "without"
    return [
        *(Row(name, value, value, of) for name, value, of in lasting),
        Row(
            "copies",
            working_bytes(size, setting),
            gathered_bytes(size, setting, gathers),
            "of parameters: casts, gathered layers, buckets",
        ),
        Row(
            "activations",
            activation_bytes(size, setting),
            0.0,
            f"{setting.micro_batch} x {setting.sequence} tokens, {checkpointing} checkpointing",
        ),
        Row(
            "head",
            head_bytes(size, setting),
            0.0,
            f"tiles of {TILE_TOKENS} tokens x {TILE_VOCABULARY}, not {size.vocabulary} logits each",
        ),
        Row(
            "key-value cache",
            0.0,
            float(tokens * cache),
            f"{tokens} tokens x {cache} bytes" if generates else "vLLM has its own",
        ),
        Row(
            "vLLM",
            0.0 if engine and engine.sleeps else share,
            share,
            f"its share; weights {engine_weight_bytes(size, setting) / 1e9:.3g} GB"
            if engine
            else "none on these GPUs",
        ),
    ]


def engine_sequences(size: ModelSize, setting: Setting, engine: Engine) -> float:
    """How many longest sequences the engine's key-value cache holds at once."""
    weights = engine_weight_bytes(size, setting, engine.tensor_parallel)
    room = engine.share - weights - VLLM_OVERHEAD
    return room / (engine.length * kv_bytes_per_token(size) / engine.tensor_parallel)

"""A real model whose chance of success is known."""

import math

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ANSWERS = ["\\boxed{1}", "\\boxed{2}", "\\boxed{3}", "none"]
CHANCES = {  # of each answer, by the last word of the prompt
    "easy": [0.7, 0.2, 0.05, 0.05],
    "hard": [0.15, 0.6, 0.2, 0.05],
    "<unk>": [0.3, 0.4, 0.2, 0.1],
}


def make_rigged() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The model, which gives an answer of one word and ends, and its tokenizer.

    Attention and MLP give zero, so that the head sees the last word alone.
    """
    words = ["<pad>", "<eos>", *CHANCES, *ANSWERS, *(f"q{i}" for i in range(7))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    width = len(words)
    config = Qwen2Config(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    logits = torch.full((width, width), -30.0)  # of the next word, by word
    for word, chances in CHANCES.items():
        for answer, chance in zip(ANSWERS, chances, strict=True):
            logits[vocab[answer], vocab[word]] = math.log(chance)
    for answer in ANSWERS:
        logits[1, vocab[answer]] = 0.0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(width))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits / math.sqrt(width))  # the last norm is sqrt(width)
    return model, tokenizer
